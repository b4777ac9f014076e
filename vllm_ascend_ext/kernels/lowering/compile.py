"""One kernel through the Ascend compiler, as far as it goes without an NPU; it judges nothing of what comes out.

Triton source -> TTIR (triton-ascend) -> linalg (triton-adapter-opt) -> HIVM, memory-planned and synchronised
(bishengir-compile). The step after that, HIVM to object code, belongs to CANN and is not run: bishengir-compile then
exits with an error of its own, after it has written the module that this package reads.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import ir
from .cases import Case, Constant
from .ir import Place
from .toolchain import Run, Toolchain, ToolchainError, execute

STAGES = ("none", "ttir", "linalg", "hivm")

#: Option of the Ascend backend -> flag of bishengir-compile (triton-ascend 3.2.0, backends/ascend/compiler.py).
_FLAGS = {
    "enable_auto_bind_sub_block": "--enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "--enable-hivm-auto-cv-balance",
    "sync_solver": "--enable-hivm-graph-sync-solver",
    "unit_flag": "--enable-hivm-unit-flag-sync",
    "inject_barrier_all": "--enable-hivm-inject-barrier-all-sync",
    "inject_block_all": "--enable-hivm-inject-block-all-sync",
    "limit_auto_multi_buffer_only_for_local_buffer": "--limit-auto-multi-buffer-only-for-local-buffer",
    "limit_auto_multi_buffer_of_local_buffer": "--limit-auto-multi-buffer-of-local-buffer",
    "set_workspace_multibuffer": "--set-workspace-multibuffer",
    "tile_mix_vector_loop": "--tile-mix-vector-loop",
    "tile_mix_cube_loop": "--tile-mix-cube-loop",
    "disable_auto_inject_block_sync": "--disable-auto-inject-block-sync",
}

#: Options that lead around the stages that this package runs.
_OTHER_PATHS = (
    ("force_simt_only", True),
    ("compile_mode", "simt_only"),
    ("parallel_mode", "simt"),
    ("compile_on_910_95", True),
)

_OVERFLOW = re.compile(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available")
_ERROR = re.compile(r"(?:loc\((?P<location>.*?)\):? )?error: (?P<text>.*)")
#: What bishengir-compile says of the step that only CANN has.
_NOT_OURS = ("hivmc", "Failed to run BiSheng", "External")


@dataclass(frozen=True)
class Setting:
    """What one compilation of a case is for."""

    target: str
    multibuffer: bool

    def __str__(self) -> str:
        return f"{self.target}, multi-buffering {'on' if self.multibuffer else 'off'}"


@dataclass(frozen=True)
class Failure:
    """Why a stage was not passed: a finding's code, the compiler's own words, and where if it said so."""

    code: str
    message: str
    place: Place | None = None
    memory: str = ""
    required_bits: int = 0


@dataclass
class Lowering:
    """What the compiler made of one case: the IR of each stage that was reached, in generic form, and its remarks."""

    stage: str = "none"
    failure: Failure | None = None
    ttir: str = ""
    linalg: str = ""
    hivm: str = ""
    #: The compiler's notes that it switched an optimisation off and tried again.
    retries: tuple[str, ...] = ()
    #: Names of the run-time arguments, in the kernel's order.
    arguments: tuple[str, ...] = ()


def lower(
    kernel: Any,
    case: Case,
    setting: Setting,
    tools: Toolchain,
    folder: Path,
    at_stage: Callable[[str], None] = lambda _: None,
) -> Lowering:
    """Take ``kernel``, a ``@triton.jit`` function, through all stages; intermediate files go into ``folder``.

    ``at_stage`` is told the name of each program before it runs. Raises ToolchainError if a program can't be started;
    everything that the compiler itself reports is in the result.
    """
    result = Lowering()
    at_stage("Triton's frontend")
    try:
        frontend = _Frontend(kernel, case, setting)
        result.arguments = frontend.arguments
        module = frontend.ttir()
    except ToolchainError:
        raise
    except Exception as error:  # the frontend raises whatever a kernel's own code provokes
        result.failure = _frontend_failure(kernel, error)
        return result
    result.stage = "ttir"
    result.ttir = _generic(tools.adapter, folder / "kernel.ttir.mlir", str(module))
    at_stage("triton-adapter-opt")
    try:
        linalg = frontend.linalg(module)
    except Exception as error:
        result.failure = _adapter_failure(error)
        return result
    result.stage = "linalg"
    source = folder / "kernel.ttadapter.mlir"
    result.linalg = _generic(tools.adapter, source, linalg)
    at_stage("bishengir-compile")
    _compile(result, source, case, setting, tools)
    return result


class _Frontend:
    """The part of triton-ascend that runs inside Python, asked for a target instead of a driver."""

    def __init__(self, kernel: Any, case: Case, setting: Setting) -> None:
        from triton._C.libtriton import ir as triton_ir
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        # The live module of the backend is the one whose functions it calls; importing it by name makes a second one.
        self._backend = _backend_class()(GPUTarget("npu", setting.target, 0))
        self._steps = self._backend.add_stages.__globals__
        self._options = self._backend.parse_options(
            {**_known_options(case, self._steps), "multibuffer": setting.multibuffer}
        )
        self._metadata = {"target": self._backend.target, **self._options.__dict__}
        signature = _ordered(kernel, case)
        self.arguments = tuple(signature)
        self._source = ASTSource(fn=kernel, signature=signature, constants=_resolve(case.constants))
        self._context = triton_ir.context()
        triton_ir.load_dialects(self._context)

    def ttir(self) -> Any:
        backend = self._backend
        module = self._source.make_ir(
            self._options, backend.get_codegen_implementation(), backend.get_module_map(), self._context
        )
        return self._steps["make_ttir"](module, self._metadata, self._options)

    def linalg(self, module: Any) -> str:
        text = self._steps["ttir_to_linalg"](module, self._metadata, self._options, named_ops=True)
        return str(self._steps["_parse_linalg_metadata"](text, self._metadata)[0])


def _backend_class() -> Any:
    from triton.backends import backends

    if "ascend" not in backends:
        raise ToolchainError(
            f"triton in {sys.prefix} has no Ascend backend: stock triton has overwritten triton-ascend"
        )
    return backends["ascend"].compiler


def _known_options(case: Case, steps: Mapping[str, Any]) -> dict[str, Constant]:
    fields = steps["NPUOptions"].__dataclass_fields__
    unknown = sorted(set(case.options) - set(fields))
    if unknown:
        raise ValueError(f"options {unknown} are not options of the Ascend backend; it has {sorted(fields)}")
    elsewhere = [name for name, value in case.options.items() if (name, value) in _OTHER_PATHS]
    if elsewhere:
        raise ValueError(
            f"option {elsewhere[0]}={case.options[elsewhere[0]]} takes the kernel another way (SIMT, or A5's), whose "
            "modules this check can't read"
        )
    return dict(case.options)


def with_defaults(kernel: Any, case: Case) -> Case:
    """The case with the kernel's own defaults for what it leaves out, as a launch would have them."""
    given = {*case.signature, *case.constants}
    defaults = {one.name: one.default for one in kernel.params if one.has_default and one.name not in given}
    return replace(case, constants={**defaults, **case.constants})


def _ordered(kernel: Any, case: Case) -> dict[str, str]:
    """The run-time arguments in the kernel's order; ValueError if one parameter has neither type nor value."""
    names = list(kernel.arg_names)
    unknown = sorted((set(case.signature) | set(case.constants)) - set(names))
    if unknown:
        raise ValueError(f"{unknown} are not parameters of {kernel.__name__}; its parameters are {names}")
    missing = [name for name in names if name not in case.signature and name not in case.constants]
    if missing:
        raise ValueError(
            f"parameters {missing} of {kernel.__name__} have neither a type nor a constant: give each --arg NAME=TYPE "
            "or --const NAME=VALUE, or name it in the signature or the constants of the case"
        )
    return {name: case.signature[name] for name in names if name in case.signature}


def _resolve(constants: Mapping[str, Constant]) -> dict[str, Any]:
    """Constants as the frontend wants them: ``"tl.float32"`` becomes the Triton type."""
    import triton.language as tl

    def value(constant: Constant) -> Any:
        if isinstance(constant, str) and constant.startswith("tl."):
            return getattr(tl, constant.removeprefix("tl."))
        return constant

    return {name: value(constant) for name, constant in constants.items()}


def _frontend_failure(kernel: Any, error: Exception) -> Failure:
    """The innermost cause, in the frontend's words, at the line of the kernel that led there."""
    place = None
    node = getattr(error, "node", None)
    if node is not None and hasattr(node, "lineno"):
        from triton.runtime.jit import get_jit_fn_file_line

        file, first_line = get_jit_fn_file_line(kernel)
        place = Place(file, first_line + node.lineno - 1, node.col_offset)
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    words = getattr(inner, "error_message", None) or str(inner).strip() or type(inner).__name__
    kind = "" if type(inner).__name__ in ("CompilationError", "ValueError") else f"{type(inner).__name__}: "
    return Failure("frontend", f"{kind}{words}", place)


def _adapter_failure(error: Exception) -> Failure:
    code = getattr(error, "returncode", 0)
    stderr = getattr(error, "stderr", None) or b""
    return _failure_in(Run(code, stderr.decode(errors="replace") or str(error)), "triton-adapter-opt", "adapter")


def _failure_in(run: Run, program: str, code: str) -> Failure:
    """What a program of the toolchain said before it gave up, or how it crashed."""
    errors = _errors_in(run)
    if errors:
        places = [place for m in errors for place in ir.parse_location(m["location"] or "")]
        message = "; ".join(dict.fromkeys(m["text"].strip() for m in errors))
    else:
        places = []
        lines = [line.strip() for line in run.output.splitlines() if line.strip()]
        asserted = [line for line in lines if "Assertion" in line]
        message = (asserted or lines[-1:] or [f"it printed nothing and exited with {run.code}"])[0]
        # Where the compiler was built says nothing here, and its own name is said anyway.
        message = re.sub(r"\S*/(\w+\.(?:cpp|h)):", r"\1:", message.removeprefix(f"{program}: "))
    if run.crashed:
        return Failure("crash", f"{program} crashed: {message}", places[0] if places else None)
    return Failure(code, f"{program}: {message}", places[0] if places else None)


def _errors_in(run: Run) -> list[re.Match[str]]:
    """The errors that a program printed, but for those about the step that only CANN has."""
    found = filter(None, map(_ERROR.search, run.output.splitlines()))
    return [error for error in found if not any(words in error["text"] for words in _NOT_OURS)]


def _compile(result: Lowering, source: Path, case: Case, setting: Setting, tools: Toolchain) -> None:
    """Run bishengir-compile on the linalg in ``source`` and read what it leaves behind."""
    command: list[str | Path] = [
        tools.compiler,
        source,
        f"--target={setting.target}",
        f"--enable-auto-multi-buffer={str(setting.multibuffer).lower()}",
        "--enable-hfusion-compile=true",
        "--enable-hivm-compile=true",
        "--enable-triton-kernel-compile=true",
        "--enable-debug-info=true",
        f"--save-temps={source.parent}",
        "-o",
        source.parent / "kernel",
    ]
    options = {"enable_auto_bind_sub_block": True, **case.options}
    command += [f"{_FLAGS[name]}={str(value).lower()}" for name, value in options.items() if name in _FLAGS]
    run = execute(command)
    result.retries = tuple(re.findall(r"\[NOTE\] (.*)", run.output))
    final = source.parent / "module.hivm.opt.mlir"
    overflow = _overflow_in(run)
    if overflow is not None and not any("then succeeded" in note for note in result.retries):
        result.failure = overflow
    elif run.crashed or not final.exists() or _errors_in(run):
        result.failure = _failure_in(run, "bishengir-compile", "compiler")
    else:
        result.stage = "hivm"
        result.hivm = _generic(tools.printer, final)


def _overflow_in(run: Run) -> Failure | None:
    match = _OVERFLOW.search(run.output)
    if match is None:
        return None
    memory, required = match[1].lower(), int(match[2])
    message = f"{memory.upper()} overflow: {required:,} bits required, {int(match[3]):,} available"
    return Failure("overflow", message, memory=memory, required_bits=required)


def _generic(printer: Path, path: Path, text: str | None = None) -> str:
    """The IR in ``path`` (written there first, if given as ``text``) in generic form."""
    if text is not None:
        path.write_text(text)
    target = path.with_suffix(".generic.mlir")
    run = execute([printer, path, *ir.PRINT_FLAGS, "-o", target])
    if run.code != 0 or not target.exists():
        raise RuntimeError(f"{printer.name} can't print {path.name} in generic form: {run.output.strip()[:300]}")
    return target.read_text()
