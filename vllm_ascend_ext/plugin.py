"""vLLM's entry points: the connector's name, and the sampler kernels in vLLM's places; must never know the pool.

``register_connector`` makes ``AscendStoreConnector`` known without a module path. ``register_kernels`` does nothing
unless VLLM_ASCEND_EXT_KERNELS is ``1`` or a list of names (``bincount,apply_penalties``). A function is only replaced
where its signature is the one that its replacement was written for, at the place that defines it and wherever it was
imported by name. ``python -m vllm_ascend_ext.plugin`` shows what is, or would be, replaced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_ascend_ext import logs

logger = logging.getLogger("vllm_ascend_ext.plugin")

SWITCH = "VLLM_ASCEND_EXT_KERNELS"
CONNECTOR = "AscendStoreConnector"
CONNECTOR_ALIAS = "AscendStoreExtConnector"
_CONNECTOR_MODULE = "vllm_ascend_ext.kv_pool.connector"

_V2 = "vllm.v1.worker.gpu"
_ASCEND = "vllm_ascend.worker.v2"


@dataclass(frozen=True)
class Patch:
    """One function to replace. ``signatures``: the parameters, with defaults, that the replacement can take."""

    name: str
    module: str
    attribute: str
    signatures: tuple[str, ...]
    make: Callable[[Any], Callable[..., Any]]

    @property
    def where(self) -> str:
        return f"{self.module}.{self.attribute}"


class State(Enum):
    REPLACED = "replaced"
    WOULD_BE = "would be replaced"
    OFF = "off"
    DIFFERS = "left alone: its signature is another"
    FAILED = "left alone: its replacement can't be had"
    ABSENT = "not there"


@dataclass(frozen=True)
class Outcome:
    """What became of one patch; ``places`` are the modules in which the function was found by its name."""

    patch: Patch
    state: State
    places: tuple[str, ...] = ()
    detail: str = ""


def register_connector() -> None:
    """Entry point: name the connector to vLLM. vllm-ascend registers the short name itself, and fails if it is taken;
    beside it only the alias is registered, and the module path chooses between the two."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    logs.follow("vllm")
    names = [CONNECTOR_ALIAS] if importlib.util.find_spec("vllm_ascend") else [CONNECTOR, CONNECTOR_ALIAS]
    for name in names:
        if name not in KVConnectorFactory._registry:  # plugins are loaded more than once
            KVConnectorFactory.register_connector(name, _CONNECTOR_MODULE, "AscendStoreConnector")


def register_kernels() -> list[Outcome]:
    """Entry point: replace what VLLM_ASCEND_EXT_KERNELS names; one warning names what could not be."""
    logs.follow("vllm")
    outcomes = apply(asked_for(os.environ.get(SWITCH, "")))
    left = [f"{o.patch.where}: {o.detail}" for o in outcomes if o.state in (State.DIFFERS, State.FAILED)]
    if left:
        logger.warning("%s: left in place, for they are not as expected: %s", SWITCH, "; ".join(left))
    return outcomes


def asked_for(setting: str) -> frozenset[str]:
    """The names that a value of VLLM_ASCEND_EXT_KERNELS stands for; raises ValueError for one that is unknown."""
    known = frozenset(patch.name for patch in PATCHES)
    if setting.strip().lower() in ("", "0", "false", "off"):
        return frozenset()
    if setting.strip().lower() in ("1", "true", "all"):
        return known
    names = frozenset(name.strip() for name in setting.split(",") if name.strip())
    if unknown := sorted(names - known):
        raise ValueError(
            f"{SWITCH}={setting!r}: unknown {', '.join(unknown)}; allowed are 1 and {', '.join(sorted(known))}"
        )
    return names


def apply(names: Iterable[str], *, really: bool = True) -> list[Outcome]:
    """Replace the functions of these names, or only find out what that would do."""
    chosen = frozenset(names)
    return [_apply(patch, really) if patch.name in chosen else Outcome(patch, State.OFF) for patch in PATCHES]


def _apply(patch: Patch, really: bool) -> Outcome:
    if importlib.util.find_spec(patch.module.partition(".")[0]) is None:
        return Outcome(patch, State.ABSENT, detail=f"{patch.module.partition('.')[0]} is not installed")
    try:
        original = getattr(importlib.import_module(patch.module), patch.attribute)
    except Exception as cause:  # a version without it, or one that can't be imported here
        return Outcome(patch, State.ABSENT, detail=f"{type(cause).__name__}: {cause}")
    if getattr(original, "_vllm_ascend_ext", None):
        return Outcome(patch, State.REPLACED, tuple(_holders(original)))
    found = signature_of(original)
    if found not in patch.signatures:
        return Outcome(patch, State.DIFFERS, detail=f"({found}) instead of ({patch.signatures[0]})")
    places = tuple(_holders(original))
    if not really:
        return Outcome(patch, State.WOULD_BE, places)
    try:
        replacement = patch.make(original)
    except Exception as cause:
        return Outcome(patch, State.FAILED, detail=f"{type(cause).__name__}: {cause}")
    replacement._vllm_ascend_ext = patch.name  # type: ignore[attr-defined]  # the mark by which it is known again
    for place in places:
        for name in _names_of(sys.modules[place], original):
            setattr(sys.modules[place], name, replacement)
    return Outcome(patch, State.REPLACED, places)


def signature_of(function: Any) -> str:
    """Parameters with their defaults; of a Triton kernel those of the function beneath."""
    parameters = inspect.signature(getattr(function, "fn", function)).parameters.values()
    return ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)


def _holders(function: Any) -> Iterator[str]:
    """Names of the imported modules that hold ``function``."""
    for name, module in sorted(sys.modules.items()):
        if module is not None and name.startswith(("vllm.", "vllm_ascend.")) and any(_names_of(module, function)):
            yield name


def _names_of(module: Any, function: Any) -> list[str]:
    return [name for name, value in vars(module).items() if value is function]


# -- the replacements -------------------------------------------------------------------------------------------------


def _kernel(name: str) -> Callable[[Any], Callable[..., Any]]:
    """The kernel of this name, as it is."""

    def make(original: Any) -> Callable[..., Any]:
        kernel = getattr(importlib.import_module("vllm_ascend_ext.kernels"), name)
        return functools.wraps(original)(lambda *args, **kwargs: kernel(*args, **kwargs))

    return make


def _scores(name: str) -> Callable[[Any], Callable[..., Any]]:
    """The kernel of this name, with its result as vLLM's class."""

    def make(original: Any) -> Callable[..., Any]:
        kernel = getattr(importlib.import_module("vllm_ascend_ext.kernels"), name)
        result = importlib.import_module("vllm.v1.outputs").LogprobsTensors
        return functools.wraps(original)(lambda *args, **kwargs: result(*kernel(*args, **kwargs)))

    return make


class _BitmaskLauncher:
    """Stands where vLLM launches its kernel, ``kernel[grid](...)``; the grid is of no use to ours."""

    def __init__(self, original: Any, launch: Callable[..., None]) -> None:
        self.original = original
        self._launch = launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._launch(*args, **kwargs)


def _bitmask(original: Any) -> Callable[..., Any]:
    """vLLM's kernel: masks are keyed by request and position."""
    kernel = importlib.import_module("vllm_ascend_ext.kernels").apply_grammar_bitmask

    def launch(
        logits: Any,
        logits_stride: int,
        logits_indices: Any,
        cu_num_logits: Any,
        bitmask: Any,
        bitmask_stride: int,
        vocab_size: int,
        *,
        MASK_STRIDE: int,
        BLOCK_SIZE: int,
    ) -> None:
        kernel(logits[:, :vocab_size], logits_indices, bitmask, cu_num_logits, MASK_STRIDE)

    return _BitmaskLauncher(original, launch)


def _plain_bitmask(original: Any) -> Callable[..., Any]:
    """vllm-ascend's kernel: masks are keyed by the row of the logits."""
    kernel = importlib.import_module("vllm_ascend_ext.kernels").apply_grammar_bitmask

    def launch(
        logits: Any,
        logits_stride: int,
        logits_indices: Any,
        bitmask: Any,
        bitmask_stride: int,
        vocab_size: int,
        *,
        BLOCK_SIZE: int,
    ) -> None:
        kernel(logits[:, :vocab_size], logits_indices, bitmask)

    return _BitmaskLauncher(original, launch)


_POST_UPDATE = (
    "idx_mapping, num_computed_tokens, last_sampled_tokens, output_bin_counts, sampled_tokens, num_sampled, "
    "num_rejected, query_start_loc, all_token_ids, total_len"
)
_DRAFTS = ", draft_tokens=None, draft_tokens_out=None"  # since vLLM 0.33
_PENALTIES = (
    "logits, expanded_idx_mapping, token_ids, expanded_local_pos, repetition_penalty, frequency_penalty, "
    "presence_penalty, prompt_bin_mask, output_bin_counts"
)
_BINCOUNT = (
    "expanded_idx_mapping, all_token_ids, prompt_len, prefill_len, prompt_bin_mask, output_bin_counts, max_prefill_len"
)
_TOPK_LOGPROBS = (
    "logits, num_logprobs, sampled_token_ids, cu_num_logits=None, logprob_token_ids_state=None, "
    "expanded_idx_mapping=None, max_per_req_token_ids=0"
)
_BITMASK = (
    "logits_ptr, logits_stride, logits_indices_ptr, cu_num_logits_ptr, bitmask_ptr, bitmask_stride, vocab_size, "
    "MASK_STRIDE, BLOCK_SIZE"
)
_PLAIN_BITMASK = "logits_ptr, logits_stride, logits_indices_ptr, bitmask_ptr, bitmask_stride, vocab_size, BLOCK_SIZE"


def _same(package: str, module: str, name: str, *signatures: str) -> Patch:
    """A function for which the kernel of the same name stands in as it is."""
    return Patch(name, f"{package}.{module}", name, signatures, _kernel(name))


def _launched(package: str, signature: str, make: Callable[[Any], Callable[..., Any]]) -> Patch:
    kernel = "_apply_grammar_bitmask_kernel"
    return Patch("apply_grammar_bitmask", f"{package}.structured_outputs", kernel, (signature,), make)


def _topk(package: str, function: str, signature: str) -> Patch:
    return Patch("compute_topk_scores", f"{package}.sample.logprob", function, (signature,), _scores(function))


PATCHES = (
    _same(_V2, "input_batch", "post_update", _POST_UPDATE + _DRAFTS, _POST_UPDATE),
    _launched(_V2, _BITMASK, _bitmask),
    _same(_V2, "sample.penalties", "bincount", _BINCOUNT),
    _same(_V2, "sample.penalties", "apply_penalties", _PENALTIES),
    _same(_V2, "sample.logprob", "compute_token_logprobs", "logits, token_ids"),
    _topk(_V2, "compute_topk_scores", f"{_TOPK_LOGPROBS}, logits_mode=False"),
    # What vllm-ascend puts in their places, later than this plugin: replaced where it comes from.
    _launched(_ASCEND, _PLAIN_BITMASK, _plain_bitmask),
    _same(_ASCEND, "sample.penalties", "bincount", _BINCOUNT),
    _same(_ASCEND, "sample.penalties", "apply_penalties", _PENALTIES),
    _same(_ASCEND, "sample.logprob", "compute_token_logprobs", "logits, token_ids"),
    _topk(_ASCEND, "compute_topk_logprobs", _TOPK_LOGPROBS),
)


def main() -> None:
    """Print a line for each function: what became of it, or would, and where it was found."""
    setting = os.environ.get(SWITCH, "")
    names = asked_for(setting)
    outcomes = apply(names) if names else apply(asked_for("1"), really=False)
    print(f"{SWITCH}={setting or '(not set)'}: {'this is done' if names else 'nothing is done; with 1 this would be'}")
    for outcome in outcomes:
        places = f" in {', '.join(outcome.places)}" if outcome.places else ""
        detail = f" ({outcome.detail})" if outcome.detail else ""
        print(f"{outcome.patch.name:24} {outcome.patch.where}: {outcome.state.value}{places}{detail}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as wrong:  # a name that is unknown
        sys.exit(str(wrong))
