"""The matrix: the shipped file is valid, every fault of an edited one is named, versions get their row."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from speculators_compat import matrix as matrix_module
from speculators_compat.errors import CompatError
from speculators_compat.matrix import RESTORED, STATUSES, Matrix, load_matrix

GOOD = """\
schema: 1
lineages:
  "0.3": {speculators: ">=0.3,<0.4"}
  "0.4": {speculators: ">=0.4,<0.5", releases: [0.4.0, 0.4.0.1], note: a note}
  "0.5+": {speculators: ">=0.5,<0.10"}
adapter_sets:
  in-process: [alpha, beta]
  engine: [alpha, gamma]
rows:
  - vllm: ">=0.11,<0.11.1"
    releases: [0.11.0]
    "0.3": {status: verified, adapters: in-process, evidence: evidence/a.json}
    "0.4": {status: untested, adapters: engine}
    "0.5+": &removed {status: unsupported, why: removed, mend: install 0.4}
  - vllm: ">=0.11.1,<0.17"
    releases: [0.11.1, 0.12.0, 0.16.0]
    "0.3": {status: untested, adapters: engine}
    "0.4": {status: structural, adapters: engine, note: only read}
    "0.5+": *removed
  - vllm: ">=0.17,<0.24"
    releases: [0.17.0, 0.18.1]
    "0.3": {status: untested, adapters: engine}
    "0.4": {status: verified, adapters: engine, evidence: evidence/b.json}
    "0.5+": *removed
  - vllm: ">=0.24,<0.29"
    releases: [0.24.0, 0.28.0]
    "0.3": {status: untested, adapters: engine}
    "0.4": {status: untested, adapters: engine}
    "0.5+": *removed
"""
ADAPTERS = {"alpha", "beta", "gamma"}


def load(tmp_path: Path, text: str, known: set[str] | None = ADAPTERS) -> Matrix:
    file = tmp_path / "matrix.yaml"
    file.write_text(text)
    return load_matrix(file, known)


def faults(tmp_path: Path, text: str, known: set[str] | None = ADAPTERS) -> list[str]:
    """The faults that loading names, one a line; each has a mend."""
    with pytest.raises(CompatError) as caught:
        load(tmp_path, text, known)
    assert caught.value.id == "SC201"
    head, *found = caught.value.found.split("\n    - ")
    assert head.endswith(f"has {len(found)} fault{'s' if len(found) > 1 else ''}")
    assert str(tmp_path / "matrix.yaml") in head
    assert all("; mend: " in fault for fault in found)
    return found


def edited(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, f"{old!r} is there {GOOD.count(old)} times"
    return GOOD.replace(old, new)


@pytest.fixture
def good(tmp_path: Path) -> Matrix:
    return load(tmp_path, GOOD)


# --- a valid file ---


def test_good_file(good: Matrix) -> None:
    assert [row.vllm for row in good.rows] == [
        ">=0.11,<0.11.1",
        ">=0.11.1,<0.17",
        ">=0.17,<0.24",
        ">=0.24,<0.29",
    ]
    assert (good.rows[1].lower, good.rows[1].upper) == (Version("0.11.1"), Version("0.17"))
    assert list(good.lineages) == ["0.3", "0.4", "0.5+"]
    assert good.lineages["0.4"].note == "a note"
    assert good.adapter_sets == {"in-process": ("alpha", "beta"), "engine": ("alpha", "gamma")}
    verified = good.rows[0].cells["0.3"]
    assert (verified.status, verified.adapters, verified.adapter_set) == (
        "verified",
        ("alpha", "beta"),
        "in-process",
    )
    assert (verified.evidence, verified.why, verified.mend) == ("evidence/a.json", None, None)
    assert good.rows[1].cells["0.4"].note == "only read"
    unsupported = good.rows[3].cells["0.5+"]
    assert (unsupported.status, unsupported.adapters, unsupported.adapter_set) == ("unsupported", (), None)
    assert (unsupported.why, unsupported.mend) == ("removed", "install 0.4")


def test_order_of_rows_in_the_file_does_not_matter(good: Matrix, tmp_path: Path) -> None:
    head, *rows = (
        GOOD.replace("&removed ", "").replace("*removed", "{status: unsupported, why: a, mend: b}").split("  - ")
    )
    turned = load(tmp_path, head + "".join(f"  - {row}" for row in reversed(rows)))
    assert [row.vllm for row in turned.rows] == [row.vllm for row in good.rows]


def test_order_of_lines_in_the_file_does_not_matter(good: Matrix, tmp_path: Path) -> None:
    first = '  "0.3": {speculators: ">=0.3,<0.4"}\n'
    last = '  "0.5+": {speculators: ">=0.5,<0.10"}\n'
    assert GOOD.index(first) < GOOD.index(last)
    turned = load(tmp_path, GOOD.replace(first, "").replace(last, last + first))
    assert list(turned.lineages) == ["0.3", "0.4", "0.5+"]
    assert turned == good


def test_adapter_ids_are_checked_only_against_known_ones(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, None).adapter_sets["engine"] == ("alpha", "gamma")


def test_pure_python_loader_reads_the_same(good: Matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert load(tmp_path, GOOD) == good


def test_shipped_matrix() -> None:
    shipped = load_matrix()
    assert shipped.rows[0].lower <= Version("0.11.0")
    assert shipped.rows[-1].upper > Version("0.33.0")
    assert {cell.status for row in shipped.rows for cell in row.cells.values()} <= set(STATUSES)
    assert list(shipped.lineages) == ["0.3", "0.4", "0.5", "0.6-0.8", "0.9"]
    newer = [row.cells[line] for row in shipped.rows for line in list(shipped.lineages)[2:]]
    assert {cell.adapter_set for cell in newer} == {RESTORED}
    assert "unsupported" not in {cell.status for row in shipped.rows for cell in row.cells.values()}


# --- faults ---

# what is edited: into what: the fault (line, row and field), and a piece of the mend
FAULTS: list[tuple[str, str, str, str]] = [
    # the top
    ("schema: 1", "schema: 2", "line 1, schema: is 2", "schema: 1"),
    ("schema: 1", "schema: true", "line 1, schema: is True", "schema: 1"),
    ("schema: 1", 'schema: "1"', "line 1, schema: is '1'", "schema: 1"),
    ("schema: 1\n", "", "schema: is missing", "add schema"),
    ("schema: 1", "schema: 1\nrowz: 3", "line 2, rowz: is an unknown key", "did you mean rows?"),
    # lineages
    (
        '  "0.3": {speculators: ">=0.3,<0.4"}',
        '  0.3: {speculators: ">=0.3,<0.4"}',
        "lineages.0.3: the name is not text",
        '"0.3"',
    ),
    ('{speculators: ">=0.3,<0.4"}', "{}", "line 3, lineages.0.3.speculators: is missing", "add speculators"),
    ('{speculators: ">=0.3,<0.4"}', "[]", "line 3, lineages.0.3: is not a mapping but a list", ">=A,<B"),
    (
        '{speculators: ">=0.3,<0.4"}',
        '{speculators: ">=0.3"}',
        "lineages.0.3.speculators: '>=0.3' is not a range",
        ">=A,<B",
    ),
    (">=0.4,<0.5", ">=0.4,<0.6", "lineages.0.5+: overlaps with lineages.0.4: speculators 0.5", ">=0.6"),
    (">=0.4,<0.5", ">=0.4,<0.4.5", "lineages.0.5+: leaves a gap: speculators 0.4.5 up to 0.5", ">=0.4.5"),
    ("note: a note", "nota: a note", "line 4, lineages.0.4.nota: is an unknown key", "did you mean note?"),
    ("note: a note", "note: 3", "line 4, lineages.0.4.note: is 3", "write text"),
    # adapter sets
    (
        "[alpha, beta]",
        "[alpha, betta]",
        "line 7, adapter_sets.in-process: there is no adapter betta",
        "did you mean beta?",
    ),
    ("[alpha, beta]", "[alpha, alpha]", "line 7, adapter_sets.in-process: names alpha twice", "delete one"),
    ("[alpha, beta]", "[]", "line 7, adapter_sets.in-process: is not a list of adapter ids", "one id a line"),
    (
        "[alpha, beta]",
        "alpha",
        "line 7, adapter_sets.in-process: is not a list of adapter ids",
        "one id a line",
    ),
    (
        "[alpha, beta]",
        "[alpha, 3]",
        "line 7, adapter_sets.in-process: is not a list of adapter ids",
        "one id a line",
    ),
    # ranges
    (">=0.11.1,<0.17", ">=0.11.1", "line 15, row >=0.11.1, vllm: '>=0.11.1' is not a range", ">=A,<B"),
    (">=0.11.1,<0.17", "0.11.1", "row 0.11.1, vllm: '0.11.1' is not a range", ">=A,<B"),
    (">=0.11.1,<0.17", ">=0.11.1,<=0.17", "vllm: '>=0.11.1,<=0.17' is not a range", ">=A,<B"),
    (">=0.11.1,<0.17", "~=0.11", "vllm: '~=0.11' is not a range", ">=A,<B"),
    (">=0.11.1,<0.17", ">=0.11.1,<0.17,!=0.12", "is not a range", ">=A,<B"),
    (">=0.11.1,<0.17", ">=zero,<0.17", "is not a range of versions", ">=A,<B"),
    (">=0.11.1,<0.17", ">=0.11.1,<0.17rc1", "the bound 0.17rc1 is not a plain release", ">=A,<B"),
    (">=0.11.1,<0.17", ">=0.11.1,<0.17+cu129", "the bound 0.17+cu129 is not a plain release", ">=A,<B"),
    (">=0.11.1,<0.17", ">=0.17,<0.11.1", "'>=0.17,<0.11.1' holds no version", "smaller version first"),
    ('vllm: ">=0.11.1,<0.17"', "vllm: 0.11", "line 15, row 2, vllm: 0.11 is not a range", "quotes"),
    ('vllm: ">=0.11.1,<0.17"', "vllm:", "line 15, row 2, vllm: empty is not a range", ">=A,<B"),
    (
        ">=0.11.1,<0.17",
        ">=0.11,<0.17",
        "row >=0.11,<0.17: overlaps with row >=0.11,<0.11.1: vLLM 0.11 is in both",
        ">=0.11.1",
    ),
    (
        ">=0.11.1,<0.17",
        ">=0.11.1,<0.18",
        "line 20, row >=0.17,<0.24: overlaps with row >=0.11.1,<0.18",
        ">=0.18",
    ),
    (
        ">=0.11.1,<0.17",
        ">=0.12,<0.17",
        "line 15, row >=0.12,<0.17: leaves a gap: vLLM 0.11.1 up to 0.12",
        ">=0.11.1",
    ),
    # releases
    ("    releases: [0.24.0, 0.28.0]\n", "", "row >=0.24,<0.29, releases: is missing", "add releases"),
    ("[0.24.0, 0.28.0]", "[]", "line 26, row >=0.24,<0.29, releases: is a list without entries", "in full"),
    ("[0.24.0, 0.28.0]", "0.24.0", "row >=0.24,<0.29, releases: is text without entries", "in full"),
    ("[0.24.0, 0.28.0]", "[0.24]", "row >=0.24,<0.29, releases: 0.24 is not a plain release", "in full"),
    ("[0.24.0, 0.28.0]", "[0.24.0rc1]", "releases: '0.24.0rc1' is not a plain release", "in full"),
    ("[0.24.0, 0.28.0]", "[0.24.0.post1]", "releases: '0.24.0.post1' is not a plain release", "in full"),
    ("[0.24.0, 0.28.0]", "[soon]", "releases: 'soon' is not a plain release", "in full"),
    (
        "[0.24.0, 0.28.0]",
        "[0.24.0, 0.29.0]",
        "line 26, row >=0.24,<0.29, releases: 0.29.0 is not in the range",
        "from 0.24 on and below 0.29",
    ),
    ("[0.24.0, 0.28.0]", "[0.24.0, 0.24.0]", "releases: names 0.24.0 twice", "delete one"),
    ("[0.24.0, 0.28.0]", "[0.28.0, 0.24.0]", "releases: 0.24.0 comes after 0.28.0", "oldest first"),
    ("[0.4.0, 0.4.0.1]", "[0.4.0, 0.5.0]", "line 4, lineages.0.4.releases: 0.5.0 is not in the range", "0.5"),
    ("[0.4.0, 0.4.0.1]", "~", "line 4, lineages.0.4.releases: is empty without entries", "in full"),
    # exceptions
    (
        "note: only read",
        "except: {0.13.0: {status: untested}}",
        "line 18, row >=0.11.1,<0.17, 0.4.except.0.13.0: is none of the row's releases",
        "add it to releases",
    ),
    ("note: only read", "except: []", "0.4.except: is a list without entries", "0.18.1"),
    ("note: only read", "except: {0.12: {status: untested}}", "0.4.except.0.12: 0.12 is not a plain", "full"),
    (
        "note: only read",
        "except: {0.12.0: untested}",
        "0.4.except.0.12.0: is not a mapping but text",
        "status",
    ),
    ("note: only read", "except: {0.12.0: {}}", "0.4.except.0.12.0.status: is missing", "add status"),
    (
        "note: only read",
        "except: {0.12.0: {status: unsupported, why: a}}",
        "0.4.except.0.12.0.mend: is missing for an unsupported cell",
        "one sentence",
    ),
    (
        "note: only read",
        "except: {0.12.0: {status: verified}}",
        "except.0.12.0.evidence: is missing",
        "untested",
    ),
    (
        "note: only read",
        "except: {0.12.0: {status: untested, adapters: engine}}",
        "0.4.except.0.12.0.adapters: is an unknown key",
        "status",
    ),
    # cells
    (
        "status: structural",
        "status: verfied",
        "line 18, row >=0.11.1,<0.17, 0.4.status: 'verfied' is no status",
        "did you mean verified?",
    ),
    ("status: structural", "status: yes", "0.4.status: True is no status", "the statuses are"),
    ("status: structural", "status: ~", "0.4.status: empty is no status", "the statuses are"),
    ("status: structural, ", "", "row >=0.11.1,<0.17, 0.4.status: is missing", "add status"),
    (
        "structural, adapters: engine",
        "structural, adapters: engines",
        "0.4.adapters: there is no adapter set engines",
        "did you mean engine?",
    ),
    (
        "structural, adapters: engine",
        "structural",
        "0.4.adapters: is missing for a cell that is structural",
        "in-process, engine",
    ),
    (
        "structural, adapters: engine",
        "structural, adapters: [alpha]",
        "0.4.adapters: is ['alpha']",
        "write text",
    ),
    (
        "structural, adapters: engine",
        "structural, adapter: engine",
        "0.4.adapter: is an unknown key",
        "did you mean adapters?",
    ),
    ("note: only read", "why: broken", "0.4.why: stands in a cell that is structural", "use note"),
    ("note: only read", "mend: wait", "0.4.mend: stands in a cell that is structural", "use note"),
    ("note: only read", "note: ~", "0.4.note: is empty", "write text"),
    ("note: only read", '3: "a"', "0.4.3: is an unknown key", 'quotes: "3"'),
    (
        ", evidence: evidence/a.json",
        "",
        "line 12, row >=0.11,<0.11.1, 0.3.evidence: is missing for a verified cell",
        "untested",
    ),
    ("evidence: evidence/a.json", 'evidence: " "', "0.3.evidence: is ' '", "write text"),
    ("why: removed, ", "", "0.5+.why: is missing for an unsupported cell", "add why"),
    (", mend: install 0.4", "", "0.5+.mend: is missing for an unsupported cell", "add mend"),
    (
        "why: removed",
        "why: removed, adapters: engine",
        "0.5+.adapters: stands in an unsupported cell",
        "delete it",
    ),
    (
        '    "0.4": {status: structural, adapters: engine, note: only read}\n',
        "",
        "line 15, row >=0.11.1,<0.17, 0.4: is missing",
        "add 0.4",
    ),
    (
        "{status: structural, adapters: engine, note: only read}",
        "engine",
        "row >=0.11.1,<0.17, 0.4: is not a mapping but text",
        "status",
    ),
    (
        '"0.4": {status: structural',
        '"0.6": {status: structural',
        "row >=0.11.1,<0.17, 0.6: is an unknown key",
        "0.4",
    ),
    # the same key twice: YAML itself would keep the last one
    ("schema: 1", "schema: 1\nschema: 1", "line 2, schema: the key is there twice", "delete one"),
    (
        '"0.4": {status: structural',
        '"0.3": {status: structural',
        "rows.1.0.3: the key is there twice",
        "delete one",
    ),
    ("note: only read", "note: a, note: b", "line 18, rows.1.0.4.note: the key is there twice", "delete one"),
]


@pytest.mark.parametrize(("old", "new", "fault", "mend"), FAULTS, ids=lambda text: " ".join(text.split())[:40])
def test_fault_is_named(tmp_path: Path, old: str, new: str, fault: str, mend: str) -> None:
    found = faults(tmp_path, edited(old, new))
    hits = [text for text in found if fault in text.partition("; mend: ")[0]]
    assert hits, found
    assert mend in hits[0].partition("; mend: ")[2]


@pytest.mark.parametrize(
    ("section", "value", "fault"),
    [
        ("lineages", "[]", "lineages: is a list without entries"),
        ("lineages", "{}", "lineages: is a mapping without entries"),
        ("adapter_sets", "", "adapter_sets: is empty without entries"),
        ("adapter_sets", "text", "adapter_sets: is text without entries"),
        ("rows", "[]", "rows: is a list without entries"),
        ("rows", "{a: 1}", "rows: is a mapping without entries"),
        ("rows", "[text]", "row 1: is not a mapping but text"),
        ("rows", "3", "rows: is int without entries"),
    ],
)
def test_section_of_another_kind(tmp_path: Path, section: str, value: str, fault: str) -> None:
    import yaml

    kept = {key: part for key, part in yaml.safe_load(GOOD).items() if key != section}
    found = faults(tmp_path, f"{section}: {value}\n{yaml.safe_dump(kept)}")
    assert any(fault in text for text in found), found


@pytest.mark.parametrize("section", ["lineages", "adapter_sets", "rows"])
def test_missing_section(tmp_path: Path, section: str) -> None:
    import yaml

    kept = {key: part for key, part in yaml.safe_load(GOOD).items() if key != section}
    found = faults(tmp_path, yaml.safe_dump(kept))
    assert any(f"{section}: is missing" in text for text in found), found


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    text = edited("schema: 1", "schema: 7")
    text = text.replace("status: structural", "status: strucural").replace(">=0.24,<0.29", ">=0.24.1,<0.29")
    text = text.replace("[0.24.0, 0.28.0]", "[0.28.0]")
    text = text.replace("[alpha, beta]", "[alpha, delta]")
    found = faults(tmp_path, text)
    assert len(found) == 4
    for piece in ("schema: is 7", "no adapter delta", "'strucural' is no status", "leaves a gap"):
        assert sum(piece in fault for fault in found) == 1


def test_fault_in_an_anchor_is_named_where_it_is_used(tmp_path: Path) -> None:
    found = faults(tmp_path, edited("why: removed, ", ""))
    assert [fault.split(",")[0] for fault in found] == ["line 14", "line 19", "line 24", "line 29"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is not a mapping but empty"),
        ("- a\n", "is not a mapping but a list"),
        ("just text\n", "is not a mapping but text"),
        ("a: [1\n", "is not YAML"),
        ("? [a]\n: b\n", "is not YAML"),
        ("a: 1\n---\nb: 1\n", "is not YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", "is not YAML"),
        ("a: &x [*x]\n", "a: is an unknown key"),
    ],
)
def test_file_of_another_kind(tmp_path: Path, text: str, fault: str) -> None:
    found = faults(tmp_path, text)
    assert fault in found[0]


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(CompatError, match="can't be read") as caught:
        load_matrix(tmp_path / "nothing.yaml")
    assert caught.value.id == "SC201"
    assert "nothing.yaml" in str(caught.value)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(CompatError, match="can't be read"):
        load_matrix(tmp_path / "binary.yaml")


def test_default_file_is_the_one_beside_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compat_matrix.yaml").write_text(GOOD)
    monkeypatch.setattr(matrix_module, "__file__", str(tmp_path / "matrix.py"))
    assert load_matrix().adapter_sets["engine"] == ("alpha", "gamma")


# --- the choice of a row ---


@pytest.mark.parametrize(
    ("vllm", "row", "exact"),
    [
        ("0.11.0", ">=0.11,<0.11.1", True),
        ("0.11.0.post2", ">=0.11,<0.11.1", True),
        ("0.11.1", ">=0.11.1,<0.17", True),
        ("0.16.0", ">=0.11.1,<0.17", True),
        ("0.16.0+cu129", ">=0.11.1,<0.17", True),
        ("0.17.0", ">=0.17,<0.24", True),
        ("0.28.0+cpu", ">=0.24,<0.29", True),
        ("0.28", ">=0.24,<0.29", True),
        # releases that came later: nobody has run them
        ("0.16.1", ">=0.11.1,<0.17", False),
        ("0.28.1", ">=0.24,<0.29", False),
        ("0.28.0.1", ">=0.24,<0.29", False),
        ("0.28.1.post1+cu129", ">=0.24,<0.29", False),
        # builds that are no release
        ("0.11.0rc2", ">=0.11,<0.11.1", False),
        ("0.17.0rc1.dev3", ">=0.17,<0.24", False),  # sorts before 0.17.0, but is nearer to it than to 0.16
        ("0.17.1rc1.dev238+g793ca69", ">=0.17,<0.24", False),
        ("0.23.1.dev1", ">=0.17,<0.24", False),
        ("0.26.1rc1.dev657+g793ca6998.cu129", ">=0.24,<0.29", False),
        # newer than everything
        ("0.29.0", ">=0.24,<0.29", False),
        ("0.29.0rc1", ">=0.24,<0.29", False),
        ("1.0", ">=0.24,<0.29", False),
        ("1!0.1", ">=0.24,<0.29", False),
    ],
)
def test_row(good: Matrix, vllm: str, row: str, exact: bool) -> None:
    chosen = good.select(Version(vllm), Version("0.4.0.1"))
    assert (chosen.row.vllm, chosen.exact, chosen.lineage) == (row, exact, "0.4")
    assert chosen.cell is chosen.row.cells["0.4"]
    assert f"vLLM {vllm} is " in chosen.reason
    assert row in chosen.reason


@pytest.mark.parametrize(
    ("speculators", "line", "exact"),
    [
        ("0.3.0", "0.3", True),
        ("0.4.0", "0.4", True),
        ("0.4.0.1", "0.4", True),
        ("0.4.0.1.post1", "0.4", True),
        ("0.4.1", "0.4", False),
        ("0.4.1.dev3+gabc", "0.4", False),
        ("0.5.0", "0.5+", True),
        ("0.5.0rc1", "0.5+", False),
        ("0.9.0", "0.5+", True),
        ("0.10.0", "0.5+", False),
        ("1.0.0", "0.5+", False),
    ],
)
def test_lineage(good: Matrix, speculators: str, line: str, exact: bool) -> None:
    chosen = good.select(Version("0.16.0"), Version(speculators))
    assert (chosen.lineage, chosen.exact) == (line, exact)
    assert f"speculators {speculators} is " in chosen.reason


def test_reasons(good: Matrix) -> None:
    def reason(vllm: str) -> str:
        return good.select(Version(vllm), Version("0.4.0")).reason

    tail = "; speculators 0.4.0 is in the line 0.4 (>=0.4,<0.5)"
    assert reason("0.16.0+cu129") == "vLLM 0.16.0+cu129 is in the row >=0.11.1,<0.17" + tail
    assert reason("0.30.0") == "vLLM 0.30.0 is newer than every row; the nearest is >=0.24,<0.29" + tail
    later = "vLLM 0.16.1 is in the range of the row >=0.11.1,<0.17, but none of the releases that it lists"
    assert reason("0.16.1") == later + tail
    built = "vLLM 0.17.0rc1 is a build before the release 0.17.0; the nearest row is >=0.17,<0.24"
    assert reason("0.17.0rc1") == built + tail


@pytest.mark.parametrize(
    ("vllm", "speculators", "named"),
    [
        ("0.10.2", "0.4.0", "vLLM 0.10.2"),
        ("0.6.3.post1", "0.4.0", "vLLM 0.6.3.post1"),
        ("0.16.0", "0.2.0", "speculators 0.2.0"),
    ],
)
def test_older_than_everything_is_refused(good: Matrix, vllm: str, speculators: str, named: str) -> None:
    with pytest.raises(CompatError) as caught:
        good.select(Version(vllm), Version(speculators))
    assert caught.value.id == "SC203"
    assert caught.value.found == named
    assert "or newer" in caught.value.expected


def test_exception_of_one_release(tmp_path: Path) -> None:
    note = "status: structural, adapters: engine, note: only read"
    said = "except: {0.12.0: {status: unsupported, why: a, mend: b}, 0.16.0: {status: untested, note: c}}"
    matrix = load(tmp_path, edited(note, f"{note}, {said}"))

    def cell(vllm: str) -> tuple[str, tuple[str, ...], str | None, str | None]:
        found = matrix.select(Version(vllm), Version("0.4.0")).cell
        return found.status, found.adapters, found.adapter_set, found.note

    assert cell("0.11.1") == ("structural", ("alpha", "gamma"), "engine", "only read")
    assert cell("0.12.0") == cell("0.12.0.post1+cpu") == ("unsupported", (), None, None)
    assert cell("0.16.0") == ("untested", ("alpha", "gamma"), "engine", "c")
    assert cell("0.16.1") == cell("0.11.1")
    assert matrix.select(Version("0.12.0"), Version("0.3.0")).cell.status == "untested"


@pytest.mark.parametrize(
    "vllm", ["0.11.3", "0.16.1", "0.28.1", "0.33.1", "0.34.0", "0.26.1rc1.dev657+g793ca6998.cu129"]
)
def test_what_nobody_has_run_is_not_exact(vllm: str) -> None:
    assert not load_matrix().select(Version(vllm), Version("0.4.0.1")).exact


def test_every_released_vllm_is_in_a_row_of_the_shipped_matrix() -> None:
    shipped = load_matrix()
    released = (
        "0.11.0 0.11.1 0.11.2 0.12.0 0.13.0 0.14.0 0.14.1 0.15.0 0.15.1 0.16.0 0.17.0 0.17.1 0.18.0 0.18.1"
        " 0.19.0 0.19.1 0.20.0 0.20.1 0.20.2 0.21.0 0.22.0 0.22.1 0.23.0 0.24.0 0.25.0 0.25.1 0.26.0 0.27.0"
        " 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0"
    )
    assert [str(v) for row in shipped.rows for v in row.releases] == released.split()
    for vllm in released.split():
        for speculators in ("0.3.0", "0.4.0", "0.4.0.1"):
            chosen = shipped.select(Version(vllm), Version(speculators))
            assert chosen.exact, chosen.reason
            assert chosen.row.lower <= Version(vllm) < chosen.row.upper
