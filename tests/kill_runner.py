"""Kills the example with SIGKILL at random moments, resumes it, and checks every file after every kill.

    python kill_runner.py FOLDER FORMAT KILLS SEED

The generator is a fake whose states follow from the tokens, so that every file's right content is known. Processes are
forked from this one, which has imported everything, so a run takes a fraction of a second and the kills fall on the work
itself. Prints what it counted as JSON.
"""

import importlib.util
import json
import os
import random
import signal
import sys
import time
import types
from pathlib import Path

import torch

from speculators_compat import dataio, verify

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "extract_hidden_states.py"
MODULE = "speculators.data_generation.vllm_hidden_states_generator"
LINES, HIDDEN = 40, 64
LAYERS = 8


def states_of(ids, layers):
    ids = torch.tensor(ids)
    return [(ids[:, None] + 1000 * layer + torch.arange(HIDDEN) / HIDDEN).float() for layer in layers]


class VllmHiddenStatesGenerator:
    def __init__(self, model_path, layer_ids=None, **_):
        self.layer_ids = layer_ids or [2, LAYERS // 2, LAYERS - 3, LAYERS - 1]

    def generate(self, token_ids, on_result):
        for index, ids in enumerate(token_ids):
            states = states_of(ids, self.layer_ids)
            on_result(index, {"input_ids": torch.tensor(ids), "hidden_states": states, "loss_mask": None})
        return []

    def shutdown(self):
        pass


def install_fake():
    for name in ("speculators", "speculators.data_generation"):
        package = types.ModuleType(name)
        package.__path__ = []
        sys.modules[name] = package
    module = types.ModuleType(MODULE)
    module.VllmHiddenStatesGenerator = VllmHiddenStatesGenerator
    sys.modules[MODULE] = module


def load_example():
    spec = importlib.util.spec_from_file_location("example_under_test", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def make_job(folder, output):
    draw = random.Random(0)
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"vocab_size": 100, "num_hidden_layers": LAYERS}))
    (model / "model.safetensors").write_bytes(b"\1" * 2000)
    prompts = [[draw.randrange(100) for _ in range(draw.randrange(1, 40))] for _ in range(LINES)]
    lines = [json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) for ids in prompts]
    lines.insert(7, "not json")
    (folder / "p.jsonl").write_text("\n".join(lines) + "\n")
    arguments = ["--model-path", model, "--prepared-data", folder / "p.jsonl", "--batch-size", 3]
    arguments += ["--format", output, "--skip-check"]
    numbered = prompts if output == "safetensors" else prompts[:7] + [None] + prompts[7:]
    expected = {number: ids for number, ids in enumerate(numbered) if ids is not None}
    return [str(a) for a in arguments], expected


def fork(main, arguments, out):
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        status = main([*arguments, "--output-dir", str(out)])
    finally:
        os._exit(status)


def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def content(out, output, expected):
    """Number of each sample under its final name; every one must be whole and right."""
    layers = [2, LAYERS // 2, LAYERS - 3, LAYERS - 1] if output == "pt" else [1, LAYERS // 2 - 1, LAYERS - 4, LAYERS - 1]
    found = set()
    for path in verify.sample_paths(out, output):
        number = int(path.stem.rpartition("_")[2])
        ids, states = verify.load_sample(path)
        assert ids == expected[number], path
        for got, wanted in zip(states, states_of(ids, layers), strict=True):
            assert torch.equal(got, wanted), path
        found.add(number)
    return found


def files(out):
    """All that must be the same whichever way it came about: dates and fingerprints are in these three."""
    differ = ("manifest.json", "state.json", ".lock")
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name not in differ}


def main(folder, output, kills, seed):
    folder, kills = Path(folder), int(kills)
    install_fake()
    if output == "safetensors":
        import datasets  # noqa: F401
        import safetensors.torch  # noqa: F401
    example = load_example()
    arguments, expected = make_job(folder, output)
    clean = folder / "undisturbed"
    started = time.monotonic()
    assert wait(fork(example, arguments, clean)) == 0
    duration = time.monotonic() - started
    assert content(clean, output, expected) == set(expected)

    draw = random.Random(int(seed))
    counted = {"kills": 0, "lost": 0, "finished_runs": 0, "equal": 0, "leftovers": 0, "seconds_a_run": duration}
    held, number = set(), 0
    out = folder / "out_0"
    while counted["kills"] < kills or held:
        pid = fork(example, arguments, out)
        if counted["kills"] < kills:
            time.sleep(draw.uniform(0, duration))
            os.kill(pid, signal.SIGKILL)
        status = wait(pid)
        now = content(out, output, expected) if out.exists() else set()
        counted["lost"] += len(held - now)
        held = now
        if status == -signal.SIGKILL:
            counted["kills"] += 1
            continue
        assert status == 0, status
        counted["finished_runs"] += 1
        counted["lost"] += len(set(expected) - now)
        counted["equal"] += files(out) == files(clean)
        counted["leftovers"] += len(list(out.rglob("*.tmp*")))
        assert json.loads((out / dataio.MANIFEST).read_text())["complete"]
        assert not verify.wrong_checksums(out, verify.sample_paths(out, output))
        number += 1
        out, held = folder / f"out_{number}", set()
    print(json.dumps(counted))


if __name__ == "__main__":
    main(*sys.argv[1:])
