"""The Ascend compiler's wheels: where they are, which versions, and whether they can run here; knows no kernel."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

#: Distribution -> versions whose output this package's reading was tested against.
TESTED = {"triton-ascend": ("3.2.0",), "ascendnpu-ir": ("1.2.0",)}

_HINT = (
    "`make ascend` makes an environment with both wheels: .venv-ascend/bin/python -m vllm_ascend_ext.kernels.lowering"
)


class ToolchainError(RuntimeError):
    """The compiler can't run here; the message is one line that says what is missing."""


@dataclass(frozen=True)
class Toolchain:
    """Paths of the three programs, and the versions that go into every report."""

    adapter: Path
    compiler: Path
    printer: Path
    versions: tuple[tuple[str, str], ...]

    @property
    def warnings(self) -> list[str]:
        """One line for each wheel whose version was not tested."""
        return [
            f"{name} {version} was not tested (tested: {', '.join(TESTED[name])}): its IR may read differently, "
            "so check a finding against the IR that --keep writes"
            for name, version in self.versions
            if version not in TESTED[name]
        ]


def find() -> Toolchain:
    """Locate both wheels in this environment; ToolchainError if one is missing or the platform has none."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise ToolchainError(
            f"the Ascend compiler's wheels exist for Linux on x86_64 and aarch64, not for {sys.platform} on "
            f"{platform.machine()}: run the check in a Linux container"
        )
    versions = tuple((name, _version(name)) for name in TESTED)
    backend = _package_dir("triton") / "backends" / "ascend"
    binaries = _package_dir("ascendnpuir") / "bin"
    tools = Toolchain(
        adapter=_program(backend / "triton-adapter-opt"),
        compiler=_program(binaries / "bishengir-compile"),
        printer=_program(binaries / "bishengir-opt"),
        versions=versions,
    )
    if util.find_spec("pybind11") is None:
        raise ToolchainError(f"pybind11, which triton-ascend needs and doesn't declare, is not installed. {_HINT}")
    # Read when triton is imported: without it no operation has a source line.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "0"
    return tools


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise ToolchainError(f"{distribution} is not installed in {sys.prefix}. {_HINT}") from None


def _package_dir(package: str) -> Path:
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ToolchainError(f"package {package} is not importable in {sys.prefix}. {_HINT}")
    return Path(spec.origin).parent


def _program(path: Path) -> Path:
    if not os.access(path, os.X_OK):
        raise ToolchainError(f"{path} is missing or not executable: install the wheel anew. {_HINT}")
    return path


@dataclass(frozen=True)
class Run:
    """How a program of the toolchain ended: its exit code (negative: the signal that killed it) and all it printed."""

    code: int
    output: str

    @property
    def crashed(self) -> bool:
        """Whether a signal ended it (an assertion, a segmentation fault)."""
        return self.code < 0 or self.code >= 128


def execute(command: Sequence[str | Path]) -> Run:
    """Run one program to its end; ToolchainError if it can't be started on this machine."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, check=False)
    except OSError as error:
        raise ToolchainError(f"{command[0]} does not run on this machine: {error.strerror}") from error
    return Run(done.returncode, (done.stdout + done.stderr).decode(errors="replace"))
