"""Declared cases: the argument types and constants a kernel is lowered with; knows neither Triton nor the compiler.

A kernel file declares its cases beside the kernels, as data::

    from vllm_ascend_ext.kernels.lowering.cases import Case

    LOWERING_CASES = [
        Case(
            kernel="_scale_kernel",
            signature={"out_ptr": "*fp32", "x_ptr": "*fp32", "n": "i32"},
            constants={"BLOCK": 4096},
            name="fp32, as shipped",
            values={"n": 151_936},
        ),
    ]

This module imports nothing but the standard library, so that declaring a case costs a kernel file nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

A2 = "Ascend910B3"
A3 = "Ascend910_9382"
TARGETS = (A2, A3)

#: The types an argument may have; a leading ``*`` makes it a pointer to that type in global memory.
SCALAR_TYPES = frozenset(
    [
        "i1",
        "i8",
        "i16",
        "i32",
        "i64",
        "u1",
        "u8",
        "u16",
        "u32",
        "u64",
        "fp16",
        "bf16",
        "fp32",
        "fp64",
        "fp8e4nv",
        "fp8e5",
        "fp8e4b15",
        "fp8e5b16",
    ]
)

Constant = int | float | bool | str | None


def check_type(argument: str, type_name: str) -> None:
    """Raise ValueError unless ``type_name`` is a Triton argument type such as ``*fp32`` or ``i32``."""
    if type_name.removeprefix("*") not in SCALAR_TYPES:
        allowed = ", ".join(sorted(SCALAR_TYPES))
        raise ValueError(f"argument {argument!r}: unknown type {type_name!r}; allowed, with or without '*': {allowed}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way in which a kernel is compiled: its argument types, its constants and what is allowed to it."""

    #: Name of the ``@triton.jit`` function in the file.
    kernel: str
    #: Type of every run-time argument: ``{"x_ptr": "*fp32", "n": "i32", "scale": "fp32"}``.
    signature: Mapping[str, str]
    #: Value of every ``tl.constexpr`` parameter, and of every argument that is None or 1 at launch. A value written
    #: ``"tl.float32"`` becomes that Triton type; any other string stays a string.
    constants: Mapping[str, Constant] = field(default_factory=dict)
    #: What sets this case apart from the kernel's others; shown in every report.
    name: str = ""
    #: Targets to compile for.
    targets: tuple[str, ...] = TARGETS
    #: Compile with multi-buffering, without it, or both: as the launch ships it.
    multibuffer: tuple[bool, ...] = (True, False)
    #: Further options of the Ascend backend, as the launch passes them.
    options: Mapping[str, Constant] = field(default_factory=dict)
    #: Run-time values that size the counts: argument name -> value; ``*name`` -> the value read through a pointer, or
    #: ``*name@line`` -> the one read there; ``grid`` -> number of programs launched.
    values: Mapping[str, int] = field(default_factory=dict)
    #: Finding code -> the reason why this kernel may have it. Nothing else is forgiven.
    allow: Mapping[str, str] = field(default_factory=dict)
    #: File of the kernel, relative to the root of the run; empty: the file that declares the case.
    file: str = ""
    #: Which of several definitions of the kernel in its file, counted from 1; 0: the one that the file's own conditions
    #: choose.
    definition: int = 0

    def __post_init__(self) -> None:
        if not self.kernel.isidentifier():
            raise ValueError(f"Case.kernel: {self.kernel!r} is not the name of a function")
        for argument, type_name in self.signature.items():
            check_type(f"{self.kernel}({argument})", type_name)
        twice = sorted(set(self.signature) & set(self.constants))
        if twice:
            raise ValueError(f"Case {self.title!r}: {twice} is both an argument and a constant")
        for target in self.targets:
            if not target.startswith("Ascend"):
                raise ValueError(f"Case {self.title!r}: targets has {target!r}; allowed are chips such as {TARGETS}")
        if self.definition < 0:
            raise ValueError(
                f"Case {self.title!r}: definition is {self.definition}; allowed are 0, and 1 for the first"
            )
        if "multibuffer" in self.options:
            raise ValueError(
                f"Case {self.title!r}: options has 'multibuffer'; write it as multibuffer=(True,) or (False,)"
            )
        if not self.targets or not self.multibuffer:
            raise ValueError(f"Case {self.title!r}: targets and multibuffer must each name at least one setting")
        names = {name.removeprefix("*").partition("@")[0] for name in self.values}
        unknown = sorted(names - set(self.signature) - {"grid"})
        if unknown:
            raise ValueError(f"Case {self.title!r}: values names {unknown}; allowed are its arguments and 'grid'")
        for code, reason in self.allow.items():
            if not reason.strip():
                raise ValueError(f"Case {self.title!r}: allow[{code!r}] needs the reason why the finding is allowed")

    @property
    def title(self) -> str:
        """The kernel's name and what sets this case apart."""
        return f"{self.kernel} [{self.name}]" if self.name else self.kernel
