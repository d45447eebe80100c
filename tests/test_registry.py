"""Adapters of other packages: found by their entry point, applied, and unable to take the run down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stubs
from vllm_env import VLLM, VllmEnv, environments, interpreter

from speculators_compat.adapter import GENERATOR_MODULE

ADAPTER = """
from speculators_compat import Adapter, Probe, State, hookimpl

class Theirs(Adapter):
    id = "{id}"
    seam = why = since = how = upstream = retire_when = "a test"
    required = {required}
    vllm = "{vllm}"

    def probe(self, surface):
        return Probe(State.{state}, "as asked")

    def apply(self, context):
        context.journal.replace(context.module, "MARK_{id}", 1, adapter=self.id)
        {apply}

@hookimpl
def speculators_compat_adapters():
    {answer}
"""
SHOW = f"""
import json, sys, warnings
import speculators_compat
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import {GENERATOR_MODULE} as module
status = speculators_compat.status()
marks = sorted(n for n in vars(module) if n.startswith("MARK_"))
speculators_compat.deactivate()
print(json.dumps({{
    "states": {{a.id: [str(a.state), a.reason] for a in status.adapters}},
    "broken": status.broken_plugins,
    "marks": marks,
    "marks_after": sorted(n for n in vars(module) if n.startswith("MARK_")),
    "warnings": [str(w.message) for w in caught],
    "third_party": sorted(speculators_compat.registry.registry().third_party),
}}))
"""


@pytest.fixture(scope="module")
def original(vllm_env: VllmEnv, tmp_path_factory: pytest.TempPathFactory) -> Path:
    release = environments.install_speculators("0.4.0.1", python=interpreter())
    return stubs.site(vllm_env.site, release, tmp_path_factory.mktemp("stubs"), VLLM, "0.4.0.1")


@pytest.fixture
def site(original: Path, tmp_path: Path) -> Path:
    stubs.shutil.copytree(original, tmp_path, dirs_exist_ok=True, ignore=stubs.shutil.ignore_patterns("__pycache__"))
    return tmp_path


def plugin(
    site: Path,
    name: str,
    *,
    state: str = "APPLIED",
    apply: str = "pass",
    answer: str = "return [Theirs()]",
    vllm: str = "",
    required: bool = False,
    id: str | None = None,
    source: str | None = None,
) -> None:
    """Another package that is installed, with adapters or what claims to be."""
    text = ADAPTER.format(
        id=id or name, state=state, apply=apply, answer=answer, vllm=vllm, required=required
    )
    (site / f"{name}.py").write_text(text if source is None else source)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[speculators_compat]\n{name} = {name}\n")


def show(site: Path) -> dict:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPECULATORS_COMPAT", "VLLM_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        capture_output=True,
        text=True,
        timeout=60,
        env={**kept, "PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Whatever other packages do, the project's own adapters are in place.
    assert found["states"]["generation"][0] == "applied"
    return found


def test_applied_and_undone(site: Path) -> None:
    plugin(site, "good")
    found = show(site)
    assert found["states"]["good"] == ["applied", "as asked"]
    assert found["third_party"] == ["good"]
    assert found["marks"] == ["MARK_good"]
    assert found["marks_after"] == []
    assert found["broken"] == {}


@pytest.mark.parametrize(("vllm", "used"), [("", True), (">=0.16,<0.17", True), (">=0.17", False)])
def test_only_where_its_specifier_admits_the_vllm(site: Path, vllm: str, used: bool) -> None:
    plugin(site, "good", vllm=vllm)
    assert ("good" in show(site)["states"]) is used


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"source": "raise RuntimeError('boom at import')\n"}, "RuntimeError: boom at import"),
        ({"source": "import a_package_that_is_not_there\n"}, "ModuleNotFoundError"),
        ({"answer": "raise RuntimeError('boom in the hook')"}, "RuntimeError: boom in the hook"),
        ({"answer": "return [object()]"}, "is not an Adapter"),
        ({"answer": "return None"}, ""),
        ({"id": "generation"}, "'generation' is taken"),
    ],
    ids=["import", "missing module", "hook", "no adapter", "none", "id taken"],
)
def test_a_broken_plugin_is_left_out_and_named(site: Path, fault: dict, reason: str) -> None:
    plugin(site, "good")
    plugin(site, "bad", **fault)
    found = show(site)
    assert found["marks"] == ["MARK_good"]
    assert "bad" not in found["states"]
    if fault != {"answer": "return None"}:  # pluggy itself leaves out who answers None
        assert reason in found["broken"]["bad"]


@pytest.mark.parametrize(
    ("fault", "state"),
    [({"apply": "1 / 0"}, "failed"), ({"state": "DRIFTED", "required": True}, "drifted")],
    ids=["apply raises", "drifted"],
)
def test_an_adapter_that_fails_is_undone_alone(site: Path, fault: dict, state: str) -> None:
    plugin(site, "bad", **fault)
    plugin(site, "good")
    found = show(site)
    assert found["states"]["bad"][0] == state
    assert found["states"]["good"][0] == "applied"
    assert found["marks"] == ["MARK_good"]
    assert any("adapter bad of another package failed" in text for text in found["warnings"])


def test_a_specifier_that_is_none(site: Path) -> None:
    plugin(site, "bad", vllm="about 0.16")
    plugin(site, "good")
    found = show(site)
    assert found["marks"] == ["MARK_good"]
    assert "about 0.16" in found["broken"]["bad"]
