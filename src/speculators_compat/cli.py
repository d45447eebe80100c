"""The command ``compat-check``. What it prints is found out by :mod:`speculators_compat.check`."""

# No "from __future__ import annotations" here: typer evaluates the command's annotations.
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

if TYPE_CHECKING:
    from rich.console import Console

    from .check import Finding, Report
    from .matrix import Matrix

_READY, _NOT_SUPPORTED, _USAGE, _UNTESTED, _BROKEN = range(5)

_HELP = """Check whether hidden-state extraction works with what is installed here.

Says what is installed, which row of the matrix was chosen, what every adapter
has to do, and the verdict. Imports neither torch nor vLLM.

\b
Exit status:
  0  ready
  1  not supported, or a check failed
  2  usage
  3  untested combination
  4  the check itself broke
"""

_STYLES = {
    "ok": "green",
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
    try:
        _app()(args=None if argv is None else list(argv), prog_name="compat-check")
    except Exception as error:  # the command-line library is missing, or does not fit
        raise SystemExit(_broke(error, as_json=False, debug=False)) from None


def _app() -> Any:
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command(help=_HELP)
    def check(
        json_: Annotated[
            bool, typer.Option("--json", help="Print JSON (it carries a schema number).")
        ] = False,
        explain: Annotated[
            Optional[str],  # noqa: UP045 - typer 0.12 knows no other form
            typer.Option("--explain", metavar="ID", help="Explain an error id or an adapter, then exit."),
        ] = None,
        list_: Annotated[
            bool, typer.Option("--list", help="Print the matrix as a table, then exit.")
        ] = False,
        strict: Annotated[
            bool, typer.Option("--strict", help="Count an untested combination as a failure.")
        ] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
        version: Annotated[bool, typer.Option("--version", help="Print the version, then exit.")] = False,
    ) -> None:
        if sum((explain is not None, list_, version)) > 1:
            print("compat-check: give one of --explain, --list and --version", file=sys.stderr)
            raise typer.Exit(_USAGE)

        def run() -> int:
            if version:
                return _version(json_)
            if explain is not None:
                return _explain(explain, json_)
            return _list(json_) if list_ else _check(json_, strict, debug)

        raise typer.Exit(_guarded(run, as_json=json_, debug=debug))

    return app


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


def _check(as_json: bool, strict: bool, debug: bool) -> int:
    from .check import run_check

    report = run_check(strict=strict)
    if as_json:
        _print_json(report.to_json())
    else:
        _render(report)
    if debug:
        for finding in report.findings:
            if finding.trace:
                print(f"{finding.subject}:\n{finding.trace}", file=sys.stderr)
    return report.exit_code


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def _print(console: "Console", thing: Any, style: str | None = None) -> None:
    """Print without the blanks that pad lines to the console's width."""
    with console.capture() as capture:
        console.print(thing, style=style)
    for line in capture.get().splitlines():
        print(line.rstrip())


def _rows(console: "Console", rows: Sequence[tuple[tuple[str, str | None], ...]]) -> None:
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


def _render(report: "Report") -> None:
    console = _console()
    levels = {finding.subject: finding.level for finding in reversed(report.findings)}

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

    if report.findings:
        _print(console, "\nFindings", "bold")
        for finding in report.findings:
            _render_finding(console, finding)

    verdict, style = _verdict(report)
    _print(console, f"\n{verdict}", style)


def _render_finding(console: "Console", finding: "Finding") -> None:
    from .errors import CATALOG

    style = {"error": "red", "broken": "red", "untested": "yellow"}.get(finding.level, "cyan")
    _rows(console, [((f"[{finding.id}]", style), (CATALOG[finding.id].title, None))])
    lines = [("found", finding.found), ("why", finding.why), ("mend", finding.mend)]
    _rows(console, [((f"  {label}", None), (text, None)) for label, text in lines if text])


def _verdict(report: "Report") -> tuple[str, str]:
    def ids(level: str) -> str:
        return ", ".join(dict.fromkeys(f.id for f in report.findings if f.level == level))

    if report.verdict == "ready":
        return "Verdict: ready", "bold green"
    if report.verdict == "untested":
        return f"Verdict: untested combination ({ids('untested')}); it is used with a warning", "bold yellow"
    if report.verdict == "broken":
        return f"Verdict: unknown, the check itself broke ({ids('broken')})", "bold red"
    first = ids("error").split(",")[0]
    return f"Verdict: not supported ({ids('error')}); more: compat-check --explain {first}", "bold red"


# --- --list and --explain ---


def _list(as_json: bool) -> int:
    from .matrix import load_matrix

    matrix = load_matrix()
    if as_json:
        _print_json(_matrix_json(matrix))
        return _READY
    console = _console()
    names = list(matrix.lineages)
    rows: list[tuple[tuple[str, str | None], ...]] = [
        (("vLLM", "bold"), *((f"speculators {name}", "bold") for name in names))
    ]
    for row in matrix.rows:
        cells = [row.cells[name] for name in names]
        texts = [f"{c.status}, {c.adapter_set}" if c.adapter_set else c.status for c in cells]
        rows.append(
            ((row.vllm, None), *((t, _STYLES.get(c.status)) for t, c in zip(texts, cells, strict=True)))
        )
    _rows(console, rows)
    notes: dict[str, list[str]] = {}
    for row in matrix.rows:
        for name in names:
            cell = row.cells[name]
            texts = [cell.note or "", cell.why or "", f"mend: {cell.mend}" if cell.mend else ""]
            text = "; ".join(filter(None, texts))
            if text:
                notes.setdefault(f"speculators {name}: {text}", []).append(row.vllm)
    for text, ranges in notes.items():
        where = "every vLLM" if len(ranges) == len(matrix.rows) else "vLLM " + " and ".join(ranges)
        print()
        _rows(console, [((f"{where}, {text}", None),)])
    return _READY


def _matrix_json(matrix: "Matrix") -> dict[str, Any]:
    return {
        "schema": 1,
        "lineages": {name: line.speculators for name, line in matrix.lineages.items()},
        "adapter_sets": {name: list(ids) for name, ids in matrix.adapter_sets.items()},
        "rows": [
            {
                "vllm": row.vllm,
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
