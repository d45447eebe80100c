# SPDX-License-Identifier: Apache-2.0
"""Writes what is made from ``compat_matrix.yaml`` and ``evidence/sweep.json``, and says where the two disagree.

    python tools/support_table.py            write README's support table and the package's support.json
    python tools/support_table.py --check    write nothing; exit 1 if anything disagrees or is out of date

README's table stands between ``<!-- support-table -->`` and ``<!-- /support-table -->``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from speculators_compat import support
from speculators_compat.matrix import Cell, Matrix, ServerRow, load_matrix

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- support-table -->", "<!-- /support-table -->"
Key = tuple[Version, Version]


# --------------------------------------------------------------------------- evidence


def read_rows(evidence: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """The rows of ``evidence/sweep.json``, by vLLM and speculators release."""
    return {(Version(row["vllm"]), Version(row["speculators"])): row for row in evidence["rows"]}


def condensed(evidence: dict[str, Any]) -> str:
    """``support.json``: one line for each row of the evidence."""
    cells = []
    for key in sorted(read_rows(evidence)):
        row = read_rows(evidence)[key]
        cell: dict[str, Any] = {"vllm": str(key[0]), "speculators": str(key[1])}
        cell |= {name: row[name] for name in ("status", "date", "way", "error") if name in row}
        notes = list(_notes(row, evidence.get("about", {}).get("models", {})))
        cells.append(json.dumps(cell | ({"notes": notes} if notes else {})))
    body = ",\n".join(cells)
    head = f'"schema": {support.SCHEMA},\n"about": "written by tools/support_table.py",\n'
    return f'{{\n{head}"cells": [\n{body}\n]\n}}\n'


def _notes(row: dict[str, Any], models: dict[str, str]) -> Iterator[str]:
    """How this row's run differs from the others, in words."""
    if row["status"] == "structural":
        yield row["why"]
    if "preload" in row:
        names = [row["preload"]] if isinstance(row["preload"], str) else row["preload"]
        yield f"the CPU builds insist on {' and '.join(names)} in LD_PRELOAD, and got it"
    for model in dict.fromkeys(run["model"] for run in row["runs"]):
        runs = [run for run in row["runs"] if run["model"] == model]
        name = models.get(model, model)
        if any(run["status"] == "absent" for run in runs):
            yield f"{name} is not in these releases"
        for workaround in dict.fromkeys(run["workaround"] for run in runs if "workaround" in run):
            ranks = {run["tensor_parallel"] for run in runs if run.get("workaround") == workaround}
            where = f" with tensor parallel {max(ranks)}" if ranks == {2} else ""
            yield f"the CPU build cannot run {name}{where} by itself: {workaround}"
        own = [run for run in runs if run.get("reference") == "engine capture"]
        if own:
            wrong = any(run.get("plain_vllm") == "disagrees with transformers" for run in own)
            cause = f"plain vLLM itself disagrees with transformers on {name}: its" if wrong else f"{name}: its"
            yield (
                f"{cause} states were compared with those that independent hooks see in plain vLLM, one prompt at a time"
            )


# --------------------------------------------------------------------------- matrix against evidence


def disagreements(matrix: Matrix, evidence: dict[str, Any], root: Path = ROOT) -> list[str]:
    """Where the matrix says something that the evidence does not prove, or less than it proves."""
    rows = read_rows(evidence)
    found: dict[str, list[str]] = {}
    listed: set[Key] = set()
    for row in matrix.rows:
        for name, line in matrix.lineages.items():
            cell, where = row.cells[name], f"vLLM {row.vllm} with speculators {name}"
            keys = [(vllm, spec) for vllm in row.releases for spec in line.releases or ()]
            listed |= set(keys)
            if cell.status in ("verified", "structural") and line.releases is None:
                found[f"{where} is {cell.status}, but the line lists no releases that could prove it"] = []
            for vllm, spec in keys:
                said = cell.for_release(vllm)
                problem = _problem(said, rows.get((vllm, spec)), evidence, root)
                if problem:
                    text = f"{where} is {said.status}, but {problem}"
                    found.setdefault(text, []).append(f"{vllm} x {spec}")
            plain = [key for key in keys if key[0] not in cell.exceptions]
            if (
                cell.status in ("untested", "structural")
                and plain
                and all(_problem(_as_verified(cell), rows.get(key), evidence, root) is None for key in plain)
            ):
                found[f"{where} is {cell.status}, but every release is verified: say so"] = []
    for vllm, spec in sorted(rows.keys() - listed):
        found.setdefault("evidence for releases that the matrix does not list", []).append(f"{vllm} x {spec}")
    return [f"{text}: {', '.join(names)}" if names else text for text, names in found.items()]


def _as_verified(cell: Cell) -> Cell:
    return Cell("verified", cell.adapters, cell.adapter_set, None, None, None, None)


def _problem(cell: Cell, row: dict[str, Any] | None, evidence: dict[str, Any], root: Path) -> str | None:
    """What the evidence has against a cell, or ``None``."""
    if cell.evidence and not (root / cell.evidence).is_file():
        return f"there is no {cell.evidence}"
    if row is None:
        return "there is no evidence" if cell.status in ("verified", "structural") else None
    if cell.status == "unsupported":
        return "it works" if row["status"] == "verified" else None
    if row["status"] == "failed" and cell.status == "untested" and cell.note:
        return None  # the note says why that is no reason to refuse it
    if row["status"] == "failed":
        return f"it failed ({row.get('why', 'no reason given')})"
    if row["way"] != cell.adapter_set:
        return f"{row['way']} was run, and the matrix picks {cell.adapter_set}"
    if cell.status != "verified":
        return None
    if row["status"] != "verified":
        return f"the evidence is {row['status']}"
    bad = [run for run in row["runs"] if run["status"] not in ("passed", "absent") or run.get("order") is False]
    if bad or not any(run["status"] == "passed" for run in row["runs"]):
        return "not all of its runs passed"
    tolerance = evidence.get("about", {}).get("tolerance")
    if tolerance is None or "error" not in row or row["error"] > tolerance:
        return f"its error is {row.get('error')} with a tolerance of {tolerance}"
    return None


def server_rows(evidence: dict[str, Any]) -> dict[Version, list[dict[str, Any]]]:
    """The rows of ``evidence/server.json`` by vLLM release, less those that leave out a mend, or ask for model runner V2,
    which refuses the method."""
    found: dict[Version, list[dict[str, Any]]] = {}
    for row in evidence["rows"]:
        if row["mended"] and not row.get("without") and row["runner"] != "2":
            found.setdefault(Version(Version(row["vllm"]).base_version), []).append(row)
    return found


def server_disagreements(matrix: Matrix, evidence: dict[str, Any], root: Path = ROOT) -> list[str]:
    """Where the matrix says more of the server path than a served and an offline cell that are right."""
    rows = server_rows(evidence)
    found = []
    for row in matrix.server_rows:
        for release in row.releases if row.status == "verified" else ():
            where = f"the server path on vLLM {release} is verified, but"
            mine = rows.get(release, [])
            if row.evidence and not (root / row.evidence).is_file():
                found.append(f"{where} there is no {row.evidence}")
            if bad := [r["model"] for r in mine if r["outcome"] != "right"]:
                found.append(f"{where} {', '.join(bad)} failed")
            if missing := {"serve", "offline"} - {r["way"] for r in mine}:
                found.append(f"{where} there is no evidence of {', '.join(sorted(missing))}")
    return found


def _server_row(row: ServerRow, rows: dict[Version, list[dict[str, Any]]]) -> str:
    mine = [r for release in row.releases for r in rows.get(release, [])]
    said = [f"**{row.status}**" if row.status == "verified" else row.status]
    if row.status == "verified" and mine:
        worst = max(r["worst"] for r in mine if r["dtype"] == "float32" and not r.get("kv_cache_dtype"))
        clients = sorted({r["speculators"] for r in mine if r.get("speculators")}, key=Version)
        said += [max(r["date"] for r in mine), f"error {worst:.1e}", f"clients {', '.join(clients)}"]
    if row.note:
        said.append(row.note)
    return f"- `vllm serve` ([server path](docs/server.md)), vLLM {', '.join(map(str, row.releases))}: {', '.join(said)}"


def server_markdown(matrix: Matrix, evidence: dict[str, Any]) -> str:
    """A line for each row of the server path."""
    rows = server_rows(evidence)
    lines = [_server_row(row, rows) for row in matrix.server_rows]
    return "".join(f"{line}\n" for line in ["", *lines]) if lines else ""  # Markdown wants a blank line before a list


# --------------------------------------------------------------------------- README


def markdown(matrix: Matrix, proofs: support.Proofs) -> str:
    """The table and its notes."""
    heads = support.columns(matrix.lineages.values())
    known = [release for row in matrix.rows for release in row.releases]
    table = support.table(matrix, proofs)
    groups = list(support.alike(table, heads))
    names = [" to ".join(dict.fromkeys((heads[group[0]].name, heads[group[-1]].name))) for group in groups]
    lines = [
        "| vLLM | " + " | ".join(f"speculators {name}" for name in names) + " |",
        "|---" * (len(groups) + 1) + "|",
    ]
    for line in table:
        cells = [_cell(support.merge([line.entries[n] for n in group])) for group in groups]
        lines.append(f"| {support.spans(line.releases, known)} | " + " | ".join(cells) + " |")
    lines.append("")
    notes = support.notes(matrix, proofs)
    if notes:  # long, and of use to whoever has that release
        lines += ["<details>", "<summary>Notes on single releases</summary>", ""]
        for text, releases in notes.items():
            where = "every vLLM" if len(releases) == len(known) else f"vLLM {support.spans(releases, known)}"
            lines.append(f"- {where}: {text}")
        lines += ["", "</details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def _cell(one: support.Entry) -> str:
    error = "" if one.error is None else f"error {one.error:.1e}"
    label = support.LABELS[one.status]
    return ", ".join(filter(None, [f"**{label}**" if one.error else label, one.date, error, one.way]))


def with_table(readme: str, table: str) -> str:
    """README's text with the table put between the markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in before:
        raise SystemExit(f"README.md needs {BEGIN} and {END}, each once and on a line of its own")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 1 if something disagrees, or is out of date with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="source tree")
    args = parser.parse_args(argv)
    root: Path = args.root
    matrix = load_matrix(root / "compat_matrix.yaml")
    file = root / "evidence" / "sweep.json"
    evidence = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    problems = [] if file.is_file() else ["there is no evidence/sweep.json: run nox -s sweep"]
    problems += disagreements(matrix, evidence, root)
    served_file = root / "evidence" / "server.json"
    served = json.loads(served_file.read_text()) if served_file.is_file() else {"rows": []}
    problems += server_disagreements(matrix, served, root)

    packaged, readme = root / "src" / "speculators_compat" / "support.json", root / "README.md"
    small = condensed(evidence)
    if not args.check:
        packaged.write_text(small)
    elif not packaged.is_file() or packaged.read_text() != small:
        problems.append("support.json is out of date: run tools/support_table.py")
    if packaged.is_file():
        text = readme.read_text(encoding="utf-8")
        table = markdown(matrix, support.load_support(packaged)) + server_markdown(matrix, served)
        fresh = with_table(text, table)
        if text != fresh and args.check:
            problems.append("README's support table is out of date: run tools/support_table.py")
        elif text != fresh:
            readme.write_text(fresh, encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
