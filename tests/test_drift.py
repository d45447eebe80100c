"""A future vLLM that changes one thing: absorbed, or refused with the adapter named. Never half patched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stubs
from stubs import Edit, edit
from vllm_env import VLLM, VllmEnv, environments, interpreter

from speculators_compat.adapter import GENERATOR_MODULE, State

CHECK = f"""
import json, os, sys, warnings
warnings.simplefilter("ignore")
before = dict(os.environ)
import speculators_compat
def attempt():
    try:
        __import__({GENERATOR_MODULE!r})
    except Exception as error:
        return [type(error).__name__, getattr(error, "id", None), str(error)]
    return ["imported", None, ""]
answer = {{"first": attempt(), "second": attempt()}}
status = speculators_compat.status()
answer["states"] = {{a.id: [str(a.state), a.reason] for a in status.adapters}}
answer["changes"] = [c for c in status.changes if not c.startswith("activation:")]
module = sys.modules.get({GENERATOR_MODULE!r})
answer["left"] = None if module is None else sorted(
    n for owner in (module, getattr(module, "VllmHiddenStatesGenerator", module)) for n, v in vars(owner).items()
    if type(v).__name__ == "FunctionWrapper" or "speculators_compat" in str(getattr(v, "__module__", ""))
)
speculators_compat.deactivate()
answer["after"] = [list(speculators_compat.status().changes), dict(os.environ) == before]
print(json.dumps(answer))
"""


@pytest.fixture(scope="module", params=["0.3.0", "0.4.0.1"])
def original(request: pytest.FixtureRequest, vllm_env: VllmEnv, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stubs of the real vLLM 0.16 with one speculators release."""
    release = environments.install_speculators(request.param, python=interpreter())
    return stubs.site(vllm_env.site, release, tmp_path_factory.mktemp("stubs"), VLLM, request.param)


def run(site: Path, way: str, **variables: str) -> dict:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPECULATORS_COMPAT", "VLLM_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        capture_output=True,
        text=True,
        timeout=60,
        env={**kept, "PYTHONPATH": str(site), "SPECULATORS_COMPAT_WAY": way, **variables},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def probes(site: Path) -> dict:
    roots = dict.fromkeys(("vllm", "speculators", "transformers", "torch"), site)
    return stubs.probes(stubs.SourceSurface(roots))


def changed(original: Path, tmp_path: Path, *edits: Edit) -> Path:
    stubs.shutil.copytree(original, tmp_path, dirs_exist_ok=True, ignore=stubs.shutil.ignore_patterns("__pycache__"))
    for change in edits:
        change(tmp_path)
    return tmp_path


SCHEDULER = "vllm.v1.core.sched.scheduler"
ENGINE = "vllm.v1.engine.llm_engine"

#: What changes, in which way it matters, and the adapter that absorbs it.
ABSORBED: dict[str, tuple[Edit, str, str, str]] = {
    "Request loses eos_token_id": (
        edit("vllm.v1.request", "eos_token_id, ", ""),
        "in-process",
        "request",
        "leaves out eos_token_id",
    ),
    "Request gains an option": (
        edit("vllm.v1.request", "eos_token_id, ", "eos_token_id, shade=None, "),
        "in-process",
        "request",
        "the call fits",
    ),
    "Scheduler loses block_size": (
        edit(SCHEDULER, "structured_output_manager, block_size, ", "structured_output_manager, "),
        "in-process",
        "scheduler",
        "",
    ),
    "Scheduler gains an option": (
        edit(SCHEDULER, "structured_output_manager, block_size, ", "structured_output_manager, block_size, hue=None, "),
        "in-process",
        "scheduler",
        "block_size",
    ),
    "SchedulerConfig loses is_encoder_decoder": (
        edit("vllm.config.scheduler", "    is_encoder_decoder: InitVar[Any]\n", ""),
        "in-process",
        "scheduler_config",
        "async_scheduling",
    ),
    "SchedulerConfig gains an option": (
        edit("vllm.config.scheduler", "    is_encoder_decoder:", "    tint: Any = None\n    is_encoder_decoder:"),
        "in-process",
        "scheduler_config",
        "async_scheduling",
    ),
    "a KV-cache helper goes": (
        edit("vllm.v1.core.kv_cache_utils", "def unify_hybrid_kv_cache_specs(", "def unify_all("),
        "engine",
        "kv_cache_names",
        "supplies unify_hybrid_kv_cache_specs",
    ),
    "LLMEngine.step gains an option": (
        edit(ENGINE, "def step(self)", "def step(self, patience=None)"),
        "engine",
        "engine",
        "drives vllm.LLM",
    ),
}
#: What changes, in which way it matters, the adapter that refuses, and what it must name.
REFUSED: dict[str, tuple[Edit, str, str, str]] = {
    "Request requires something new": (
        edit("vllm.v1.request", "self, request_id,", "self, shade, request_id,"),
        "in-process",
        "request",
        "shade",
    ),
    "Request renames prompt_token_ids": (
        edit("vllm.v1.request", "prompt_token_ids,", "prompt_tokens,"),
        "in-process",
        "request",
        "prompt_token_ids",
    ),
    "Scheduler requires something new": (
        edit(SCHEDULER, "structured_output_manager, block_size, ", "structured_output_manager, block_size, hue, "),
        "in-process",
        "scheduler",
        "hue",
    ),
    "Scheduler renames kv_cache_config": (
        edit(SCHEDULER, "self, vllm_config, kv_cache_config,", "self, vllm_config, kv_config,"),
        "in-process",
        "scheduler",
        "kv_cache_config",
    ),
    "SchedulerConfig requires something new": (
        edit("vllm.config.scheduler", "    is_encoder_decoder:", "    tint: Any\n    is_encoder_decoder:"),
        "in-process",
        "scheduler_config",
        "tint",
    ),
    "SchedulerConfig renames max_num_seqs": (
        edit("vllm.config.scheduler", "    max_num_seqs:", "    max_sequences:"),
        "in-process",
        "scheduler_config",
        "max_num_seqs",
    ),
    "get_kv_cache_configs goes": (
        edit("vllm.v1.core.kv_cache_utils", "def get_kv_cache_configs(", "def plan_kv_cache("),
        "in-process",
        "kv_cache",
        "get_kv_cache_configs",
    ),
    "get_kv_cache_configs takes something else": (
        edit(
            "vllm.v1.core.kv_cache_utils",
            "def get_kv_cache_configs(vllm_config, kv_cache_specs, available_memory)",
            "def get_kv_cache_configs(vllm_config, kv_cache_specs, budget)",
        ),
        "in-process",
        "kv_cache",
        "budget",
    ),
    "ParallelConfig loses worker_extension_cls": (
        edit("vllm.config.parallel", "    worker_extension_cls:", "    extension:"),
        "in-process",
        "vllm_arguments",
        "worker_extension_cls",
    ),
    "get_hf_text_config goes": (
        edit("vllm.transformers_utils.config", "def get_hf_text_config(", "def text_config("),
        "in-process",
        "config_loading",
        "get_hf_text_config",
    ),
    "Scheduler.update_from_output goes": (
        edit(SCHEDULER, "def update_from_output(", "def absorb("),
        "in-process",
        "generation",
        "update_from_output",
    ),
    "Scheduler.schedule requires an argument": (
        edit(SCHEDULER, "def schedule(self)", "def schedule(self, now)"),
        "in-process",
        "generation",
        "now",
    ),
    "Scheduler.finish_requests renames an argument": (
        edit(SCHEDULER, "def finish_requests(self, request_ids,", "def finish_requests(self, ids,"),
        "in-process",
        "generation",
        "ids",
    ),
    "the generator loses _setup_capture": (
        edit(GENERATOR_MODULE, "def _setup_capture(", "def _capture("),
        "in-process",
        "generation",
        "_setup_capture",
    ),
    "LLMEngine.add_request renames an argument": (
        edit(ENGINE, "def add_request(self, request_id, prompt, params,", "def add_request(self, id, prompt, params,"),
        "engine",
        "engine",
        "add_request",
    ),
    "LLMEngine.collective_rpc goes": (
        edit(ENGINE, "def collective_rpc(", "def call_workers("),
        "engine",
        "engine",
        "collective_rpc",
    ),
    "LLMEngine.step requires an argument": (
        edit(ENGINE, "def step(self)", "def step(self, budget)"),
        "engine",
        "engine",
        "budget",
    ),
    "EngineArgs loses worker_extension_cls": (
        edit("vllm.engine.arg_utils", "    worker_extension_cls:", "    extension:"),
        "engine",
        "engine",
        "worker_extension_cls",
    ),
    "LLM goes": (edit("vllm.entrypoints.llm", "class LLM:", "class Model:"), "engine", "engine", "LLM"),
    "the generator's class goes": (
        edit(GENERATOR_MODULE, "class VllmHiddenStatesGenerator:", "class Generator:"),
        "engine",
        "engine",
        "VllmHiddenStatesGenerator",
    ),
}


@pytest.mark.parametrize("way", ["in-process", "engine"])
def test_as_it_is(original: Path, way: str) -> None:
    found = run(original, way)
    assert found["first"][0] == "imported"
    assert found["changes"]
    assert {"__init__", "generate", "shutdown"} <= set(found["left"])  # what test_refused must not find
    assert found["after"] == [[], True]
    for id, (state, reason) in found["states"].items():
        assert state in ("applied", "not-needed", "not-applicable", "waiting"), (id, state, reason)


@pytest.mark.parametrize("name", ABSORBED)
def test_absorbed(original: Path, tmp_path: Path, name: str) -> None:
    change, way, adapter, reason = ABSORBED[name]
    site = changed(original, tmp_path, change)
    found = run(site, way)
    assert found["first"][0] == "imported", found["first"]
    state, said = found["states"][adapter]
    assert state in ("applied", "not-needed")
    assert reason in said
    from_source = probes(site)[adapter]
    assert (str(from_source.state), from_source.reason) == (state, said)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(original: Path, tmp_path: Path, name: str) -> None:
    change, way, adapter, named = REFUSED[name]
    site = changed(original, tmp_path, change)
    found = run(site, way)
    # Caught and imported again, it is still refused: otherwise the script would run unpatched.
    for attempt in (found["first"], found["second"]):
        assert attempt[:2] == ["CompatError", "SC302"]
        assert f"adapter {adapter}:" in attempt[2]
        assert named in attempt[2]
    assert found["states"][adapter][0] == "drifted"
    # Nothing stays half patched, and no other adapter claims to be applied at the generator.
    assert not [c for c in found["changes"] if "vllm_hidden_states_generator" in c]
    assert not found["left"]
    assert found["after"] == [[], True]
    # compat-check, which reads source text, comes to the same answer beforehand.
    from_source = probes(site)[adapter]
    assert from_source.state is State.DRIFTED
    assert named in from_source.reason


def test_an_adapter_that_fails_undoes_the_others(original: Path, tmp_path: Path) -> None:
    """The last adapter's apply() raises: the dozen before it are undone."""
    site = changed(original, tmp_path)
    (site / "sitecustomize.py").write_text(
        "import speculators_compat.patches.generation as g\n"
        "def apply(self, context):\n"
        "    context.journal.replace(context.module, 'log', None, adapter=self.id)\n"
        "    raise ZeroDivisionError('planted')\n"
        "g.Generation.apply = apply\n"
    )
    found = run(site, "in-process")
    for attempt in (found["first"], found["second"]):
        assert attempt[:2] == ["CompatError", "SC304"]
        assert "adapter generation: ZeroDivisionError: planted" in attempt[2]
    assert found["states"]["generation"][0] == "failed"
    assert found["states"]["scheduler_config"][0] == "undone"
    assert not [c for c in found["changes"] if "vllm_hidden_states_generator" in c]
    assert not found["left"]
    assert found["after"][0] == []


def test_every_required_adapter_of_the_generator_is_covered() -> None:
    """A new adapter that can drift gets a case here."""
    never = {"layer_navigation", "device_memory"}  # their probes have nothing that could drift
    found = stubs.registry()
    required = {
        a.id for a in found.adapters.values() if a.required and a.trigger == GENERATOR_MODULE and a.id not in never
    }
    assert required == {adapter for _, _, adapter, _ in REFUSED.values()}
