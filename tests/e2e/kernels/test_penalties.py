"""Laws of apply_penalties: tokens that were seen are penalised as defined, all others keep their logit bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from hypothesis import given

from vllm_ascend_ext.kernels import apply_penalties
from vllm_ascend_ext.kernels.reference import penalties as reference

from .kernel_cases import ID_DTYPES, Logits, logits, random_words
from .kernel_checks import Impl, assert_close, assert_repeatable, assert_same, guarded

PENALTIES = st.tuples(
    st.sampled_from([1.0, 1.0, 0.5, 1.3, 2.0]),
    st.sampled_from([0.0, 0.0, -0.7, 0.4, 2.0]),
    st.sampled_from([0.0, 0.0, -1.5, 0.3, 2.0]),
)
#: Penalties and logits of ordinary size, so that a result's tolerance isn't used up by cancellation.
ORDINARY = st.sampled_from(["normal", "ties", "few finite", "all masked", "nan", "+inf"])


@dataclass(frozen=True)
class Rows:
    """The arguments beside the logits."""

    mapping: torch.Tensor
    token_ids: torch.Tensor
    local_pos: torch.Tensor
    penalties: tuple[torch.Tensor, ...]
    mask: torch.Tensor
    counts: torch.Tensor


@st.composite
def rows_of_requests(draw: st.DrawFn) -> tuple[Logits, Rows]:
    """Each request has 1 to 6 neighbouring rows; draft tokens repeat, are counted already, or are strangers."""
    drawn = draw(logits(max_rows=0, patterns=ORDINARY))
    lengths = draw(st.lists(st.integers(1, 6), max_size=3))
    rows, slots = sum(lengths), max(1, len(lengths) + 1)
    values = torch.randn(rows, drawn.vocab_size, generator=drawn.generator) * 4
    if rows and drawn.pattern in ("nan", "+inf", "all masked"):
        values[0] = float({"all masked": "-inf"}.get(drawn.pattern, drawn.pattern))
    drawn = Logits(values.to(drawn.values.dtype), drawn.gap, drawn.pattern, drawn.generator)
    owners = draw(st.permutations(range(slots)))
    owners = [draw(st.sampled_from([owner, owner, owner, -1])) for owner in owners]
    mapping = [owner for owner, length in zip(owners, lengths, strict=False) for _ in range(length)]
    local_pos = [position for length in lengths for position in range(length)]
    id_dtype = draw(ID_DTYPES)
    token_ids = drawn.ids(rows, dtype=id_dtype)
    if draw(st.booleans()):
        token_ids = token_ids.clamp(0, 3)
    chosen = [draw(PENALTIES) for _ in range(slots)]
    penalties = tuple(torch.tensor(column, dtype=torch.float32) for column in zip(*chosen, strict=True))
    sparse = torch.rand(slots, drawn.vocab_size, generator=drawn.generator) < draw(st.sampled_from([0.02, 0.5]))
    counts = torch.randint(0, 4, (slots, drawn.vocab_size), generator=drawn.generator, dtype=torch.int32) * sparse
    mask = random_words(slots, -(-drawn.vocab_size // 32), generator=drawn.generator)
    if draw(st.booleans()):
        mask[:] = 0
    return drawn, Rows(
        torch.tensor(mapping, dtype=id_dtype),
        token_ids,
        torch.tensor(local_pos, dtype=id_dtype),
        penalties,
        mask,
        counts,
    )


@given(case=rows_of_requests())
def test_seen_tokens_are_penalised_and_no_other(impl: Impl, case: tuple[Logits, Rows]) -> None:
    drawn, rows = case
    expected = drawn.values.clone()
    arguments = (rows.mapping, rows.token_ids, rows.local_pos, *rows.penalties)
    reference.apply_penalties(expected, *arguments, rows.mask, rows.counts)
    with guarded(impl) as guard:
        placed = guard.place(drawn.values, drawn.gap)
        bins = (guard.place(rows.mask, drawn.gap), guard.place(rows.counts, drawn.gap))
        apply_penalties(placed, *(guard.place(argument) for argument in arguments), *bins, impl=impl.forced)
    assert_close(placed, expected)
    unseen = (rows.counts == 0)[rows.mapping.clamp(min=0).long()] & ~_in_prompt(rows, drawn.vocab_size)
    for row in range(drawn.rows):
        first = row - int(rows.local_pos[row])
        drafts = rows.token_ids[first + 1 : row + 1].long()
        unseen[row, drafts[(drafts >= 0) & (drafts < drawn.vocab_size)]] = False
    unseen |= (rows.mapping < 0)[:, None]
    assert_same(placed.cpu()[unseen], drawn.values[unseen])
    assert_same(bins[0], rows.mask)
    assert_same(bins[1], rows.counts)


def _in_prompt(rows: Rows, vocab_size: int) -> torch.Tensor:
    token = torch.arange(vocab_size)
    return ((rows.mask[rows.mapping.clamp(min=0).long()][:, token // 32] >> (token % 32)) & 1) == 1


def _one_slot(
    impl: Impl,
    values: torch.Tensor,
    drafts: list[int],
    counts: dict[int, int],
    prompt: list[int],
    penalties: list[float],
) -> torch.Tensor:
    """The penalised logits of one request, on the CPU, from a guarded run."""
    rows, vocab_size = values.shape
    base = torch.zeros(1, vocab_size, dtype=torch.int32)
    for token, count in counts.items():
        base[0, token] = count
    words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int64)
    for token in prompt:
        words[0, token // 32] |= 1 << (token % 32)
    with guarded(impl) as guard:
        placed = guard.place(values)
        apply_penalties(
            placed,
            guard.place(torch.zeros(rows, dtype=torch.int32)),
            guard.place(torch.tensor(drafts)),
            guard.place(torch.arange(rows)),
            *(guard.place(torch.tensor([penalty])) for penalty in penalties),
            guard.place(words.to(torch.int32)),
            guard.place(base),
            impl=impl.forced,
        )
    return placed.cpu()


def test_a_row_counts_the_drafts_before_it_and_not_the_last_sampled_token_again(each: Impl) -> None:
    """B04: base count of 9 is 1, drafts [9, 4, 9]: rows see 9 once, once, twice, and 4 never, once, once."""
    found = _one_slot(each, torch.zeros(3, 40), [9, 4, 9], {9: 1}, [], [1.0, 1.0, 0.0])
    assert (-found[:, 9]).tolist() == [1, 1, 2]
    assert (-found[:, 4]).tolist() == [0, 1, 1]
    assert found.count_nonzero() == 5


def test_each_penalty_alone(each: Impl) -> None:
    """Repetition hits prompt and output and turns on the sign; frequency and presence hit the output alone."""
    values = torch.tensor([[4.0, -4.0, 4.0, -4.0, 4.0]])
    seen = {"counts": {0: 3, 1: 2}, "prompt": [1, 2, 3]}
    found = {name: _one_slot(each, values, [0], penalties=p, **seen)[0].tolist() for name, p in (
        ("repetition", [2.0, 0.0, 0.0]), ("frequency", [1.0, 0.5, 0.0]), ("presence", [1.0, 0.0, 0.25]),
    )}  # fmt: skip
    assert found["repetition"] == [2.0, -8.0, 2.0, -8.0, 4.0]
    assert found["frequency"] == [2.5, -5.0, 4.0, -4.0, 4.0]
    assert found["presence"] == [3.75, -4.25, 4.0, -4.0, 4.0]


def test_bit_31_and_the_last_token(each: Impl) -> None:
    """The sign bit of a word, and a vocabulary that fills no word."""
    found = _one_slot(each, torch.ones(1, 70), [0], {}, [31, 63, 69], [2.0, 0.0, 0.0])
    assert (found[0] == 0.5).nonzero().flatten().tolist() == [31, 63, 69]


def test_more_drafts_than_are_looked_at_together(each: Impl) -> None:
    number = 40 if each.on_device else 10
    found = _one_slot(each, torch.zeros(number, 20), [7] * number, {}, [], [1.0, 1.0, 0.0])
    assert (-found[:, 7]).tolist() == list(range(number))


def _many(impl: Impl, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(8, size, generator=generator)
    arguments = [
        torch.tensor([0, 0, 0, 1, 1, 2, 2, 3]),
        torch.randint(0, size, (8,), generator=generator),
        torch.tensor([0, 1, 2, 0, 1, 0, 1, 0]),
        torch.tensor([1.2, 1.0, 0.8, 1.5]),
        torch.tensor([0.3, 0.5, 0.0, 0.0]),
        torch.tensor([0.0, 0.1, 0.2, 0.0]),
        random_words(4, -(-size // 32), generator=generator),
        torch.randint(0, 3, (4, size), generator=generator, dtype=torch.int32),
    ]
    return values.to(impl.device), [argument.to(impl.device) for argument in arguments]


def test_twenty_runs_give_the_same_bits(impl: Impl) -> None:
    """B28."""
    values, arguments = _many(impl, 150_001 if impl.on_device else 70)

    def run() -> torch.Tensor:
        result = values.clone()
        apply_penalties(result, *arguments, impl=impl.forced)
        return result

    assert_repeatable(run)


def test_permuting_the_requests_permutes_the_results(impl: Impl) -> None:
    values, arguments = _many(impl, 300)
    order = torch.tensor([7, 3, 4, 5, 6, 0, 1, 2], device=impl.device)
    straight, permuted = values.clone(), values[order]
    apply_penalties(straight, *arguments, impl=impl.forced)
    apply_penalties(permuted, *(a[order] for a in arguments[:3]), *arguments[3:], impl=impl.forced)
    assert_same(permuted, straight[order])
