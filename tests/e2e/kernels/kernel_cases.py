"""What Hypothesis draws for the conformance tests: shapes, strides, dtypes, ids and patterns of logits."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import torch

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ID_DTYPES = st.sampled_from([torch.int32, torch.int64])
SEEDS = st.integers(0, 2**31 - 1)

#: Around the interpreter's tiles (64 and 128 tokens), around words of 32 bits, and not a multiple of anything.
VOCABULARIES = st.one_of(
    st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 320]),
    st.integers(1, 400),
)

#: Elements between the end of a row and the start of the next; multiples of 8 keep rows aligned.
GAPS = st.sampled_from([0, 0, 1, 3, 8, 32])

PATTERNS = st.sampled_from(
    ["normal", "large", "ties", "few finite", "first tile masked", "all masked", "one finite", "nan", "+inf"]
)


@dataclass(frozen=True)
class Logits:
    """Drawn logits: values on the CPU, and the gap between rows they are to be placed with."""

    values: torch.Tensor
    gap: int
    pattern: str
    generator: torch.Generator

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.values.shape[1]

    def ids(self, *shape: int, dtype: torch.dtype, strangers: bool = True) -> torch.Tensor:
        """Token ids, some of them outside the vocabulary if ``strangers``."""
        low, high = (-2, self.vocab_size + 3) if strangers else (0, self.vocab_size)
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)


@st.composite
def logits(draw: st.DrawFn, max_rows: int = 5, patterns: st.SearchStrategy[str] = PATTERNS) -> Logits:
    """Logits whose special rows stand among ordinary ones."""
    rows, vocab_size, gap = draw(st.integers(0, max_rows)), draw(VOCABULARIES), draw(GAPS)
    dtype, pattern, seed = draw(DTYPES), draw(patterns), draw(SEEDS)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, vocab_size, generator=generator) * 4
    if rows:
        _strike(values, int(torch.randint(0, rows, (1,), generator=generator)), pattern, generator)
    return Logits(values.to(dtype), gap, pattern, generator)


def _strike(values: torch.Tensor, row: int, pattern: str, generator: torch.Generator) -> None:
    """Give one row its pattern."""
    vocab_size = values.shape[1]
    somewhere = int(torch.randint(0, vocab_size, (1,), generator=generator))
    if pattern == "large":
        values[row] *= 1e4
    elif pattern == "ties":
        values[row] = torch.randint(-2, 3, (vocab_size,), generator=generator).float()
    elif pattern == "few finite":
        values[row, torch.rand(vocab_size, generator=generator) < 0.9] = float("-inf")
    elif pattern == "first tile masked":
        values[row, :64] = float("-inf")
    elif pattern == "all masked":
        values[row] = float("-inf")
    elif pattern == "one finite":
        values[row] = float("-inf")
        values[row, somewhere] = 1.5
    elif pattern in ("nan", "+inf"):
        values[row, somewhere] = float(pattern)


def random_words(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """int32 words with every bit set with probability one half."""
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
