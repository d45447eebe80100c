"""Matrix, evidence, README's support table and the package's support.json say the same."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from speculators_compat import support
from speculators_compat.matrix import load_matrix

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "support_table.py"

if not TOOL.is_file():
    pytest.skip("the source distribution has no tools", allow_module_level=True)


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("support_table", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = _tool()

MATRIX = """\
schema: 1
lineages:
  "0.3": {speculators: ">=0.3,<0.4", releases: [0.3.0]}
  "0.4": {speculators: ">=0.4,<0.5", releases: [0.4.0, 0.4.0.1]}
  "0.5+": {speculators: ">=0.5,<0.10"}
adapter_sets:
  in-process: [alpha]
  engine: [beta]
rows:
  - vllm: ">=0.12,<0.17"
    releases: [0.12.0, 0.14.1, 0.16.0]
    "0.3": &way {status: verified, adapters: in-process, evidence: evidence/sweep.json}
    "0.4": *way
    "0.5+": &removed {status: unsupported, why: it was removed, mend: install 0.4}
  - vllm: ">=0.17,<0.19"
    releases: [0.17.0, 0.18.1]
    "0.3": {status: verified, adapters: engine, evidence: evidence/sweep.json}
    "0.4": {status: structural, adapters: engine}
    "0.5+": *removed
"""
RUN = {"model": "llama", "tensor_parallel": 1, "start": "fork", "status": "passed", "order": True, "error": 1e-6}
ABSENT = {"model": "kimi", "tensor_parallel": 1, "start": "fork", "status": "absent", "problem": "no"}


def row(vllm: str, speculators: str) -> dict[str, Any]:
    """A row of the evidence that agrees with the matrix."""
    structural = vllm >= "0.17" and speculators >= "0.4"
    way = "in-process" if vllm < "0.17" else "engine"
    found = {"vllm": vllm, "speculators": speculators, "date": "2026-12-01", "way": way, "runs": []}
    if structural:
        return found | {"status": "structural", "why": "not run: there is no wheel"}
    return found | {"status": "verified", "error": 1e-6, "runs": [dict(RUN), dict(ABSENT)]}


EVIDENCE: dict[str, Any] = {
    "schema": 1,
    "about": {"tolerance": 1e-5, "models": {"llama": "LlamaForCausalLM", "kimi": "KimiForCausalLM"}},
    "rows": [
        row(v, s) for v in ("0.12.0", "0.14.1", "0.16.0", "0.17.0", "0.18.1") for s in ("0.3.0", "0.4.0", "0.4.0.1")
    ],
}


class Tree:
    """A source tree with nothing but what the tool looks at."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.evidence = copy.deepcopy(EVIDENCE)
        for folder in ("evidence", "src/speculators_compat"):
            (root / folder).mkdir(parents=True)
        self.matrix = root / "compat_matrix.yaml"
        self.readme = root / "README.md"
        self.matrix.write_text(MATRIX)
        self.readme.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n")
        self.save()
        self.run()

    def save(self) -> None:
        (self.root / "evidence" / "sweep.json").write_text(json.dumps(self.evidence))

    def row(self, vllm: str, speculators: str) -> dict[str, Any]:
        (found,) = (r for r in self.evidence["rows"] if (r["vllm"], r["speculators"]) == (vllm, speculators))
        return found  # type: ignore[no-any-return]

    def edit(self, old: str, new: str) -> None:
        assert old in MATRIX
        self.matrix.write_text(MATRIX.replace(old, new, 1))

    def run(self, *arguments: str) -> tuple[int, str]:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                code = tool.main(["--root", str(self.root), *arguments])
            except SystemExit as end:  # with a message, as the interpreter prints it
                code, _ = 1, print(end, file=said)
        return code, said.getvalue()

    def problems(self) -> list[str]:
        """What is said to disagree once everything has been written anew; all of it makes the check fail."""
        self.save()
        wrote, said = self.run()
        assert (wrote, said) == self.run("--check")
        assert wrote == (1 if said else 0)
        return said.splitlines()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# --- this tree ---


def test_this_tree_agrees() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_release_is_verified_or_says_why_not() -> None:
    matrix, proofs = load_matrix(), support.load_support()
    for line in support.table(matrix, proofs):
        for column, one in zip(support.columns(matrix.lineages.values()), line.entries, strict=True):
            for release in line.releases:
                cell = line.row.cells[column.lineage].for_release(release)
                # As a status of the matrix and with a reason, not because the evidence is missing.
                said = cell.status == "untested" and cell.note
                assert one.status != "untested" or said, f"vLLM {release} with speculators {column.name}"


# --- a tree that agrees ---


def test_table(tree: Tree) -> None:
    assert tree.run("--check") == (0, "")
    assert tree.readme.read_text() == (
        f"before\n{tool.BEGIN}\n"
        "| vLLM | speculators 0.3.0 | speculators 0.4.0 to 0.4.0.1 | speculators 0.5+ |\n"
        "|---|---|---|---|\n"
        "| 0.12.0 to 0.16.0 | **verified**, 2026-12-01, error 1.0e-06, in-process "
        "| **verified**, 2026-12-01, error 1.0e-06, in-process | not supported |\n"
        "| 0.17.0 to 0.18.1 | **verified**, 2026-12-01, error 1.0e-06, engine "
        "| structural only, 2026-12-01, engine | not supported |\n"
        "\n"
        "<details>\n<summary>Notes on single releases</summary>\n\n"
        "- every vLLM: KimiForCausalLM is not in these releases\n"
        "- every vLLM: speculators 0.5+: it was removed; mend: install 0.4\n"
        "- vLLM 0.17.0 to 0.18.1: not run: there is no wheel\n\n</details>\n"
        f"{tool.END}\nafter\n"
    )


def test_packaged_evidence(tree: Tree) -> None:
    proofs = support.load_support(tree.root / "src" / "speculators_compat" / "support.json")
    assert len(proofs) == 15
    one = proofs[Version("0.12.0"), Version("0.4.0.1")]
    assert one == support.Proof(
        "verified", "2026-12-01", "in-process", 1e-6, ("KimiForCausalLM is not in these releases",)
    )
    assert proofs[Version("0.18.1"), Version("0.4.0")].error is None


def test_merged_line_has_the_largest_error_and_both_dates(tree: Tree) -> None:
    tree.row("0.14.1", "0.3.0")["error"] = 4e-6
    tree.row("0.16.0", "0.3.0")["date"] = "2026-12-03"
    assert tree.problems() == []
    assert "**verified**, 2026-12-01 to 2026-12-03, error 4.0e-06, in-process |" in tree.readme.read_text()


def test_reference_of_another_kind_is_told(tree: Tree) -> None:
    for vllm in ("0.12.0", "0.16.0"):
        run = tree.row(vllm, "0.3.0")["runs"][0]
        run |= {"reference": "engine capture", "plain_vllm": "disagrees with transformers"}
    assert tree.problems() == []
    text = "- vLLM 0.12.0, 0.16.0: plain vLLM itself disagrees with transformers on LlamaForCausalLM"
    assert text in tree.readme.read_text()


def test_help_that_a_cpu_build_needed_is_told(tree: Tree) -> None:
    found = tree.row("0.16.0", "0.3.0")
    found["preload"] = ["libtcmalloc_minimal.so.4", "libiomp5.so"]
    found["runs"][0]["workaround"] = "its activation is given beforehand"
    assert tree.problems() == []
    text = tree.readme.read_text()
    assert "- vLLM 0.16.0: the CPU builds insist on libtcmalloc_minimal.so.4 and libiomp5.so in LD_PRELOAD" in text
    assert "- vLLM 0.16.0: the CPU build cannot run LlamaForCausalLM by itself: its activation is given" in text


def test_exception_of_one_release(tree: Tree) -> None:
    """It is told in the table, and the rest of its row may still count as verified."""
    tree.edit(
        '"0.4": *way',
        '"0.4": {status: verified, adapters: in-process, evidence: evidence/sweep.json, '
        "except: {0.14.1: {status: unsupported, why: it crashes, mend: install 0.16.0}}}",
    )
    for speculators in ("0.4.0", "0.4.0.1"):
        tree.row("0.14.1", speculators).update(status="failed", why="crash")
    assert tree.problems() == []
    text = tree.readme.read_text()
    lines = [line for line in text.splitlines() if line.startswith("| 0.1")]
    assert [line.split(" | ")[0] for line in lines] == ["| 0.12.0", "| 0.14.1", "| 0.16.0", "| 0.17.0 to 0.18.1"]
    assert lines[1].endswith("in-process | not supported | not supported |")
    assert "- vLLM 0.14.1: speculators 0.4: it crashes; mend: install 0.16.0" in text


# --- matrix against evidence ---


def test_verified_without_evidence(tree: Tree) -> None:
    tree.evidence["rows"].remove(tree.row("0.14.1", "0.4.0"))
    tree.evidence["rows"].remove(tree.row("0.16.0", "0.4.0.1"))
    assert tree.problems() == [
        "vLLM >=0.12,<0.17 with speculators 0.4 is verified, but there is no evidence: 0.14.1 x 0.4.0, 0.16.0 x 0.4.0.1"
    ]
    # and until it is mended, the table claims nothing that is not proved
    assert "| 0.14.1 | **verified**, 2026-12-01, error 1.0e-06, in-process | untested, in-process |" in (
        tree.readme.read_text()
    )


def fails(found: dict[str, Any]) -> None:
    found.update(status="failed", why="wrong states")


def is_structural(found: dict[str, Any]) -> None:
    found.update(status="structural", why="not run", runs=[])


def went_another_way(found: dict[str, Any]) -> None:
    found["way"] = "engine"


def exceeds_the_tolerance(found: dict[str, Any]) -> None:
    found["error"] = 2e-5


def has_no_error(found: dict[str, Any]) -> None:
    del found["error"]


def has_a_failed_run(found: dict[str, Any]) -> None:
    found["runs"].append(RUN | {"status": "failed"})


def is_scrambled(found: dict[str, Any]) -> None:
    found["runs"].append(RUN | {"order": False})


def ran_nothing(found: dict[str, Any]) -> None:
    found["runs"] = [ABSENT]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (fails, "it failed (wrong states)"),
        (is_structural, "the evidence is structural"),
        (went_another_way, "engine was run, and the matrix picks in-process"),
        (exceeds_the_tolerance, "its error is 2e-05 with a tolerance of 1e-05"),
        (has_no_error, "its error is None with a tolerance of 1e-05"),
        (has_a_failed_run, "not all of its runs passed"),
        (is_scrambled, "not all of its runs passed"),
        (ran_nothing, "not all of its runs passed"),
    ],
)
def test_verified_against_the_evidence(tree: Tree, change: Any, said: str) -> None:
    change(tree.row("0.14.1", "0.3.0"))
    where = "vLLM >=0.12,<0.17 with speculators 0.3 is verified"
    assert tree.problems() == [f"{where}, but {said}: 0.14.1 x 0.3.0"]


@pytest.mark.parametrize(
    ("status", "change", "said"),
    [
        ("untested, adapters: in-process", None, "is untested, but every release is verified: say so"),
        ("structural, adapters: in-process", None, "is structural, but every release is verified: say so"),
        ("untested, adapters: in-process", fails, "is untested, but it failed (wrong states): 0.14.1 x 0.3.0"),
        (
            "unsupported, why: a, mend: b",
            None,
            "is unsupported, but it works: 0.12.0 x 0.3.0, 0.14.1 x 0.3.0, 0.16.0 x",
        ),
        ("untested, adapters: in-process, note: the host's fault", fails, None),
        ("untested, adapters: in-process", is_structural, None),
        ("structural, adapters: in-process", is_structural, None),
    ],
)
def test_less_than_the_evidence(tree: Tree, status: str, change: Any, said: str | None) -> None:
    tree.matrix.write_text(
        MATRIX.replace(
            '"0.4": *way', '"0.4": {status: verified, adapters: in-process, evidence: evidence/sweep.json}'
        ).replace(
            "&way {status: verified, adapters: in-process, evidence: evidence/sweep.json}", f"{{status: {status}}}"
        )
    )
    if change:
        change(tree.row("0.14.1", "0.3.0"))
    found = tree.problems()
    if said is None:
        assert found == []
    else:
        assert len(found) == 1
        assert said in found[0]


def test_evidence_of_a_release_that_is_not_listed(tree: Tree) -> None:
    tree.evidence["rows"].append(row("0.16.1", "0.3.0"))
    assert tree.problems() == ["evidence for releases that the matrix does not list: 0.16.1 x 0.3.0"]


def test_evidence_file_that_is_not_there(tree: Tree) -> None:
    tree.edit("evidence: evidence/sweep.json}", "evidence: evidence/other.json}")
    assert all("but there is no evidence/other.json" in text for text in tree.problems())


def test_line_without_releases_proves_nothing(tree: Tree) -> None:
    tree.edit(
        "&removed {status: unsupported, why: it was removed, mend: install 0.4}",
        "&removed {status: structural, adapters: engine}",
    )
    found = tree.problems()
    assert len(found) == 2
    assert all("the line lists no releases that could prove it" in text for text in found)


def test_no_evidence_at_all(tree: Tree) -> None:
    (tree.root / "evidence" / "sweep.json").unlink()
    code, said = tree.run("--check")
    assert code == 1
    assert "there is no evidence/sweep.json" in said


# --- files that are out of date ---


def test_table_out_of_date(tree: Tree) -> None:
    tree.readme.write_text(tree.readme.read_text().replace("1.0e-06", "1.0e-07", 1))
    changed = tree.readme.read_text()
    code, said = tree.run("--check")
    assert (code, said) == (1, "README's support table is out of date: run tools/support_table.py\n")
    assert tree.readme.read_text() == changed
    assert tree.run() == (0, "")
    assert tree.run("--check") == (0, "")


def test_packaged_evidence_out_of_date(tree: Tree) -> None:
    tree.row("0.14.1", "0.3.0")["date"] = "2026-12-02"
    tree.save()
    code, said = tree.run("--check")
    assert (code, said) == (1, "support.json is out of date: run tools/support_table.py\n")


@pytest.mark.parametrize(
    "text", ["", f"{tool.BEGIN}\n", f"{tool.END}\n{tool.BEGIN}\n", f"{tool.BEGIN}{tool.END}{tool.BEGIN}{tool.END}"]
)
def test_markers(tree: Tree, text: str) -> None:
    tree.readme.write_text(text)
    code, said = tree.run("--check")
    assert code == 1
    assert "README.md needs" in said
    assert tree.readme.read_text() == text


# --- words ---


@pytest.mark.parametrize(
    ("releases", "text"),
    [
        ("a", "0.1"),
        ("ab", "0.1 to 0.2"),
        ("abc", "0.1 to 0.3"),
        ("acd", "0.1, 0.3 to 0.4"),
        ("bd", "0.2, 0.4"),
    ],
)
def test_spans(releases: str, text: str) -> None:
    known = [Version(f"0.{n}") for n in (1, 2, 3, 4)]
    assert support.spans([known["abcd".index(r)] for r in releases], known) == text


def test_packaged_file_of_another_schema(tmp_path: Path) -> None:
    (tmp_path / "support.json").write_text('{"schema": 2, "cells": []}')
    with pytest.raises(ValueError, match="has the schema 2, and this version reads 1"):
        support.load_support(tmp_path / "support.json")
