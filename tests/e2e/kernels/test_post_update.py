"""Laws of post_update: a request's state after a step is what its tokens make of it, and no other slot is touched."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from vllm_ascend_ext.kernels import post_update
from vllm_ascend_ext.kernels.reference import request_update as reference

from .kernel_cases import GAPS, ID_DTYPES, SEEDS
from .kernel_checks import Guard, Impl, assert_repeatable, assert_same, guarded


@dataclass(frozen=True)
class Step:
    """Arguments by name, on the CPU; those that are written, and the gaps between rows."""

    inputs: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor | None]
    gap: int

    def placed(self, guard: Guard) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]:
        def place(value: torch.Tensor | None) -> torch.Tensor | None:
            if value is None:
                return None
            return guard.place(value, self.gap if value.dim() == 2 and value.shape[1] > 1 else 0)

        return {k: place(v) for k, v in self.inputs.items()}, {k: place(v) for k, v in self.state.items()}

    def after(self) -> dict[str, torch.Tensor | None]:
        """The state that the reference makes of it."""
        state = {name: value if value is None else value.clone() for name, value in self.state.items()}
        reference.post_update(**self.inputs, **state)
        return state


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Skipped rows, absent inputs, tokens that repeat or are strangers, buffers that fill up to the last place."""
    generator = torch.Generator().manual_seed(draw(SEEDS))
    rows, width, vocab_size = draw(st.integers(0, 7)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 40]))
    slots, length = rows + draw(st.integers(1, 3)), 24
    index_dtype, token_dtype = draw(ID_DTYPES), draw(ID_DTYPES)

    def randint(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    mapping = torch.tensor(draw(st.permutations(range(slots)))[:rows], dtype=index_dtype)
    mapping[randint(0, 4, rows) == 0] = -1
    with_counts, with_queries, drafts = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([None, 0, 1, 4]))
    total_len = randint(0, length - width + 1, slots)
    total_len[randint(0, 3, slots) == 0] = length - width
    queries = torch.cumsum(randint(0, 5, rows + 1 + draw(st.integers(0, 3))), 0).to(torch.int32)
    return Step(
        inputs={
            "idx_mapping": mapping,
            "sampled_tokens": randint(-1, vocab_size + 2, rows, width, dtype=token_dtype),
            "num_sampled": randint(0, width + 1, rows),
            "num_rejected": randint(0, 4, rows),
            "query_start_loc": queries if with_queries else None,
            "draft_tokens": None if drafts is None else randint(0, 99, rows, drafts, dtype=token_dtype),
        },
        state={
            "num_computed_tokens": randint(0, 9, slots),
            "last_sampled_tokens": randint(0, 9, *((slots, 1) if draw(st.booleans()) else (slots,)), dtype=token_dtype),
            "output_bin_counts": randint(0, 9, slots, vocab_size) if with_counts else None,
            "all_token_ids": randint(0, 9, slots, length),
            "total_len": total_len,
            "draft_tokens_out": randint(0, 9, slots, drafts or 0, dtype=token_dtype),
        },
        gap=draw(GAPS),
    )


@given(step=steps())
def test_the_state_is_what_the_tokens_make_of_it(impl: Impl, step: Step) -> None:
    _compare(impl, step)


def _compare(impl: Impl, step: Step) -> dict[str, torch.Tensor | None]:
    expected = step.after()
    with guarded(impl) as guard:
        inputs, state = step.placed(guard)
        post_update(**inputs, **state, impl=impl.forced)
    for name, value in expected.items():
        if value is not None:
            assert_same(state[name], value)
    for name, value in step.inputs.items():
        if value is not None:
            assert_same(inputs[name], value)
    return state


def _step(
    mapping: list[int], sampled: list[list[int]], num_sampled: list[int], num_rejected: list[int], slots: int = 3,
    total_len: list[int] | None = None, queries: list[int] | None = None, counts: bool = True, length: int = 16,
) -> Step:  # fmt: skip
    return Step(
        inputs={
            "idx_mapping": torch.tensor(mapping, dtype=torch.int32),
            "sampled_tokens": torch.tensor(sampled),
            "num_sampled": torch.tensor(num_sampled, dtype=torch.int32),
            "num_rejected": torch.tensor(num_rejected, dtype=torch.int32),
            "query_start_loc": None if queries is None else torch.tensor(queries, dtype=torch.int32),
            "draft_tokens": None,
        },
        state={
            "num_computed_tokens": torch.zeros(slots, dtype=torch.int32),
            "last_sampled_tokens": torch.full((slots, 1), -7),
            "output_bin_counts": torch.zeros(slots, 50, dtype=torch.int32) if counts else None,
            "all_token_ids": torch.full((slots, length), -7, dtype=torch.int32),
            "total_len": torch.tensor(total_len or [4] * slots, dtype=torch.int32),
            "draft_tokens_out": torch.zeros(slots, 0, dtype=torch.int64),
        },
        gap=0,
    )


def test_skipped_rows_and_absent_inputs(each: Impl) -> None:
    """B24: row 1 is skipped; slot 0 only has a token rejected; slot 2 gains two tokens."""
    state = _compare(
        each, _step([2, -1, 0], [[11, 12, 13], [21, 22, 23], [31, 32, 33]], [2, 3, 0], [0, 0, 1], counts=False)
    )
    assert state["total_len"].tolist() == [4, 4, 6]
    assert state["num_computed_tokens"].tolist() == [-1, 0, 0]
    assert state["last_sampled_tokens"].flatten().tolist() == [-7, -7, 12]
    assert state["all_token_ids"][2, 3:7].tolist() == [-7, 11, 12, -7]
    assert (state["all_token_ids"][:2] == -7).all()


def test_nothing_sampled(each: Impl) -> None:
    """B25: a chunk of a prompt: the query counts as computed, and nothing else changes."""
    state = _compare(each, _step([1], [[5, 6]], [0], [0], queries=[3, 10]))
    assert state["num_computed_tokens"].tolist() == [0, 7, 0]
    assert state["total_len"].tolist() == [4, 4, 4]
    assert (state["last_sampled_tokens"] == -7).all()
    assert not state["output_bin_counts"].any()


def test_a_token_sampled_three_times_counts_three_times(each: Impl) -> None:
    """B25: a rewrite that loads once and stores once adds one."""
    state = _compare(each, _step([0, 1], [[7, 7, 7], [7, 8, 7]], [3, 3], [0, 0]))
    assert state["output_bin_counts"][0].nonzero().tolist() == [[7]]
    assert state["output_bin_counts"][0, 7] == 3
    assert state["output_bin_counts"][1, [7, 8]].tolist() == [2, 1]


def test_a_token_buffer_that_is_filled_to_the_last_place(each: Impl) -> None:
    """B25: total_len + n = L exactly."""
    state = _compare(each, _step([2], [[1, 2, 3]], [3], [0], total_len=[4, 4, 13]))
    assert state["all_token_ids"][2, 12:].tolist() == [-7, 1, 2, 3]
    assert state["total_len"].tolist() == [4, 4, 16]


@pytest.mark.parametrize("rows", [0, 1, 257])
def test_any_number_of_rows_on_any_number_of_cores(impl: Impl, rows: int) -> None:
    """B25: all rows sample the same tokens; their counts stay apart."""
    slots = max(rows, 1)
    sampled = torch.tensor([[3, 4, 3]]).repeat(rows, 1).reshape(rows, 3)
    step = _step(list(range(rows)), [], [2] * rows, [1] * rows, slots=slots)
    step.inputs["sampled_tokens"] = sampled
    _compare(impl, step)


def test_more_tokens_than_are_taken_together(impl: Impl) -> None:
    """Many speculative steps: repeats of a token lie in different chunks of the row."""
    width = 41 if impl.on_device else 9
    tokens = [[token % 7 for token in range(width)], [5] * width]
    state = _compare(impl, _step([0, 1], tokens, [width, width - 2], [0, 0], slots=2, length=64))
    assert state["output_bin_counts"][1, 5] == width - 2


def test_twenty_runs_give_the_same_bits(impl: Impl) -> None:
    """B28."""
    step = _step([0, 1, 2], [[1, 2, 1, 1]] * 3, [4, 3, 2], [0, 0, 1], queries=[0, 4, 8, 12])

    def run() -> list[torch.Tensor]:
        inputs, state = step.placed(Guard(impl.device))
        post_update(**inputs, **state, impl=impl.forced)
        return [value for value in state.values() if value is not None]

    assert_repeatable(run)


def test_permuting_the_rows_changes_nothing(impl: Impl) -> None:
    tokens = [[1, 2, 1], [3, 3, 3], [4, 5, 6]]
    straight = _compare(impl, _step([0, 1, 2], tokens, [3, 2, 1], [0, 1, 2]))
    permuted = _compare(impl, _step([2, 0, 1], [tokens[2], tokens[0], tokens[1]], [1, 3, 2], [2, 0, 1]))
    for name, value in straight.items():
        assert_same(permuted[name], value)
