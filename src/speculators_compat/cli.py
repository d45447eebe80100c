"""The command ``compat-check``. What it prints is found out by :mod:`speculators_compat.check`."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from . import support
    from .check import Finding, Report
    from .doctor import Options, Result
    from .matrix import Matrix

_READY, _NOT_SUPPORTED, _USAGE, _UNTESTED, _BROKEN = range(5)

_HELP = """Check whether hidden-state extraction works with what is installed here.

Says what is installed, which row of the matrix was chosen, what every adapter
has to do, and the verdict. Imports neither torch nor vLLM.

With --model, --data or --output-dir it also checks the run that is to be made:
files, memory, data and host, each in seconds. --rehearse makes that run with a
small copy of the model, without its weights, in a few minutes.

Exit status:
  0  ready
  1  not supported, or a check failed
  2  usage
  3  untested combination
  4  the check itself broke
"""

_STYLES = {
    "ok": "green",
    "warning": "yellow",
    "skipped": "dim",
    "fail": "red",
    "warn": "yellow",
    "note": "cyan",
    "needed": "green",
    "drifted": "red",
    "failed": "red",
    "verified": "green",
    "structural": "cyan",
    "untested": "yellow",
    "unsupported": "red",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ends with :class:`SystemExit`.

    Args:
        argv: arguments; those of the process by default.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what the terminal can't show
    args = _parser().parse_args(argv)
    try:
        code = _guarded(lambda: _run(args), as_json=args.json, debug=args.debug)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone; Python would complain once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _NOT_SUPPORTED
    raise SystemExit(code)


def _parser() -> argparse.ArgumentParser:
    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
        return value

    def share(text: str) -> float:
        if not 0 < (value := float(text)) <= 1:
            raise argparse.ArgumentTypeError(f"{value} is not above 0 and at most 1")
        return value

    parser = argparse.ArgumentParser(
        prog="compat-check", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", action="store_true", help="Print JSON (it carries a schema number).")
    add("--explain", metavar="ID", help="Explain an error id or an adapter, then exit.")
    add("--list", action="store_true", help="Print what is supported, then exit.")
    add("--strict", action="store_true", help="Count an untested combination as a failure.")
    add("--debug", action="store_true", help="Show tracebacks.")
    add("--version", action="store_true", help="Print the version, then exit.")
    add = parser.add_argument_group("the run that is to be made").add_argument
    add("--model", metavar="DIR", help="Check the model, and whether the run fits.")
    add("--tp", type=count, default=1, metavar="N", help="Tensor parallel size.")
    add("--pp", type=count, default=1, metavar="N", help="Pipeline parallel size.")
    add(
        "--gpu-memory-utilization", type=share, default=0.8, metavar="X", help="Part of the GPU memory (0.8)."
    )
    add("--max-seq-len", type=count, default=2048, metavar="L", help="Longer prompts are cut (2048).")
    add("--batch-size", type=count, default=32, metavar="B", help="Prompts in one call (32).")
    add("--layer-ids", type=int, nargs="+", metavar="ID", help="Decoder layers, from 0 (--serve: as speculators counts).")
    add("--data", metavar="FILE.jsonl", help="Check the tokenized prompts.")
    add("--output-dir", metavar="DIR", help="Check the folder for the samples.")
    add("--vllm-args", metavar="JSON", help="More vLLM arguments, as an object.")
    add("--serve", action="store_true", help="Print the vllm serve command for --model.")
    add("--url", metavar="URL", help="Check a running server, with one prompt.")
    add("--states-dir", metavar="DIR", help="With --serve: where the server writes states.")
    add("--rehearse", action="store_true", help="Make the run with a small copy of --model.")
    add("--only", action="append", metavar="ID", help="Only the check with this id; may be repeated.")
    return parser


def _run(args: argparse.Namespace) -> int:
    if sum((args.explain is not None, args.list, args.version)) > 1:
        print("compat-check: give one of --explain, --list and --version", file=sys.stderr)
        return _USAGE
    if args.version:
        return _version(args.json)
    if args.explain is not None:
        return _explain(args.explain, args.json)
    if args.list:
        return _list(args.json)
    if args.serve and not args.model:
        print("compat-check: --serve needs --model: layers and flags depend on it", file=sys.stderr)
        return _USAGE
    try:
        options = _options(args)
        if args.serve or args.url:
            return _server(args, options)
    except _UsageError as error:
        print(f"compat-check: {error}", file=sys.stderr)
        return _USAGE
    return _check(args.json, args.strict, args.debug, options)


def _guarded(run: Callable[[], int], *, as_json: bool, debug: bool) -> int:
    try:
        return run()
    except BrokenPipeError:
        raise  # the reader has gone; the command-line library ends quietly
    except Exception as error:  # whatever it is: a script must be able to tell it from "not supported"
        return _broke(error, as_json=as_json, debug=debug)


def _broke(error: Exception, *, as_json: bool, debug: bool) -> int:
    from .errors import CATALOG, CompatError

    id = error.id if isinstance(error, CompatError) else "SC901"
    if as_json:
        from .check import broken_report

        _print_json(broken_report(error).to_json())
    if debug:
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__)
    if isinstance(error, CompatError):
        print(error, file=sys.stderr)
    else:
        print(f"[{id}] {CATALOG[id].title}: {type(error).__name__}: {error}", file=sys.stderr)
        hint = "please report the traceback above" if debug else "compat-check --debug shows the traceback"
        print(f"  mend: {hint}\n  more: compat-check --explain {id}", file=sys.stderr)
    return _BROKEN


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def _version(as_json: bool) -> int:
    from . import __version__

    if as_json:
        _print_json({"schema": 1, "speculators_compat": __version__})
    else:
        print(f"speculators-compat {__version__}")
    return _READY


# --- the check ---


class _UsageError(Exception):
    """What was given on the command line can't be meant."""


def _options(args: argparse.Namespace) -> Options | None:
    """The options of the run to be checked; ``None`` where none is described, and nothing more is loaded."""
    if not (args.model or args.data or args.output_dir or args.only or args.rehearse):
        return None
    from . import settings
    from .doctor import Options
    from .errors import CATALOG

    if args.rehearse and not args.model:
        raise _UsageError("--rehearse needs --model: the architecture is taken from there")
    ids = tuple(dict.fromkeys(id.upper() for one in args.only or () for id in one.split(",") if id))
    unknown = [id for id in ids if id not in CATALOG]
    if unknown:
        raise _UsageError(f"--only: nothing is called {unknown[0]!r}")
    try:
        given = args.vllm_args
        vllm_args = settings.current().vllm_args if given is None else json.loads(given)
    except ValueError as error:
        raise _UsageError(f"--vllm-args: not JSON: {error}") from None
    if not isinstance(vllm_args, dict):
        raise _UsageError("--vllm-args: not a JSON object")
    names = ("model", "tp", "pp", "gpu_memory_utilization", "max_seq_len", "batch_size", "data", "output_dir")
    return Options(
        **{name: getattr(args, name) for name in names},
        layer_ids=None if args.layer_ids is None else tuple(args.layer_ids),
        vllm_args=vllm_args,
        rehearse=args.rehearse,
        only=ids,
    )


def _server(args: argparse.Namespace, options: Options | None) -> int:
    """``--serve`` and ``--url``: the path through `vllm serve`, of which the plain check knows nothing."""
    from .check import Report
    from .doctor import Options
    from .doctor.context import Context
    from .doctor.serve import run_server_checks

    context = Context(options or Options())
    checks, plan = run_server_checks(context, serve=args.serve, url=args.url, folder=args.states_dir)
    report = Report({}, None, "", (), (), checks)
    if args.json:
        serve = {} if plan is None else {"serve": plan.to_json()}
        _print_json({**report.to_json(), **serve})
    else:
        _render(report)
        if plan is not None:
            for note in plan.notes:
                print(f"# {note}")
            print(plan.command)
    if args.debug:
        for one in checks:
            if one.trace:
                print(f"check {one.id}:\n{one.trace}", file=sys.stderr)
    return report.exit_code


def _check(as_json: bool, strict: bool, debug: bool, options: Options | None = None) -> int:
    from .check import run_check

    report = run_check(strict=strict, options=options)
    if as_json:
        _print_json(report.to_json())
    else:
        _render(report)
    if debug:
        for finding in report.findings:
            if finding.trace:
                print(f"{finding.subject}:\n{finding.trace}", file=sys.stderr)
        for one in report.checks:
            if one.trace:
                print(f"check {one.id}:\n{one.trace}", file=sys.stderr)
    return report.exit_code


#: This command's options and their names in ``examples/extract_hidden_states.py``.
_SCRIPT = {"--model": "--model-path", "--tp": "--tp-size", "--data": "--prepared-data"}


def check_first(arguments: Mapping[str, Any], *, layer_ids: Sequence[int] | None) -> bool:
    """For scripts: make the checks of a run, and print to standard error what is wrong with it.

    Args:
        arguments: those of ``examples/extract_hidden_states.py`` by name; any of them may be left out.
        layer_ids: decoder layers, from 0; ``None`` for speculators' default.

    Returns:
        Whether nothing failed. Warnings, untested combinations and checks that broke do not stop a run.
    """
    import contextlib
    import re

    from . import settings
    from .check import run_check
    from .doctor import Options

    same = ("gpu_memory_utilization", "max_seq_len", "batch_size", "limit", "output_dir")
    values = {name: arguments[name] for name in same if name in arguments}
    values.update(model=arguments.get("model_path"), data=arguments.get("prepared_data"))
    options = Options(
        **values,
        tp=arguments.get("tp_size", 1),
        layer_ids=None if layer_ids is None else tuple(layer_ids),
        vllm_args=settings.current().vllm_args,
    )
    report = run_check(options=options)
    problems = [one for one in report.checks if one.status in ("failed", "warning")]
    console = _console()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        for finding in report.findings:
            _render_finding(console, finding)
        render_problems(problems, console)
        if report.verdict in ("not-supported", "not-ready"):
            print(_verdict(report)[0])
    words = "|".join(_SCRIPT)
    told = re.sub(rf"(?:{words})(?![\w-])", lambda found: _SCRIPT[found.group()], text.getvalue())
    print(told, end="", file=sys.stderr)
    return report.verdict not in ("not-supported", "not-ready")


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def _print(console: Console, thing: Any, style: str | None = None) -> None:
    """Print without the blanks that pad lines to the console's width."""
    with console.capture() as capture:
        console.print(thing, style=style)
    for line in capture.get().splitlines():
        print(line.rstrip())


def _rows(console: Console, rows: Sequence[tuple[tuple[str, str | None], ...]]) -> None:
    """Print columns, indented; a cell is text and style, and the last one wraps."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    last = len(rows[0]) - 1
    for number in range(len(rows[0])):
        table.add_column(no_wrap=number < last, overflow="fold")
    for row in rows:
        table.add_row(*(Text(text, style=style or "") for text, style in row))
    _print(console, Padding(table, (0, 0, 0, 2)))


def _render(report: Report) -> None:
    console = _console()
    levels = {finding.subject: finding.level for finding in reversed(report.findings)}

    if report.installed:
        _print(console, "Installed", "bold")
    rows = []
    for name, found in report.installed.items():
        mark = {"error": "fail", "untested": "warn"}.get(levels.get(name, ""), "ok")
        what = str(
            found.version or found.raw_version or ("version unknown" if found.present else "not installed")
        )
        if found.distribution and found.distribution != name:
            what += f" (distribution {found.distribution})"
        if found.problem is not None:
            what += f" [{found.problem.id}]"
        rows.append(((mark, _STYLES[mark]), (name, None), (what, None)))
    if rows:
        _rows(console, rows)

    chosen = report.selection
    if chosen is not None:
        _print(console, "\nMatrix", "bold")
        status = chosen.cell.status
        lines = [
            ("row", f"vLLM {chosen.row.vllm}, speculators {chosen.lineage}: {status}", _STYLES.get(status)),
            ("because", chosen.reason, None),
            ("evidence", chosen.cell.evidence or "", None),
            ("note", chosen.cell.note or "", None),
        ]
        _rows(console, [((label, None), (text, style)) for label, text, style in lines if text])

    selected = [adapter for adapter in report.adapters if adapter.selected]
    if selected:
        _print(console, f"\nAdapters ({report.way}, in the order of application)", "bold")
        _rows(console, [((a.state, _STYLES.get(a.state)), (a.id, None), (a.reason, None)) for a in selected])
        unused = [adapter.id for adapter in report.adapters if not adapter.selected]
        if unused:
            _rows(console, [(("not in this set: " + ", ".join(unused), "dim"),)])

    _render_checks(console, report.checks)
    problems = [one for one in report.checks if one.status in ("failed", "warning")]
    if report.findings or problems:
        _print(console, "\nFindings", "bold")
        for finding in report.findings:
            _render_finding(console, finding)
        render_problems(problems, console)

    verdict, style = _verdict(report)
    _print(console, f"\n{verdict}", style)


def _render_finding(console: Console, finding: Finding) -> None:
    from .errors import CATALOG

    style = {"error": "red", "broken": "red", "untested": "yellow"}.get(finding.level, "cyan")
    _rows(console, [((f"[{finding.id}]", style), (CATALOG[finding.id].title, None))])
    lines = [("found", finding.found), ("why", finding.why), ("mend", finding.mend)]
    _rows(console, [((f"  {label}", None), (text, None)) for label, text in lines if text])


def _render_checks(console: Console, checks: Sequence[Result]) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    for area in dict.fromkeys(one.area for one in checks):
        _print(console, "\n" + area.capitalize(), "bold")
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(no_wrap=True, width=7)
        table.add_column(no_wrap=True, width=5)
        table.add_column(overflow="fold", ratio=1)
        table.add_column(no_wrap=True, width=6, justify="right")
        for one in (one for one in checks if one.area == area):
            told = one.outcome.found if one.status in ("ok", "skipped") else "see below"
            table.add_row(
                Text(one.status, style=_STYLES.get(one.status, "")),
                Text(one.id),
                Text(f"{one.name}: {told}"),
                Text(f"{one.seconds:.2f} s" if one.seconds < 10 else f"{one.seconds:.0f} s"),
            )
        _print(console, Padding(table, (0, 0, 0, 2)))


def render_problems(checks: Sequence[Result], console: Console | None = None) -> None:
    """Print what was found, expected, why it matters and what to do, failures first."""
    from .errors import CATALOG

    console = console or _console()
    for one in sorted(checks, key=lambda one: one.status != "failed"):
        style = _STYLES.get(one.status, "")
        _rows(console, [((f"[{one.id}]", style), (f"{one.status}: {CATALOG[one.id].title}", None))])
        out = one.outcome
        lines = [("found", out.found), ("expected", out.expected), ("why", out.why), ("mend", out.mend)]
        _rows(console, [((f"  {label}", None), (text, None)) for label, text in lines if text])


def _verdict(report: Report) -> tuple[str, str]:
    def ids(level: str) -> str:
        return ", ".join(dict.fromkeys(f.id for f in report.findings if f.level == level))

    counts = [
        f"{count} {what}"
        for what, count in (
            ("warning(s)", sum(one.status == "warning" for one in report.checks)),
            ("skipped", sum(one.status == "skipped" for one in report.checks)),
        )
        if count
    ]
    if report.verdict == "ready":
        return "Verdict: ready" + (f" ({', '.join(counts)})" if counts else ""), "bold green"
    if report.verdict == "not-ready":
        failed = ", ".join(dict.fromkeys(one.id for one in report.checks if one.status == "failed"))
        first = failed.split(",")[0]
        return f"Verdict: not ready ({failed}); more: compat-check --explain {first}", "bold red"
    if report.verdict == "untested":
        return f"Verdict: untested combination ({ids('untested')}); it is used with a warning", "bold yellow"
    if report.verdict == "broken":
        broken = ", ".join(filter(None, [ids("broken"), *(one.id for one in report.checks if one.crashed)]))
        return f"Verdict: unknown, the check itself broke ({broken})", "bold red"
    first = ids("error").split(",")[0]
    return f"Verdict: not supported ({ids('error')}); more: compat-check --explain {first}", "bold red"


# --- --list and --explain ---


def _list(as_json: bool) -> int:
    from . import support
    from .matrix import load_matrix

    matrix, proofs = load_matrix(), support.load_support()
    if as_json:
        _print_json(_matrix_json(matrix, proofs))
        return _READY
    console = _console()
    lines, heads = support.table(matrix, proofs), support.columns(matrix.lineages.values())
    known = [release for row in matrix.rows for release in row.releases]
    titles = ("vLLM", "speculators", "status", "way", "error", "date")
    rows: list[tuple[tuple[str, str | None], ...]] = [tuple((title, "bold") for title in titles)]

    def add(vllm: str, columns: Sequence[support.Column], one: support.Entry) -> None:
        names = "-".join(dict.fromkeys((columns[0].name, columns[-1].name)))
        error = "" if one.error is None else f"{one.error:.1e}"
        oldest = one.dates[0] if one.dates else ""
        label = (support.LABELS[one.status], _STYLES.get(one.status))
        rows.append(((vllm, None), (names, None), label, (one.way, None), (error, None), (oldest, None)))

    everywhere = [
        n for n in range(len(heads)) if all(line.entries[n].status == "unsupported" for line in lines)
    ]
    for line in lines:
        for columns, one in support.side_by_side(line, heads):
            shown = [column for column in columns if heads.index(column) not in everywhere]
            if shown:
                add(support.spans(line.releases, known, "-"), shown, one)
    for n in everywhere:
        add("all", [heads[n]], lines[0].entries[n])
    _rows(console, rows)
    for text, releases in support.notes(matrix, proofs).items():
        where = "every vLLM" if len(releases) == len(known) else f"vLLM {support.spans(releases, known)}"
        print()
        _rows(console, [((f"{where}, {text}", None),)])
    if matrix.server_rows:
        print("\nServer path (vllm serve with the method extract_hidden_states)")
        _rows(
            console,
            [
                ((", ".join(map(str, row.releases)), None), (row.status, _STYLES.get(row.status)), (row.note or "", None))
                for row in matrix.server_rows
            ],
        )
    return _READY


def _matrix_json(matrix: Matrix, proofs: support.Proofs) -> dict[str, Any]:
    from . import support

    heads = support.columns(matrix.lineages.values())
    shown = [
        (row, release, column, support.entry(row, release, column, proofs))
        for row in matrix.rows
        for release in row.releases
        for column in heads
    ]
    return {
        "schema": 1,
        "lineages": {name: line.speculators for name, line in matrix.lineages.items()},
        "adapter_sets": {name: list(ids) for name, ids in matrix.adapter_sets.items()},
        "rows": [
            {
                "vllm": row.vllm,
                "releases": [str(release) for release in row.releases],
                "cells": {
                    name: {
                        "status": cell.status,
                        "adapter_set": cell.adapter_set,
                        "evidence": cell.evidence,
                        "note": cell.note,
                        "why": cell.why,
                        "mend": cell.mend,
                    }
                    for name, cell in row.cells.items()
                },
            }
            for row in matrix.rows
        ],
        "server": [
            {
                "vllm": row.vllm,
                "releases": [str(release) for release in row.releases],
                "status": row.status,
                "evidence": row.evidence,
                "note": row.note,
            }
            for row in matrix.server_rows
        ],
        "support": [
            {
                "vllm": str(release),
                "speculators": column.name,
                "status": one.status,
                "adapter_set": one.way or None,
                "date": one.date or None,
                "error": one.error,
            }
            for row, release, column, one in shown
        ],
    }


_ADAPTER_FIELDS = (
    ("seam", "seam"),
    ("why", "why"),
    ("how", "how"),
    ("since", "since"),
    ("upstream", "upstream"),
    ("retire when", "retire_when"),
)


def _explain(id: str, as_json: bool) -> int:
    from .errors import CATALOG

    info = CATALOG.get(id.upper())
    if info is not None:
        if as_json:
            _print_json({"schema": 1, "id": id.upper(), "title": info.title, "explain": info.explain})
        else:
            _print(_console(), f"{id.upper()}: {info.title}\n", "bold")
            for paragraph in _paragraphs(info.explain):
                if paragraph.startswith("  "):
                    print(paragraph)  # a command, to be copied: never broken
                else:
                    _print(_console(), paragraph)
        return _READY
    from .registry import adapters

    adapter = adapters().get(id)
    if adapter is not None:
        fields = [(label, str(getattr(adapter, name))) for label, name in _ADAPTER_FIELDS]
        if as_json:
            _print_json(
                {"schema": 1, "id": id, **{name: str(getattr(adapter, name)) for _, name in _ADAPTER_FIELDS}}
            )
        else:
            console = _console()
            _print(console, f"adapter {id}\n", "bold")
            _rows(console, [((label, "bold"), (text, None)) for label, text in fields])
        return _READY

    import difflib

    known = [*CATALOG, *adapters()]
    close = [
        k for k in known if k.lower() in difflib.get_close_matches(id.lower(), [k.lower() for k in known])
    ]
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
    print(f"compat-check: nothing is called {id!r}; {hint}", file=sys.stderr)
    return _USAGE


def _paragraphs(text: str) -> list[str]:
    """Undo the line breaks that were made for the source file's width.

    Breaks stay after a line wider than that, before the mend, and around indented lines, which are commands.
    """
    out: list[str] = []
    last = ""
    for line in text.splitlines():
        soft = (
            last and len(last) <= 100 and not last.startswith("  ") and not line.startswith(("  ", "Mend:"))
        )
        if soft:
            out[-1] += f" {line}"
        else:
            out.append(line)
        last = line
    return out


if __name__ == "__main__":
    main()
