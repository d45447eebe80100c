"""Wheel and source distribution carry the adapters and the matrix."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from vllm_env import ROOT

from speculators_compat import restored

ADAPTERS = sorted(path.name for path in (ROOT / "patches").glob("*.py"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_wheel(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert len(ADAPTERS) > 10
    assert {f"speculators_compat/patches/{name}" for name in ADAPTERS} <= names
    assert {"speculators_compat/compat_matrix.yaml", "speculators_compat/support.json"} <= names
    assert {"speculators_compat_plugin.py", "speculators_compat/py.typed"} <= names
    assert {f"speculators_compat/restored/{file.name}" for file in restored.FILES.values()} <= names


def test_source_distribution(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"src/speculators_compat/patches/{name}" for name in ADAPTERS} <= names
    assert {"compat_matrix.yaml", "pyproject.toml", "src/speculators_compat/__init__.py"} <= names
