"""Command line of the Ascend lowering check: ``python -m vllm_ascend_ext.kernels.lowering --help``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import check, compare, jobs, largest, pool, report, sweep, toolchain
from .cases import Constant, check_type
from .check import Job, Report
from .findings import KINDS, Finding, Severity
from .jobs import UsageError, Wanted
from .largest import Steps
from .sweep import Subject
from .toolchain import Toolchain, ToolchainError

OK, FOUND, USAGE, CANNOT_RUN = 0, 1, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit code: 0 nothing wrong, 1 findings, 2 wrong usage, 3 the compiler can't run here."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except UsageError as error:
        print(f"lowering: {error}", file=sys.stderr)
        return USAGE
    except ToolchainError as error:
        print(f"lowering: {error}", file=sys.stderr)
        return CANNOT_RUN
    except BrokenPipeError:  # the reader of a pipe had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND
    except OSError as error:
        if error.filename is None:
            raise
        print(f"lowering: {error.filename}: {error.strerror}", file=sys.stderr)
        return USAGE


# ---------------------------------------------------------------- commands


def _check(options: argparse.Namespace) -> int:
    tools = _tools()
    todo = jobs.make(_wanted(options), options.timeout)
    reports = run_all(todo, tools, options)
    palette = report.Palette(sys.stdout.isatty())
    print(heading(tools, reports))
    if options.verbose or len({r.job.case.title for r in reports}) == 1:
        for one in reports if options.verbose else reports[:1]:
            print(f"\n{report.details(one, palette)}")
    for text in report.finding_texts(reports, palette, options.verbose):
        print(f"\n{text}")
    print(f"\n{report.table(reports, palette)}\n\n{summary(reports)}")
    for line in unused_allowances(reports):
        print(line)
    _write_json(options.json, reports, tools)
    return OK if passed(reports, options.strict) else FOUND


def _sweep(options: argparse.Namespace) -> int:
    tools = _tools()
    wanted = _wanted(options)
    if wanted.root is None or not wanted.root.is_dir():
        raise UsageError(
            f"sweep needs --root DIR, the folder that the cases' files are relative to, and has {wanted.root or 'none'}"
        )
    reports = run_all(jobs.make(wanted, options.timeout), tools, options)
    subject = Subject(options.name, wanted.root, options.revision or _revision(wanted.root))
    command = f"python -m vllm_ascend_ext.kernels.lowering sweep {' '.join(options.spec)} --root {options.name}"
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(sweep.page(subject, reports, tools, command))
    print(
        f"{heading(tools, reports)}\n{report.table(reports, report.Palette(sys.stdout.isatty()))}\n\n{summary(reports)}"
    )
    print(f"Page: {options.page}")
    _write_json(options.json, reports, tools)
    return OK


def _revision(root: Path) -> str:
    """The commit that a checkout is at; "unknown" for a folder that isn't one."""
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _largest_tile(options: argparse.Namespace) -> int:
    tools = _tools()
    todo = jobs.make(_wanted(options, options.vary), options.timeout)
    steps = Steps(options.most, options.multiple_of)
    searches = largest.search(todo, options.vary, steps, lambda batch: run_all(batch, tools, options))
    for one in searches:
        print(report.largest_text(one))
    return OK if all(one.largest is not None for one in searches) else FOUND


def _compare(options: argparse.Namespace) -> int:
    ours, theirs = (_report_in(path) for path in (options.ours, options.theirs))
    pairs = compare.read_pairs(options.pairs.read_text().splitlines())
    print(compare.table(pairs, ours, theirs), end="")
    return OK


def _report_in(path: Path) -> dict[str, Any]:
    """The report in a JSON file; UsageError if it holds none."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != report.FORMAT or "results" not in data:
        raise UsageError(
            f"{path} is no report of this tool in its format {report.FORMAT}; `check --json FILE` writes one"
        )
    return data


def _explain(options: argparse.Namespace) -> int:
    for code, kind in KINDS.items():
        if options.code in (None, code):
            print(f"{code} ({kind.severity.value})\n    {kind.meaning}")
    if options.code is not None and options.code not in KINDS:
        raise UsageError(f"there is no finding {options.code!r}; there are {', '.join(KINDS)}")
    return OK


# ---------------------------------------------------------------- running


def run_all(todo: Sequence[Job], tools: Toolchain, options: argparse.Namespace) -> list[Report]:
    """Run all jobs, some at once, and show progress on standard error; the reports are in the order of the jobs."""
    reports: dict[int, Report] = {}
    progress = _Progress(len(todo))
    top = Path(os.path.commonpath([job.path.parent for job in todo]))
    outcomes = pool.run(_worker(tools, options.keep, top), todo, at_once=options.jobs, timeout=options.timeout)
    for index, outcome in outcomes:
        reports[index] = _died(todo[index], outcome) if isinstance(outcome, pool.Died) else outcome
        progress.done(str(todo[index]))
    progress.close()
    return [reports[index] for index in range(len(todo))]


def _worker(tools: Toolchain, keep: Path | None, top: Path) -> pool.Worker[Job, Report]:
    """Checks a job, and leaves its files in a folder of ``keep`` that is named for its file below ``top``."""

    def work(job: Job, folder: Path, at_stage: Callable[[str], None]) -> Report:
        result = check.run(job, tools, folder, at_stage)
        if keep is not None:
            name = f"{job.case.title}-{job.setting}".replace(" ", "_").replace("/", "_").replace(",", "")
            shutil.copytree(folder, keep / job.path.relative_to(top).with_suffix("") / name, dirs_exist_ok=True)
        return result

    return work


def _died(job: Job, died: pool.Died) -> Report:
    """The report of a job whose process brought none."""
    code = "time-out" if died.timed_out else "crash"
    last = next((line for line in reversed(died.output.splitlines()) if line.strip()), "")
    message = f"in {died.stage}: {died.how}" + (f"; it last printed: {last[:300]}" if last else "")
    remedy = "raise --timeout, or cut the kernel down" if died.timed_out else "cut the kernel down until it compiles"
    return Report(job, findings=[Finding(code, message, remedy)])


class _Progress:
    """One line that counts up on a terminal; elsewhere a line for every tenth part of a long run."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._terminal = sys.stderr.isatty()

    def done(self, what: str) -> None:
        self._done += 1
        if self._terminal:
            print(f"\r\x1b[K[{self._done}/{self._total}] {what[:100]}", end="", file=sys.stderr, flush=True)
        elif self._total >= 40 and self._done % (self._total // 10) == 0:
            print(f"[{self._done}/{self._total}] {what}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def heading(tools: Toolchain, reports: Sequence[Report]) -> str:
    """Versions and extent of a run."""
    kernels = len({(one.job.path, one.job.case.kernel, one.line) for one in reports})
    versions = ", ".join(f"{name} {version}" for name, version in tools.versions)
    return f"{versions}: {report.numbered(len(reports), 'compilation')} of {report.numbered(kernels, 'kernel')}"


def summary(reports: Sequence[Report]) -> str:
    """How a run ended, in a line."""
    failed = sum(not one.ok for one in reports)
    warnings = sum(one.count(Severity.WARNING) for one in reports)
    all_of_them = report.numbered(len(reports), "compilation")
    return f"{len(reports) - failed} of {all_of_them} without an error, {report.numbered(warnings, 'warning')}"


def unused_allowances(reports: Sequence[Report]) -> list[str]:
    """One line for each thing that a case allows and none of its settings has: the reason for it is gone."""
    found: dict[str, set[str]] = {}
    allowed: dict[str, set[str]] = {}
    for one in reports:
        found.setdefault(one.job.case.title, set()).update(finding.code for finding in one.findings)
        allowed.setdefault(one.job.case.title, set()).update(one.job.case.allow)
    return [f"{title} allows {code}, and has none" for title in found for code in sorted(allowed[title] - found[title])]


def passed(reports: Sequence[Report], strict: bool) -> bool:
    """Whether a run counts as passed."""
    return all(one.ok and not (strict and one.count(Severity.WARNING)) for one in reports)


def _write_json(path: Path, reports: Sequence[Report], tools: Toolchain) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Defaults of a kernel may be types of Triton's, which JSON has no word for.
    path.write_text(json.dumps(report.as_json(reports, tools), indent=1, default=str) + "\n")
    print(f"JSON: {path}")


def _tools() -> Toolchain:
    tools = toolchain.find()
    for warning in tools.warnings:
        print(f"lowering: warning: {warning}", file=sys.stderr)
    # Imported before the first fork, so that each child has it at once.
    import triton  # noqa: F401

    return tools


# ---------------------------------------------------------------- options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_ascend_ext.kernels.lowering",
        description="What the Ascend compiler makes of a Triton kernel, on any machine: no NPU and no CANN needed.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check_ = _command(commands, "check", "lower kernels and say what is wrong with the result")
    _add_selection(check_)
    check_.add_argument("--strict", action="store_true", help="warnings fail the check too")
    check_.add_argument("-v", "--verbose", action="store_true", help="counts, loops and bounds of every compilation")
    check_.set_defaults(command=_check)
    tile = _command(commands, "largest-tile", "the largest value of a constant that fits the Unified Buffer")
    _add_selection(tile)
    tile.add_argument("--vary", required=True, metavar="NAME", help="the constant that may vary")
    tile.add_argument("--most", type=int, default=1 << 17, metavar="N", help="largest value to try")
    tile.add_argument("--multiple-of", type=int, metavar="M", help="try multiples of M instead of powers of two")
    tile.set_defaults(command=_largest_tile)
    sweep_ = _command(commands, "sweep", "check another project's declared kernels and write a page for its authors")
    _add_selection(sweep_)
    sweep_.add_argument("--name", default="the project", help="the project's name, for the page")
    sweep_.add_argument("--revision", help="what is swept, for the page; otherwise the commit of --root")
    sweep_.add_argument("--page", type=Path, default=Path("build/ascend-sweep.md"), metavar="FILE", help="the page")
    sweep_.set_defaults(command=_sweep)
    compare_ = _command(commands, "compare", "two JSON reports side by side, as a table in Markdown")
    compare_.add_argument("ours", type=Path, metavar="OURS.json", help="a report that check or sweep wrote (--json)")
    compare_.add_argument("theirs", type=Path, metavar="THEIRS.json", help="another one")
    compare_.add_argument("--pairs", type=Path, required=True, metavar="FILE", help="lines: operation | ours | theirs")
    compare_.set_defaults(command=_compare)
    explain = _command(commands, "explain", "what the findings mean")
    explain.add_argument("code", nargs="?", help="a finding, such as scalar-loop; all if left out")
    explain.set_defaults(command=_explain)
    return parser


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A command that says what it does in the list and in its own help."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """Options that say what to compile and how."""
    parser.add_argument(
        "spec",
        nargs="+",
        metavar="FILE.py[:KERNEL]",
        help="a kernel with its types and constants below; or a file, one of its kernels, or a folder of files, for "
        "which LOWERING_CASES is declared",
    )
    _option(parser, "--arg", "NAME=TYPE", "type of a run-time argument: x_ptr=*fp32 is a pointer, n=i32 a number")
    _option(parser, "--const", "NAME=VALUE", "value of a tl.constexpr, or of an argument that is None or 1 at launch")
    _option(parser, "--value", "NAME=INT", "run-time value that sizes the counts; grid is the number of programs")
    _option(parser, "--option", "NAME=VALUE", "further option of the Ascend backend, as the launch passes it")
    _option(parser, "--allow", "FINDING=REASON", "let a finding pass (`explain` lists them)")
    _option(parser, "--target", "CHIP", "A2, A3 or a chip's name; both unless a case says otherwise")
    parser.add_argument(
        "--multibuffer", choices=["on", "off", "both"], help="as the launch has it; both unless a case says otherwise"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their title")
    parser.add_argument("--root", type=Path, metavar="DIR", help="where the files lie that declared cases name")
    parser.add_argument(
        "--path", type=Path, action="append", default=[], metavar="DIR", help="where imports are found too"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilations at once (here %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds for one compilation (%(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("build/ascend-lowering.json"), metavar="FILE", help="report (%(default)s)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the IR of every stage there")


def _option(parser: argparse.ArgumentParser, name: str, metavar: str, text: str) -> None:
    """An option that may be given several times."""
    parser.add_argument(name, action="append", default=[], metavar=metavar, help=text)


def _wanted(options: argparse.Namespace, varied: str = "") -> Wanted:
    """What the options ask for; a case given on the command line needs no value of the constant that is ``varied``."""
    if options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs}: at least 1 compilation at a time is needed")
    if not options.timeout > 0:
        raise UsageError(f"--timeout {options.timeout:g}: a number of seconds above 0 is needed")
    both = {"on": (True,), "off": (False,), "both": (True, False), None: ()}
    signature = _pairs(options.arg, "--arg")
    try:
        for name, type_name in signature.items():
            check_type(name, type_name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    constants = {name: _constant(value) for name, value in _pairs(options.const, "--const").items()}
    if varied and signature:
        constants = {varied: 1, **constants}
    return Wanted(
        specs=tuple(options.spec),
        signature=signature,
        constants=constants,
        options={name: _constant(value) for name, value in _pairs(options.option, "--option").items()},
        values={name: _integer(name, value) for name, value in _pairs(options.value, "--value").items()},
        allow=_pairs(options.allow, "--allow"),
        targets=tuple(jobs.full_target(target) for target in options.target),
        multibuffer=both[options.multibuffer],
        only=options.only,
        root=options.root,
        paths=tuple(options.path),
    )


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {text!r}: write NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def _constant(text: str) -> Constant:
    """A constant as Python would read it; what is no number, True, False or None stays a string."""
    named: dict[str, Constant] = {"True": True, "False": False, "None": None}
    if text in named:
        return named[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _integer(name: str, text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise UsageError(f"--value {name}={text}: a run-time value is a whole number") from None


if __name__ == "__main__":
    sys.exit(main())
