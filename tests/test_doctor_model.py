"""compat-check --model: for each id a model that it finds fault with, and one that it does not."""

from __future__ import annotations

import builtins
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from doctor_support import KIMI, LLAMA, fake_vllm, make_model, run, tensors

from speculators_compat.doctor.facts import ModelFacts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    return fake_vllm(tmp_path / "site")


def denied(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    """What a user without the permission sees; root ignores permissions."""
    real_open, real_read = builtins.open, Path.read_bytes

    def fake_open(file: Any, *rest: Any, **more: Any) -> Any:
        if str(file) == str(target):
            raise PermissionError(13, "Permission denied", str(file))
        return real_open(file, *rest, **more)

    def fake_read(self: Path) -> bytes:
        if self == target:
            raise PermissionError(13, "Permission denied", str(self))
        return real_read(self)

    monkeypatch.setattr(builtins, "open", fake_open)
    monkeypatch.setattr(Path, "read_bytes", fake_read)


# --- SC700: the folder ---


def test_folder(model: Path) -> None:
    result = run("SC700", model=model)
    assert result.status == "ok"
    assert str(model) in result.outcome.found


def test_folder_missing(tmp_path: Path) -> None:
    assert run("SC700", model=tmp_path / "none").status == "failed"
    (tmp_path / "file").write_text("")
    result = run("SC700", model=tmp_path / "file")
    assert (result.status, "a file" in result.outcome.found) == ("failed", True)


def test_folder_denied(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listdir(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", listdir)
    result = run("SC700", model=model)
    assert (result.status, "Permission denied" in result.outcome.found) == ("failed", True)
    assert "chmod" in result.outcome.mend


def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache: a snapshot of links to blobs."""
    source = make_model(tmp_path / "source")
    base = tmp_path / "hf" / "hub" / "models--org--tiny"
    snapshot = base / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (base / "blobs").mkdir()
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("abc")
    for number, file in enumerate(sorted(source.iterdir())):
        blob = base / "blobs" / f"{number:04}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return snapshot


def test_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub(tmp_path, monkeypatch)
    for id in ("SC700", "SC701", "SC702", "SC703", "SC704"):
        assert run(id, model="org/tiny").status == "ok", id
        assert run(id, model=snapshot).status == "ok", id
    result = run("SC700", model="org/other")
    assert (result.status, result.outcome.mend) == ("warning", "hf download org/other")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("SC700", model="org/other").status == "failed"
    assert run("SC701", model="org/other").status == "skipped"


def test_link_to_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub(tmp_path, monkeypatch)
    shard = snapshot / "model-00002-of-00002.safetensors"
    os.unlink(os.path.realpath(shard))
    result = run("SC703", model="org/tiny")
    assert (result.status, "model-00002" in result.outcome.found) == ("failed", True)
    os.unlink(os.path.realpath(snapshot / "config.json"))
    assert "a link to a file that is not there" in run("SC701", model="org/tiny").outcome.found


# --- SC701: the config ---


def test_config(model: Path) -> None:
    found = run("SC701", model=model).outcome.found
    assert found == "LlamaForCausalLM (llama), 8 layers, hidden 64, 8 heads (4 KV), vocabulary 256"


def test_config_of_kimi() -> None:
    result = run("SC701", model=KIMI)
    assert result.status == "ok"
    assert result.outcome.found == (
        "KimiK25ForConditionalGeneration (kimi_k25), 61 layers, hidden 7168, 64 heads, vocabulary 163840, "
        "384 experts, MLA, multimodal, quantized (compressed-tensors, 4-bit int)"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"architectures": ["Llama', "is not JSON"),
        ("", "is not JSON"),
        ("[1, 2]", "not a JSON object"),
        ("version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        ('{"base_model_name_or_path": "x", "r": 8}', "without architectures and a layer count"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_config_damaged(model: Path, text: str, words: str) -> None:
    (model / "config.json").write_text(text)
    result = run("SC701", model=model)
    assert (result.status, words in result.outcome.found) == ("failed", True), result.outcome.found
    if "without" not in words:
        assert run("SC708", model=model).status == "skipped"


def test_config_is_a_folder(model: Path) -> None:
    (model / "config.json").unlink()
    assert "is not there" in run("SC701", model=model).outcome.found
    (model / "config.json").mkdir()
    assert run("SC701", model=model).outcome.found == "config.json is a folder"


def test_config_denied(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied(monkeypatch, model / "config.json")
    assert "Permission denied" in run("SC701", model=model).outcome.found


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: {"text_config": text, "vision_config": {"num_hidden_layers": 3}},
        lambda text: {"thinker_config": {"text_config": text, "audio_config": {"num_hidden_layers": 3}}},
        lambda text: {"language_config": text, "vision_config": {}},
        lambda text: {"llm_config": text, "vision_config": {}},
        lambda text: {"model_type": "x", "num_hidden_layers": 99, "text_config": text, "audio_config": {}},
    ],
)
def test_nested_configs(wrap: Any) -> None:
    facts = ModelFacts({"architectures": ["X"], **wrap(LLAMA)})
    assert (facts.layers, facts.hidden_size, facts.heads, facts.kv_heads, facts.vocab_size) == (
        8,
        64,
        8,
        4,
        256,
    )
    assert facts.is_multimodal


def test_traits() -> None:
    assert ModelFacts({**LLAMA, "num_experts": 8}).traits == ["8 experts"]
    assert ModelFacts({**LLAMA, "kv_lora_rank": 512}).traits == ["MLA"]
    assert ModelFacts({**LLAMA, "layer_types": ["mamba", "full_attention"]}).traits == ["hybrid"]
    assert ModelFacts({**LLAMA, "layer_types": ["sliding_attention", "full_attention"]}).traits == []
    quantized = {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert ModelFacts(quantized).traits == ["quantized (awq, 4-bit)"]
    gpt2 = ModelFacts({"architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_embd": 768, "n_head": 12})
    assert (gpt2.layers, gpt2.hidden_size, gpt2.kv_heads, gpt2.layer_path) == (12, 768, 12, "transformer.h")
    assert (
        ModelFacts(json.loads((KIMI / "config.json").read_text())).layer_path == "language_model.model.layers"
    )


# --- SC702: the tokenizer ---


def test_tokenizer(model: Path) -> None:
    result = run("SC702", model=model)
    assert (result.status, "up to 200" in result.outcome.found) == ("ok", True)


def test_tokenizer_missing(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert run("SC702", model=model).status == "failed"
    (model / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tok.T", null]}}')
    assert run("SC702", model=model).status == "ok"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_truncated(model: Path, name: str) -> None:
    (model / name).write_text('{"model": {"voc')
    result = run("SC702", model=model)
    assert (result.status, name in result.outcome.found) == ("failed", True)


def test_tokenizer_of_another_model(model: Path) -> None:
    content = {"model": {"vocab": [["a", 0.1]] * 300}}
    (model / "tokenizer.json").write_text(json.dumps(content))
    result = run("SC702", model=model)
    assert (result.status, "up to 299" in result.outcome.found) == ("warning", True)


# --- SC703 and SC704: the weights ---


def test_weights(model: Path) -> None:
    found = run("SC703", model=model).outcome.found
    assert found.startswith("2 safetensors files listed by the index")
    found = run("SC704", model=model).outcome.found
    assert found == "all whole by their headers: 4 tensors, 36 values (100% BF16)"


def test_single_file_without_an_index(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", shards=1)
    (model / "model.safetensors.index.json").unlink()
    assert run("SC703", model=model).outcome.found.startswith("1 safetensors file without an index")
    assert run("SC704", model=model).status == "ok"


def test_a_rehearsal_needs_no_weights(tmp_path: Path) -> None:
    assert run("SC703", model=KIMI).status == "failed"
    assert run("SC703", model=KIMI, rehearse=True).status == "skipped"
    assert run("SC704", model=KIMI, rehearse=True).status == "skipped"
    model = make_model(tmp_path / "m")
    (model / "model-00001-of-00002.safetensors").unlink()
    assert run("SC703", model=model, rehearse=True).status == "failed"  # some are there: a download cut short
    (model / "model-00002-of-00002.safetensors").unlink()
    assert run("SC703", model=model, rehearse=True).status == "skipped"


def test_other_kinds_of_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", shards=0)
    (model / "model.safetensors.index.json").unlink()
    result = run("SC703", model=model)
    assert (result.status, "no weights" in result.outcome.found) == ("failed", True)
    assert run("SC704", model=model).status == "skipped"
    assert run("SC703", model=model, vllm_args={"load_format": "dummy"}).status == "ok"
    (model / "pytorch_model.bin").write_bytes(bytes(5000))
    assert run("SC703", model=model).outcome.found.startswith("1 bin file")
    assert run("SC704", model=model).status == "skipped"
    (model / "pytorch_model.bin").write_bytes(b"")
    assert run("SC704", model=model).status == "failed"


def test_shard_missing(model: Path) -> None:
    (model / "model-00001-of-00002.safetensors").unlink()
    result = run("SC703", model=model)
    assert result.status == "failed"
    assert "1 of 2 listed files are not there: model-00001-of-00002.safetensors" in result.outcome.found
    assert run("SC704", model=model).status == "skipped"


@pytest.mark.parametrize(
    "text", ['{"weight_map": {"a": "mod', "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_index_damaged(model: Path, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text)
    assert run("SC703", model=model).status == "failed"
    assert run("SC704", model=model).status == "skipped"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git-lfs pointer"),
        (tensors({"w1.a": [4, 4], "w1.b": [2]})[:-10], "10 bytes are missing"),
        (tensors({"w1.a": [4, 4], "w1.b": [2]}) + b"1234", "4 bytes too many"),
        (tensors({"w1.a": [4, 4], "w1.b": [2]})[:50], "cut off inside its header"),
        (b"\xff" * 100, "no safetensors file"),
        ((20).to_bytes(8, "little") + b'{"a": {"dtype": 1}}' + bytes(20), "damaged"),
        (b"abc", "no safetensors file"),
        (tensors({"w1.a": [4, 4]}), "lacks 1 tensors of the index (w1.b)"),
    ],
)
def test_shard_damaged(model: Path, content: bytes, words: str) -> None:
    (model / "model-00001-of-00002.safetensors").write_bytes(content)
    result = run("SC704", model=model)
    assert (result.status, words in result.outcome.found) == ("failed", True), result.outcome.found
    assert "model-00001-of-00002" in result.outcome.found


def test_shard_is_a_folder_or_denied(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = model / "model-00001-of-00002.safetensors"
    denied(monkeypatch, shard)
    assert "Permission denied" in run("SC704", model=model).outcome.found
    shard.unlink()
    shard.mkdir()
    assert "is a folder" in run("SC704", model=model).outcome.found


def test_64_shards_take_no_time(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", shards=64)
    weight_map = {}
    for number, shard in enumerate(sorted(model.glob("*.safetensors"))):
        content = {f"layers.{number}.experts.{k}.weight": [1] for k in range(1000)}
        shard.write_bytes(tensors(content))
        weight_map.update(dict.fromkeys(content, shard.name))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    began = time.process_time()
    for id in ("SC700", "SC701", "SC702", "SC703", "SC704"):
        assert run(id, model=model).status == "ok"
    assert time.process_time() - began < 3


# --- SC705: dtype and quantization ---


def test_dtype(model: Path, vllm: Path) -> None:
    assert run("SC705", vllm, model=model).outcome.found == "stored as bfloat16, states in bfloat16"
    assert run("SC705", vllm, model=KIMI).status == "ok"


def test_dtype_float32(tmp_path: Path, vllm: Path) -> None:
    model = make_model(tmp_path / "m", {"torch_dtype": "float32"})
    assert "vLLM makes bfloat16 of float32" in run("SC705", vllm, model=model).outcome.found
    kept = run("SC705", vllm, model=model, vllm_args={"dtype": "float32"}).outcome.found
    assert kept == "stored as float32, states in float32"


def test_float16_of_a_bfloat16_model(model: Path, vllm: Path) -> None:
    assert run("SC705", vllm, model=model, vllm_args={"dtype": "half"}).status == "warning"


def test_unknown_quantization(tmp_path: Path, vllm: Path) -> None:
    model = make_model(tmp_path / "m", {"quantization_config": {"quant_method": "exl9"}})
    result = run("SC705", vllm, model=model)
    assert (result.status, "exl9" in result.outcome.found) == ("failed", True)


# --- SC706: code of the model's own ---


def own_code(folder: Path, code: str) -> Path:
    model = make_model(folder, {"auto_map": {"AutoConfig": "configuration_x.XConfig"}, "model_type": "x"})
    (model / "configuration_x.py").write_text(code)
    return model


def test_no_code(model: Path, vllm: Path) -> None:
    assert "not needed" in run("SC706", vllm, model=model).outcome.found


def test_code_is_read_and_never_run(tmp_path: Path, vllm: Path) -> None:
    model = own_code(tmp_path / "m", "import json\nfrom .helper import x\nraise SystemExit('it was run')\n")
    (model / "helper.py").write_text("x = 1\nraise RuntimeError('it was run')\n")
    result = run("SC706", vllm, model=model)
    assert (result.status, result.outcome.found) == (
        "ok",
        "configuration_x.py (read, not run); trust_remote_code is set",
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("class X(:", "can't read"),
        ("import no_such_package_here\n", "imports no_such_package_here"),
        ("from no_such_package_here.x import y\n", "imports no_such_package_here"),
    ],
)
def test_code_that_will_not_run(tmp_path: Path, vllm: Path, code: str, words: str) -> None:
    result = run("SC706", vllm, model=own_code(tmp_path / "m", code))
    assert (result.status, words in result.outcome.found) == ("failed", True)


def test_code_with_a_way_out(tmp_path: Path, vllm: Path) -> None:
    code = "try:\n    import no_such_package_here\nexcept ImportError:\n    pass\n"
    assert run("SC706", vllm, model=own_code(tmp_path / "m", code)).status == "ok"


def test_code_missing(tmp_path: Path, vllm: Path) -> None:
    model = own_code(tmp_path / "m", "")
    (model / "configuration_x.py").unlink()
    result = run("SC706", vllm, model=model)
    assert (result.status, "named by auto_map" in result.outcome.found) == ("failed", True)


def test_code_not_trusted(tmp_path: Path, vllm: Path) -> None:
    model = own_code(tmp_path / "m", "")
    assert run("SC706", vllm, model=model, vllm_args={"trust_remote_code": False}).status == "warning"


# --- SC707 and SC708: vLLM's registry ---


def test_architecture(model: Path, vllm: Path) -> None:
    assert run("SC707", vllm, model=model).status == "ok"
    assert run("SC707", vllm, model=KIMI).status == "ok"
    assert run("SC707", None, model=model).status == "skipped"


@pytest.mark.parametrize(
    ("config", "status", "words"),
    [
        ({"architectures": ["LamaForCausalLM"]}, "failed", "near it: LlamaForCausalLM"),
        ({"architectures": ["MotifForCausalLM"]}, "failed", "had until 0.10.2"),
        ({"architectures": ["EagleLlama"]}, "failed", "not among the 6"),
        (
            {"architectures": ["New"], "auto_map": {"AutoModelForCausalLM": "m.New"}},
            "warning",
            "code of its own",
        ),
    ],
)
def test_architecture_unknown(tmp_path: Path, vllm: Path, config: Any, status: str, words: str) -> None:
    result = run("SC707", vllm, model=make_model(tmp_path / "m", config))
    assert (result.status, words in result.outcome.found) == (status, True), result.outcome.found


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("LlamaForCausalLM", "native"),
        ("MistralForCausalLM", "native"),
        ("FarForCausalLM", "native"),
        ("PlainForCausalLM", "shimmed"),
        ("LostForCausalLM", "unknown"),
    ],
)
def test_capture(tmp_path: Path, vllm: Path, architecture: str, words: str) -> None:
    model = make_model(tmp_path / "m", {"architectures": [architecture]})
    result = run("SC708", vllm, model=model)
    assert result.status == "ok"
    assert words in result.outcome.found
    assert "model.layers, 8 x 64" in result.outcome.found


def test_capture_of_kimi_and_of_the_unknown(tmp_path: Path, vllm: Path) -> None:
    assert run("SC708", vllm, model=KIMI).outcome.found == (
        "SupportsEagle3 is shimmed; decoder layers expected at language_model.model.layers, 61 x 7168"
    )
    assert run("SC708", vllm, model=make_model(tmp_path / "m", {"architectures": ["No"]})).status == "skipped"
