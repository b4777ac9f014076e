"""Turns what was asked for into jobs: files and kernels from a command line, declared cases beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import pool
from .cases import A2, A3, Case, Constant
from .check import Job
from .compile import Setting
from .findings import KINDS
from .loader import Loader, LoadError

DECLARATION = "LOWERING_CASES"
_SHORT_TARGETS = {"A2": A2, "A3": A3}
_SUPPORTED = ("Ascend910B", "Ascend910_93")


class UsageError(ValueError):
    """What was asked for can't be done; the message is one line for the user."""


@dataclass(frozen=True)
class Wanted:
    """What a command line asks for; empty fields leave a declared case as it is."""

    specs: tuple[str, ...]
    signature: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Constant] = field(default_factory=dict)
    options: Mapping[str, Constant] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    allow: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    multibuffer: tuple[bool, ...] = ()
    only: str = ""
    root: Path | None = None
    paths: tuple[Path, ...] = ()
    probe: bool = True


def full_target(name: str) -> str:
    """The chip that ``A2``, ``A3`` or a chip's own name stands for; UsageError if its IR can't be read here."""
    target = _SHORT_TARGETS.get(name.upper(), name)
    if not target.startswith(_SUPPORTED):
        raise UsageError(
            f"target {name!r}: allowed are A2 ({A2}), A3 ({A3}) and other chips {' or '.join(_SUPPORTED)}...; "
            "the compiler lowers others along another path, which ends in LLVM's dialect"
        )
    return target


def make(wanted: Wanted, timeout: float) -> list[Job]:
    """The jobs, in the order asked for; UsageError if a file, a kernel or a case is not there."""
    specs = [one for spec in wanted.specs for one in _files(spec)]
    # Where types are given, what a file declares doesn't matter, nor that it can't be read: that is for its job to say.
    paths = [] if wanted.signature else sorted({path for path, kernel in map(_split, specs)})
    declared = _declared(paths, timeout)
    jobs = [job for spec in specs for job in _of_spec(spec, wanted, declared)]
    twice = [key for key, count in Counter((job.path, str(job)) for job in jobs).items() if count > 1]
    if twice:
        path, title = twice[0]
        raise UsageError(f"{path}: {title} is asked for twice; a case's name is what sets it apart from the others")
    if not jobs:
        raise UsageError(f"no case has {wanted.only!r} in its title" if wanted.only else "nothing to check was named")
    return jobs


def _files(spec: str) -> list[str]:
    """The files that a folder stands for: those right in it that declare cases; a file stands for itself."""
    if not Path(spec).is_dir():
        return [spec]
    files = [str(path) for path in sorted(Path(spec).glob("*.py")) if _declares(path)]
    if not files:
        raise UsageError(f"no file in {spec} declares {DECLARATION}")
    return files


def _split(spec: str) -> tuple[Path, str]:
    path, colon, kernel = spec.rpartition(":")
    if not colon or kernel.endswith(".py"):
        path, kernel = spec, ""
    if not Path(path).is_file():
        raise UsageError(f"{spec!r}: there is no file {path!r}; write FILE.py or FILE.py:KERNEL")
    return Path(path).resolve(), kernel


def _of_spec(spec: str, wanted: Wanted, declared: Mapping[Path, list[Case]]) -> list[Job]:
    path, kernel = _split(spec)
    cases = [case for case in declared.get(path, []) if kernel in ("", case.kernel)]
    if wanted.signature or (not cases and wanted.constants):
        if not kernel:
            raise UsageError(f"{spec!r}: argument types belong to one kernel; write {spec}:KERNEL")
        try:
            cases = [Case(kernel=kernel, signature=wanted.signature, constants=wanted.constants)]
        except ValueError as error:
            raise UsageError(str(error)) from None
    elif not cases:
        raise UsageError(_nothing_declared(path, kernel))
    cases = [case for case in cases if wanted.only in case.title]
    return [job for case in cases for job in _jobs(path, _changed(case, wanted), wanted)]


def _nothing_declared(path: Path, kernel: str) -> str:
    loader = Loader()
    try:
        kernels = loader.kernels(path)
    except LoadError as error:
        return str(error)
    if not kernels:
        return f"{path} has no kernel: no function in it is decorated with @triton.jit"
    if kernel not in kernels:
        wanted = f"no kernel {kernel!r}" if kernel else f"no case in {DECLARATION}"
        return f"{path} has {wanted}. Its kernels are: {', '.join(kernels)}. Name one as {path.name}:KERNEL"
    return (
        f"{path} declares no case of {kernel} in {DECLARATION}: give its argument types (--arg NAME=TYPE ...) and "
        f"constants (--const NAME=VALUE ...). Parameters of {kernel}: {', '.join(loader.parameters(path, kernel))}."
    )


def _changed(case: Case, wanted: Wanted) -> Case:
    """The case with what the command line says instead."""
    unknown = sorted({*case.allow, *wanted.allow} - set(KINDS))
    if unknown:
        raise UsageError(f"{case.title} allows {unknown}; the kinds of findings are {', '.join(KINDS)}")
    try:
        return replace(
            case,
            constants={**case.constants, **wanted.constants},
            options={**case.options, **wanted.options},
            values={**case.values, **wanted.values},
            allow={**case.allow, **wanted.allow},
            targets=wanted.targets or case.targets,
            multibuffer=wanted.multibuffer or case.multibuffer,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _jobs(path: Path, case: Case, wanted: Wanted) -> list[Job]:
    if case.file:
        path = ((wanted.root or path.parent) / case.file).resolve()
    settings = [
        Setting(full_target(target), multibuffer) for target in case.targets for multibuffer in case.multibuffer
    ]
    return [Job(path, case, setting, wanted.paths, wanted.probe) for setting in settings]


def _declared(paths: Sequence[Path], timeout: float) -> dict[Path, list[Case]]:
    """Declared cases of each file, read in processes of their own: a kernel file may do anything when it loads."""
    cases: dict[Path, list[Case]] = {}
    paths = [path for path in paths if _declares(path)]
    for index, outcome in pool.run(_read_declared, paths, at_once=1, timeout=timeout):
        if isinstance(outcome, pool.Died):
            raise UsageError(f"{paths[index]}: reading {DECLARATION} failed: {outcome.how}")
        cases[paths[index]] = outcome
    return cases


def _declares(path: Path) -> bool:
    """Whether a file declares cases, from its text; UsageError if it isn't Python."""
    try:
        return Loader().defines(path, DECLARATION)
    except LoadError as error:
        raise UsageError(str(error)) from None


def _read_declared(path: Path, folder: Path, at_stage: Callable[[str], None]) -> list[Case]:
    declared = Loader().load(path, DECLARATION)
    cases = list(declared() if callable(declared) else declared)
    wrong = [case for case in cases if not isinstance(case, Case)]
    if wrong:
        raise TypeError(f"{DECLARATION} holds a {type(wrong[0]).__name__}, and may hold Case objects only")
    return cases
