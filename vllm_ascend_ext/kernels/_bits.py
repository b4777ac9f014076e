"""Bits of packed words as blocks of booleans, as each device unpacks them fastest; must never know what a bit means.

Bit b of word w stands for token 32 * w + b. A vector unit has no shift by a different amount in each lane, so on Ascend
every word meets all 32 single-bit masks; a GPU thread takes the few bits of its own group of tokens out of a word.
"""

from __future__ import annotations

from ._triton import tl, triton


@triton.jit
def single_bits():
    """The 32 masks of one bit each; made by the scalar unit on Ascend, so made once a kernel."""
    return 1 << tl.arange(0, 32)


@triton.jit
def unpack_words(words, single, WORDS: tl.constexpr):
    """Booleans [32 * WORDS] of int32 words [WORDS]; ``single`` comes from ``single_bits``."""
    return tl.reshape((words[:, None] & single[None, :]) != 0, (32 * WORDS,))


@triton.jit
def load_groups(words_ptr, num_words, first_token, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """The bits of GROUPS consecutive groups of SIZE tokens, in the low bits of int32 [GROUPS]; 0 where there's no word.

    ``first_token`` is a multiple of 32, SIZE a power of two of at most 16.
    """
    token = first_token + tl.arange(0, GROUPS) * SIZE
    word = tl.load(words_ptr + (token >> 5), mask=(token >> 5) < num_words, other=0)
    return (word >> (token & 31)) & ((1 << SIZE) - 1)


@triton.jit
def unpack_groups(groups, SIZE: tl.constexpr):
    """Booleans [GROUPS, SIZE] of ``load_groups``'s result."""
    return ((groups[:, None] >> tl.arange(0, SIZE)[None, :]) & 1) != 0
