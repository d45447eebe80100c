"""The plumbing of examples/extract_hidden_states.py, with a fake generator in place of the engine.

What the real generator returns is tested elsewhere, on a real vLLM; here it is the example that is tested:
checks before the start, order, bad lines, resuming, failures, exit statuses.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import speculators_compat
from speculators_compat import cli, settings
from speculators_compat.errors import CompatError

torch = pytest.importorskip(
    "torch", reason="samples are torch files; these tests run where vLLM is installed"
)

EXAMPLE = Path(__file__).parent.parent / "examples" / "extract_hidden_states.py"
MODULE = "speculators.data_generation.vllm_hidden_states_generator"
LAYERS = [0, 1, 2]

# Also the source of a module for the runs in a subprocess, hence text.
FAKE = """
import os, signal
import torch

class VllmHiddenStatesGenerator:
    made = []
    fail_at = None  # (number of the call, exception or "kill")

    def __init__(self, model_path, layer_ids=None, max_model_len=2048, gpu_memory_utilization=0.8,
                 tensor_parallel_size=1):
        self.layer_ids = layer_ids or [0, 1, 2]
        self.max_len = max_model_len - 1
        self.args = dict(locals(), self=None)
        self.calls = []
        self.ended = 0
        type(self).made.append(self)

    def generate(self, token_ids, on_result):
        self.calls.append([list(ids) for ids in token_ids])
        fail = self.fail_at or ((int(os.environ["FAIL_AT"]), "kill") if "FAIL_AT" in os.environ else None)
        if fail and len(self.calls) == fail[0]:
            if fail[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise fail[1]
        for index, ids in enumerate(token_ids):
            ids = torch.tensor(ids[: self.max_len])
            states = [(ids[:, None] + 1000 * layer + torch.arange(8) / 8).float() for layer in self.layer_ids]
            on_result(index, {"input_ids": ids, "hidden_states": states, "loss_mask": None})
        return []

    def shutdown(self):
        self.ended += 1
"""


@pytest.fixture
def main() -> Callable[..., int]:
    spec = importlib.util.spec_from_file_location("example_under_test", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *argv: module.main([str(arg) for arg in argv])


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake generator class, found where the example imports the real one."""
    for name in ("speculators", "speculators.data_generation"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    module = types.ModuleType(MODULE)
    exec(FAKE, module.__dict__)
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(settings, "_configured", {})
    return module.__dict__["VllmHiddenStatesGenerator"]


@pytest.fixture
def job(tmp_path: Path) -> list[Any]:
    """Arguments of a job of 10 lines, one of them bad and one too long."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 100}))
    (model / "model.safetensors").write_bytes(b"\1" * 2000)
    records: list[Any] = [
        {"input_ids": list(range(n, 2 * n + 1)), "loss_mask": [0] * n + [1]} for n in range(1, 10)
    ]
    records.insert(3, {"input_ids": [1, 100]})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return [
        "--model-path",
        model,
        "--prepared-data",
        tmp_path / "p.jsonl",
        "--output-dir",
        tmp_path / "out",
    ] + (["--batch-size", 2, "--max-seq-len", 8, "--skip-check"])


def samples(folder: Path) -> dict[str, bytes]:
    """Content of all that must be the same whichever way it came about."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("manifest.json", ".lock")}


def test_a_whole_job(main: Any, generator: Any, job: list[Any], tmp_path: Path, capsys: Any) -> None:
    assert main(*job) == 0
    said = capsys.readouterr().out
    assert "written:   9 samples" in said
    assert "truncated: 2 samples" in said
    assert "skipped:   1 lines\n" in said
    assert " 1 x input_ids holds a token id outside the vocabulary: line 4 (100 at 1, size 100)\n" in said
    (made,) = generator.made
    assert made.ended == 1
    assert made.args["max_model_len"] == 9
    assert [len(call) for call in made.calls] == [2, 2, 2, 2, 1]

    out = tmp_path / "out"
    lengths = json.loads((out / "sample_lengths.json").read_text())
    assert lengths == {"0": 2, "1": 3, "2": 4, "4": 5, "5": 6, "6": 7, "7": 8, "8": 8, "9": 8}
    for name, length in lengths.items():
        data = torch.load(out / f"data_{name}.pt", weights_only=True)
        n = int(name) + (1 if int(name) < 3 else 0)
        assert data["input_ids"].tolist() == list(range(n, 2 * n + 1))[:8]
        assert data["loss_mask"].tolist() == ([0] * n + [1])[:8]
        assert [state[0, 0].item() for state in data["hidden_states"]] == [n, n + 1000, n + 2000]
        assert all(state.shape == (length, 8) for state in data["hidden_states"])
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["samples"] == 9
    assert manifest["recorded"]["layer_ids"] == LAYERS


def test_a_finished_job_starts_no_engine(main: Any, generator: Any, job: list[Any], tmp_path: Path) -> None:
    assert main(*job) == 0
    before = samples(tmp_path / "out")
    assert main(*job) == 0
    assert len(generator.made) == 1
    assert samples(tmp_path / "out") == before


def test_limit_can_be_raised_later(main: Any, generator: Any, job: list[Any], tmp_path: Path) -> None:
    assert main(*job, "--limit", 4) == 0
    assert sorted(p.name for p in (tmp_path / "out").glob("data_*")) == [f"data_{n}.pt" for n in (0, 1, 2, 4)]
    assert main(*job) == 0
    assert [len(made.calls) for made in generator.made] == [2, 3]
    assert len(samples(tmp_path / "out")) == 11


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("how", ["error", "crash", "interrupt"])
def test_a_failure_keeps_finished_batches_and_resume_completes(
    main: Any, generator: Any, job: list[Any], tmp_path: Path, capsys: Any, call: int, how: str
) -> None:
    error = {
        "error": CompatError("SC608", found="sample 3", expected="", why="", mend=""),
        "crash": RuntimeError("engine died"),
        "interrupt": KeyboardInterrupt(),
    }[how]
    generator.fail_at = (call, error)
    if how == "crash":
        with pytest.raises(RuntimeError, match="engine died"):
            main(*job)
    else:
        assert main(*job) == (1 if how == "error" else 130)
        said = capsys.readouterr().err
        assert ("[SC608]" if how == "error" else "resume with the same command") in said
        assert "Traceback" not in said
    assert generator.made[0].ended == 1
    assert len(list((tmp_path / "out").glob("data_*"))) == 2 * (call - 1)
    assert not json.loads((tmp_path / "out" / "manifest.json").read_text())["complete"]

    generator.fail_at = None
    assert main(*job) == 0
    assert sum(len(batch) for batch in generator.made[1].calls) == 9 - 2 * (call - 1)
    resumed = samples(tmp_path / "out")
    job[job.index("--output-dir") + 1] = tmp_path / "undisturbed"
    assert main(*job) == 0
    assert samples(tmp_path / "undisturbed") == resumed


def test_killed_and_resumed_equals_undisturbed(
    main: Any, generator: Any, job: list[Any], tmp_path: Path
) -> None:
    package = tmp_path / "fake" / "speculators" / "data_generation"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    (package / "vllm_hidden_states_generator.py").write_text(FAKE)
    paths = [str(tmp_path / "fake"), str(EXAMPLE.parent.parent / "src"), *filter(None, sys.path)]
    for fail_at, status in (
        ("3", -signal.SIGKILL),
        ("1", -signal.SIGKILL),
        ("2", -signal.SIGKILL),
        ("99", 0),
    ):
        done = subprocess.run(
            [sys.executable, EXAMPLE, *map(str, job)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "FAIL_AT": fail_at,
                "SPECULATORS_COMPAT": "0",
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stderr
    # How many were on the disk when the process was killed is up to the threads that write.
    written, resumed = (int(re.search(rf"{name}: +(\d+) samples", done.stdout)[1]) for name in ("written", "resumed"))
    assert written + resumed == 9
    out = tmp_path / "out"
    job[job.index("--output-dir") + 1] = tmp_path / "undisturbed"
    assert main(*job) == 0
    assert samples(tmp_path / "undisturbed") == samples(out)


def test_changed_settings_are_refused(
    main: Any, generator: Any, job: list[Any], tmp_path: Path, capsys: Any
) -> None:
    assert main(*job, "--limit", 2) == 0
    before = samples(tmp_path / "out")
    for change, said in (
        (["--layer-ids", 0, 2], 'layer_ids: "default" in the folder, [0, 2] now'),
        (["--max-seq-len", 9], "max_seq_len: 8 in the folder, 9 now"),
        (["--vllm-args", '{"dtype": "float32"}'], 'dtype: "auto" in the folder, "float32" now'),
    ):
        settings._configured.clear()
        assert main(*job, *change) == 1
        error = capsys.readouterr().err
        assert "[SC604]" in error
        assert said in error
    settings._configured.clear()
    assert main(*job, "--batch-size", 3, "--gpu-memory-utilization", 0.5, "--limit", 2) == 0
    with open(tmp_path / "p.jsonl", "a") as stream:
        stream.write('{"input_ids": [1]}\n')
    assert main(*job) == 1
    assert "data.sha256" in capsys.readouterr().err
    assert samples(tmp_path / "out") == before
    assert len(generator.made) == 1


def test_vllm_args_and_layers_reach_the_generator(
    main: Any, generator: Any, job: list[Any], tmp_path: Path
) -> None:
    args = ["--layer-ids", 2, 4, 5, "--tp-size", 2, "--vllm-args", '{"dtype": "float32", "max_num_seqs": 4}']
    assert main(*job, *args) == 0
    (made,) = generator.made
    assert made.args["layer_ids"] == [2, 4, 5]
    assert made.args["tensor_parallel_size"] == 2
    assert settings.current().vllm_args == {"dtype": "float32", "max_num_seqs": 4}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["settings"]["layer_ids"] == [2, 4, 5]
    assert manifest["settings"]["dtype"] == "float32"
    assert manifest["settings"]["layer_convention"] == "after-layer"


@pytest.mark.parametrize(
    ("option", "make", "id"),
    [
        ("--prepared-data", None, "SC605"),
        ("--prepared-data", "x\n[]\n", "SC605"),
        ("--output-dir", "a file", "SC603"),
        ("--model-path", None, "SC606"),
        ("--model-path", "a file", "SC606"),
    ],
)
def test_bad_input_is_refused_before_the_engine_starts(
    main: Any,
    generator: Any,
    job: list[Any],
    tmp_path: Path,
    capsys: Any,
    option: str,
    make: str | None,
    id: str,
) -> None:
    path = tmp_path / "bad"
    if make is not None:
        path.write_text(make)
    job[job.index(option) + 1] = path
    assert main(*job) == 1
    assert f"[{id}]" in capsys.readouterr().err
    assert generator.made == []


def test_strict_ends_at_the_first_bad_line(
    main: Any, generator: Any, job: list[Any], tmp_path: Path, capsys: Any
) -> None:
    assert main(*job, "--strict", "--batch-size", 1) == 1
    error = capsys.readouterr().err
    assert "[SC601]" in error
    assert "line 4: input_ids holds a token id outside" in error
    assert generator.made[0].ended == 1
    assert len(list((tmp_path / "out").glob("data_*"))) == 3


def test_disk_full_ends_with_what_is_finished(
    main: Any, generator: Any, job: list[Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def full(path: Any, *rest: Any) -> int:
        return real("/dev/full", os.O_WRONLY) if str(path).endswith("data_2.pt.tmp") else real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        assert main(*job) == 1
    assert "[SC602]" in capsys.readouterr().err
    assert generator.made[0].ended == 1
    # Which of the others were written already is up to the threads that write.
    assert not (tmp_path / "out" / "data_2.pt").exists()
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert main(*job) == 0
    assert len(list((tmp_path / "out").glob("data_*"))) == 9


@pytest.mark.parametrize("passed", [True, False])
def test_checks_come_before_the_load(
    main: Any, generator: Any, job: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any, passed: bool
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cli, "check_first", lambda arguments, layer_ids: seen.append(arguments) or passed)
    job.remove("--skip-check")
    assert main(*job) == (0 if passed else 1)
    assert len(generator.made) == (1 if passed else 0)
    assert ("not started" in capsys.readouterr().err) == (not passed)
    (arguments,) = seen
    assert (arguments["model_path"], arguments["batch_size"]) == (str(job[1]), 2)


def test_a_failed_check_is_told_in_the_example_s_words(
    main: Any, generator: Any, job: list[Any], capsys: Any
) -> None:
    job.remove("--skip-check")
    assert main(*job, "--tp-size", "3") == 1
    error = capsys.readouterr().err
    assert "[SC701]  failed" in error  # the model of these tests has a vocabulary and nothing else
    assert "check --model-path" in " ".join(error.split())
    assert generator.made == []


@pytest.mark.parametrize(
    "extra",
    [
        ["--batch-size", "0"],
        ["--max-seq-len", "x"],
        ["--gpu-memory-utilization", "1.5"],
        ["--vllm-args", "{"],
        ["--vllm-args", "[]"],
        ["--layer-ids"],
        ["--no-such-option"],
    ],
)
def test_usage(main: Any, generator: Any, job: list[Any], extra: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(*job, *extra)
    assert caught.value.code == 2


def test_the_example_stays_an_example() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 225
    assert hasattr(speculators_compat, "configure")
