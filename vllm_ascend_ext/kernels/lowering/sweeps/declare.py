"""A short way to declare cases for a file of many kernels; knows no kernel."""

from __future__ import annotations

from collections.abc import Mapping

from ..cases import A2, Case, Constant

#: Setting of a kernel that only A5 launches; this check lowers it for A2, as its chip's modules can't be read.
A5 = "launched on A5 alone, lowered for A2"


def case(
    place: str, types: str, setting: str = "", values: Mapping[str, int] | None = None, /, **constants: Constant
) -> Case:
    """Declare one kernel for A2.

    Args:
        place: FILE:KERNEL, the file without its ``.py``.
        types: types of the run-time arguments, ``"x_ptr y_ptr: *fp32; n: i32"``.
        setting: what sets this case apart from the kernel's others.
        values: run-time values that size the counts, as in ``Case``.
        constants: constants of the kernel; those whose name starts with ``option_`` are options of the launch.
            ``option_multibuffer`` is True unless given.
    """
    file, _, kernel = place.rpartition(":")
    signature: dict[str, str] = {}
    for group in types.split(";"):
        names, _, type_name = group.partition(":")
        signature.update(dict.fromkeys(names.split(), type_name.strip()))
    multibuffer = bool(constants.pop("option_multibuffer", True))
    options = {name.removeprefix("option_"): v for name, v in constants.items() if name.startswith("option_")}
    return Case(
        kernel=kernel,
        name=setting,
        file=f"{file}.py",
        signature=signature,
        constants={name: value for name, value in constants.items() if not name.startswith("option_")},
        options=options,
        values=values or {},
        targets=(A2,),
        multibuffer=(multibuffer,),
    )
