"""tools/drift.py: what a new release moved, from wheels that are not installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from stubs import GENERATOR, OTHERS

from speculators_compat.matrix import load_matrix
from speculators_compat.surface import Parameters, SourceSurface

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "drift.py"

if not TOOL.is_file():
    pytest.skip("the source distribution has no tools", allow_module_level=True)


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("drift", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["drift"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


drift = _tool()

#: As much of vLLM as the adapters of the engine way look at.
VLLM = {
    "entrypoints/llm.py": "class LLM:\n    def __init__(self, model, **kwargs): ...\n",
    "v1/engine/llm_engine.py": (
        "class LLMEngine:\n"
        "    def add_request(self, request_id, prompt, params, lora_request=None): ...\n"
        "    def step(self): ...\n"
        "    def has_unfinished_requests(self): ...\n"
        "    def abort_request(self, request_ids): ...\n"
        "    def collective_rpc(self, method, timeout=None, args=()): ...\n"
    ),
    "engine/arg_utils.py": (
        "class EngineArgs:\n    worker_extension_cls: str = ''\n    enforce_eager: bool = False\n"
        "    enable_prefix_caching: bool = True\n"
    ),
    "transformers_utils/config.py": "def get_hf_text_config(config): ...\n",
    "v1/core/kv_cache_utils.py": (
        "def get_kv_cache_configs(vllm_config, kv_cache_specs, available_memory): ...\n"
        "def unify_hybrid_kv_cache_specs(kv_cache_spec): ...\n"
        "def _get_kv_cache_groups_uniform_spec(kv_cache_specs): ...\n"
        "def get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, available_memory): ...\n"
    ),
}


def wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: str = "") -> Path:
    """A wheel that holds these files and the folders' ``__init__.py``."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    folders = {parent for file in files for parent in Path(file).parents if parent != Path(".")}
    texts = {f"{one.as_posix()}/__init__.py": "" for one in folders} | files
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in texts.items():
            archive.writestr(file, text)
        info = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\n"
        archive.writestr(f"{name}-{version}.dist-info/METADATA", info)
    return path


class Bench:
    """A vLLM as it is and as it is going to be."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.new = {f"vllm/{name}": text for name, text in VLLM.items()}
        self.old = wheel(folder, "vllm", "0.32.0", dict(self.new))
        generator = "class VllmHiddenStatesGenerator:\n    def __init__(self, model_path): ...\n"
        files = {name: text for name, text in OTHERS.items() if name.startswith("speculators")}
        files[GENERATOR.as_posix()] = generator
        self.speculators = [wheel(folder, "speculators", version, files) for version in ("0.3.0", "0.4.0.1")]
        before = drift.surface_of(self.old, self.speculators[1], None)
        self.ids = [id for id, adapter in drift.adapters().items() if str(adapter.probe(before).state) != "drifted"]

    def edit(self, file: str, old: str, new: str) -> None:
        assert self.new[f"vllm/{file}"].count(old) == 1
        self.new[f"vllm/{file}"] = self.new[f"vllm/{file}"].replace(old, new)

    def run(self, version: str = "0.34.0") -> tuple[int, str]:
        new = wheel(self.folder, "vllm", version, self.new)
        speculators = [str(path) for path in self.speculators]
        code = drift.main([str(new), "--since", str(self.old), "--speculators", *speculators])
        out, err = self.capsys.readouterr()
        assert err == ""
        return code, " ".join(out.split())


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


def test_nothing_moved(bench: Bench) -> None:
    code, out = bench.run()
    assert code == 0
    assert out.startswith("vLLM 0.32.0 -> 0.34.0, speculators 0.3.0 (row >=0.33,<0.34, engine): 0 of ")
    assert "speculators 0.4.0.1 (row >=0.33,<0.34, engine): as with speculators 0.3.0" in out
    assert out.endswith("Nothing drifted: the adapters in use know what they see")
    assert "engine" in bench.ids


def test_what_is_added_is_told_and_absorbed(bench: Bench) -> None:
    bench.edit("v1/engine/llm_engine.py", "lora_request=None", "lora_request=None, colour=None, **more")
    code, out = bench.run()
    assert code == 0
    assert "LLMEngine.add_request: takes colour; takes **kwargs [engine]" in out
    assert "Nothing drifted" in out


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (
            "v1/engine/llm_engine.py",
            "def step(self)",
            "def step(self, budget)",
            "LLMEngine.step: requires budget [engine]",
        ),
        (
            "v1/engine/llm_engine.py",
            "request_id, prompt,",
            "id, prompt,",
            "LLMEngine.add_request: no longer takes request_id; requires id [engine]",
        ),
        ("v1/engine/llm_engine.py", "def collective_rpc", "def rpc", "LLMEngine.collective_rpc: gone [engine]"),
        ("entrypoints/llm.py", "class LLM", "class Model", "vllm.entrypoints.llm:LLM: gone [engine]"),
    ],
)
def test_drift(bench: Bench, file: str, old: str, new: str, told: str) -> None:
    bench.edit(file, old, new)
    code, out = bench.run()
    assert code == 1
    assert told in out
    assert "engine: drifted, was applied: " in out
    assert out.endswith("Drifted: engine")


def test_what_is_only_imported(bench: Bench) -> None:
    """No probe asks for it here, and yet the engine could not start without it."""
    del bench.new["vllm/transformers_utils/config.py"]
    code, out = bench.run()
    assert code == 1
    assert "vllm.transformers_utils.config:get_hf_text_config: gone, and imported by " in out
    drifted = out.partition("Drifted: ")[2].split(", ")
    assert {"engine", "config_loading"} <= set(drifted)
    assert "kv_cache" not in drifted


def test_adapter_of_the_other_way_does_not_count(bench: Bench) -> None:
    bench.edit("v1/core/kv_cache_utils.py", "def get_kv_cache_configs", "def build_kv_cache")
    code, out = bench.run()
    assert code == 0
    assert "kv_cache (not in this row's way): drifted, was applied: " in out


def test_adapter_of_the_way_that_the_row_uses_counts(bench: Bench) -> None:
    bench.edit("v1/core/kv_cache_utils.py", "def get_kv_cache_configs", "def build_kv_cache")
    code, out = bench.run("0.16.0")
    assert "(row >=0.12,<0.17, in-process)" in out
    assert (code, "kv_cache: drifted, was applied: " in out) == (1, True)


def test_what_was_drifted_before_is_no_news(bench: Bench) -> None:
    """These wheels have no ``Request``: the adapter for it says the same of both."""
    code, out = bench.run()
    assert code == 0
    assert "request (not in this row's way): drifted, unchanged: vllm.v1.request:Request no longer exists" in out


def test_broken_probe(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    known = drift.adapters()["engine"]

    class Broken(type(known)):  # type: ignore[misc]
        def probe(self, surface: Any) -> Any:
            if not surface.has("vllm.entrypoints.llm:LLM"):
                raise ZeroDivisionError("planted")
            return super().probe(surface)

    monkeypatch.setattr(drift, "adapters", lambda: {"engine": Broken()})
    bench.edit("entrypoints/llm.py", "class LLM", "class Model")
    code, out = bench.run()
    assert code == 1
    assert "engine: failed, was applied: ZeroDivisionError: planted" in out


def test_one_screen(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    many = ", ".join(f"option_{n}=None" for n in range(60))
    bench.edit("v1/engine/llm_engine.py", "lora_request=None", many)
    new = wheel(bench.folder, "vllm", "0.34.0", bench.new)
    drift.main([str(new), "--since", str(bench.old), "--speculators", str(bench.speculators[1])])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 50
    assert all(len(line) <= 100 for line in lines)
    assert "option_5 and 54 more" in " ".join(" ".join(lines).split())


# --- the questions are the probes' own ---


def test_questions_are_recorded(bench: Bench) -> None:
    surface = drift.surface_of(bench.old, bench.speculators[1], None)
    _, asked = drift.probe("engine", surface)
    assert asked[0] == ("parameters", ("vllm.entrypoints.llm:LLM",))
    assert ("has", ("speculators.data_generation.vllm_hidden_states_generator:VllmHiddenStatesGenerator",)) in asked


def test_a_probe_that_stops_early_hides_nothing(bench: Bench) -> None:
    """The engine's probe ends at the first name that is gone; what it asked of the older release is compared too."""
    bench.edit("entrypoints/llm.py", "class LLM", "class Model")
    bench.edit("v1/engine/llm_engine.py", "def abort_request", "def abort")
    _, out = bench.run()
    assert "LLMEngine.abort_request: gone [engine]" in out


def test_imports_of_the_plugin_are_found() -> None:
    found = set(drift.imports())
    assert ("vllm.transformers_utils.config:get_hf_text_config", "engine") in found
    assert ("vllm.v1.core.kv_cache_utils:get_kv_cache_configs", "kv_cache") in found


# --- words ---


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (Parameters(("a", "b"), ("a",)), None, "gone"),
        (None, Parameters(("a", "b"), ()), "new: takes a, b"),
        (Parameters(("a",), ("a",)), Parameters(("a", "b"), ("a", "b")), "requires b"),
        (Parameters(("a",), ("a",)), Parameters(("a",), ()), "no longer requires a"),
        (Parameters(("a",), (), True), Parameters(("a",), (), False), "no longer takes **kwargs"),
        (Parameters(("a", "b"), ()), Parameters(("b", "a"), ()), "takes them in another order: b, a"),
        (True, False, "gone"),
        (False, True, "new"),
        (("a", "b"), ("b", "c"), "no longer a; now c"),
        (("a", "b"), ("b", "a"), "in another order"),
        (("a",), None, "gone"),
        ([("x",)], [("x",), ("y",)], "now ('y',)"),
        ([("x",)], [], "no longer ('x',)"),
    ],
)
def test_differences(before: Any, after: Any, text: str) -> None:
    assert drift.describe(before, after) == text


# --- wheels ---


def fake_pip(monkeypatch: pytest.MonkeyPatch, wheels: dict[str, Path], calls: list[str]) -> None:
    """pip download, from files."""

    def run(command: list[str], **_: Any) -> Any:
        assert command[1:5] == ["-m", "pip", "download", "-q"]
        assert "--no-deps" in command
        calls.append(command[-1])
        source = wheels.get(command[-1])
        if source is None:
            return subprocess.CompletedProcess(command, 1, "", "No matching distribution found")
        (Path(command[command.index("--dest") + 1]) / source.name).write_bytes(source.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(drift.subprocess, "run", run)


def test_wheels_are_fetched_once_and_kept_small(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {**bench.new, "vllm/_C.abi3.so": "x" * 1000}
    newest = str(load_matrix().rows[-1].releases[-1])
    transformers = {"transformers/configuration_utils.py": "import torch\n"}
    wheels = {
        "vllm==99.0.0": wheel(tmp_path, "vllm", "99.0.0", files, "transformers>=9"),
        f"vllm=={newest}": wheel(tmp_path, "vllm", newest, files, "transformers>=8"),
        "transformers>=9": wheel(tmp_path, "transformers", "9.1", transformers),
        "transformers>=8": wheel(tmp_path, "transformers", "8.1", transformers),
        "speculators==0.3.0": bench.speculators[0],
        "speculators==0.4.0.1": bench.speculators[1],
    }
    calls: list[str] = []
    fake_pip(monkeypatch, wheels, calls)
    cache = tmp_path / "cache"
    for _ in range(2):
        assert drift.main(["99.0.0", "--wheels", str(cache), "--speculators", "0.3.0", "0.4.0.1"]) == 0
    assert f"vLLM {newest} -> 99.0.0, speculators 0.3.0" in capsys.readouterr().out
    assert sorted(calls) == sorted(wheels)
    kept = sorted(os.listdir(cache))
    assert len(kept) == len(wheels)
    with zipfile.ZipFile(cache / "vllm==99.0.0.zip") as archive:
        names = archive.namelist()
    assert all(name.endswith((".py", "METADATA")) for name in names)
    assert SourceSurface({"vllm": zipfile.Path(cache / "vllm==99.0.0.zip")}).has("vllm.entrypoints.llm:LLM")


def test_wheel_that_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_pip(monkeypatch, {}, [])
    assert drift.main(["99.0.0", "--wheels", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "vllm==99.0.0: No matching distribution found\n"
    assert drift.main(["nonsense", "--wheels", str(tmp_path)]) == 2
    assert "nonsense is neither a version nor a wheel" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_without_transformers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, {}, [])
    bench.old = wheel(bench.folder, "vllm", "0.32.0", bench.new, "transformers>=8")
    monkeypatch.setattr(drift, "transformers_of", lambda wheel: "transformers>=8")
    code, out = bench.run()
    assert code == 0
    assert out.startswith("without transformers: transformers>=8: No matching distribution found vLLM 0.32.0 ->")


def test_file_that_is_no_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    assert drift.main([str(tmp_path / "x.whl")]) == 2
    assert "is no wheel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "before"),
    [("99.0", "0.33.0"), ("0.33.1", "0.33.0"), ("0.33.0", "0.32.0"), ("0.26.1rc1.dev657+g793ca6998.cu129", "0.26.0")],
)
def test_baseline(version: str, before: str) -> None:
    assert str(drift.baseline(load_matrix(), Version(version))) == before


def test_no_baseline() -> None:
    with pytest.raises(drift.FetchError, match="lists no release before"):
        drift.baseline(load_matrix(), Version("0.10"))
