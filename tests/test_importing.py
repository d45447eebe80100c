"""Import hooks without wrapt, until one of them can matter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("wrapt", "yaml", "pluggy", "rich", "asyncio", "importlib.metadata", "pathlib", "torch", "vllm")


def run(code: str, path: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPECULATORS_COMPAT")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "awaited").mkdir()
    (tmp_path / "awaited" / "__init__.py").write_text("value = 1\n")
    (tmp_path / "awaited" / "part.py").write_text("value = 2\n")
    return tmp_path


def test_importing_the_package_imports_nothing_heavy() -> None:
    # What the interpreter's own start imports (.pth files of other packages) is not ours.
    code = f"""
import sys
before = set(sys.modules)
import speculators_compat
assert speculators_compat.status().active
print([name for name in {HEAVY!r} if name in sys.modules and name not in before])
"""
    assert run(code) == "[]"


def test_a_hook_is_called_once_after_its_module_is_complete(package: Path) -> None:
    code = """
import sys
from speculators_compat.importing import when_imported
seen = []
when_imported(lambda module: seen.append((module.__name__, module.value)), "awaited.part")
when_imported(lambda module: seen.append((module.__name__, module.value)), "awaited")
assert "wrapt" not in sys.modules
import json.tool
assert "wrapt" not in sys.modules
import awaited
assert "wrapt" in sys.modules
import awaited.part, awaited
when_imported(lambda module: seen.append("late"), "awaited.part")
print(seen)
"""
    assert run(code, package) == "[('awaited', 1), ('awaited.part', 2), 'late']"


def test_only_looking_begins_no_import(package: Path) -> None:
    code = """
import importlib.util, sys
from speculators_compat.importing import only_looking, when_imported
when_imported(print, "awaited")
with only_looking():
    assert importlib.util.find_spec("awaited").origin.endswith("__init__.py")
assert "wrapt" not in sys.modules
spec = importlib.util.find_spec("awaited")  # somebody else looks, and may load what is found
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
    assert run(code, package).startswith("<module 'awaited'")


def test_a_package_that_is_not_there_stays_so(package: Path) -> None:
    code = """
from speculators_compat.importing import when_imported
when_imported(print, "nowhere_at_all")
try:
    import nowhere_at_all
except ModuleNotFoundError as error:
    print(error)
"""
    assert run(code, package) == "No module named 'nowhere_at_all'"


def test_several_threads_may_be_first(package: Path) -> None:
    code = """
import threading
from speculators_compat.importing import when_imported
seen = []
when_imported(seen.append, "awaited")
def work():
    import awaited.part
    import json.tool, email.mime.text
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(seen))
"""
    assert run(code, package) == "1"
