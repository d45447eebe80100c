"""speculators 0.9.0, which has no generator, with the newest vLLM: an old script, and the new trainer's own data set."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from test_order import TOOLS, answer_of
from test_restored import MORE
from vllm_env import ROOT, VllmEnv, make

from speculators_compat.adapter import GENERATOR_MODULE

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
VLLM, SPECULATORS = "0.32.0", "0.9.0"
EXACT = '{"dtype": "float32", "compilation_config": {"custom_ops": ["none"]}}'
LAYERS = 8  # the trainer's own layers, 2, n // 2 and n - 3, must differ
#: Largest error of an old script's samples against transformers, layer ids counting the layers that are left.
CHECK = """
import json, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
import tiny_models
model, prompts, output, *ids = sys.argv[2:]
prompts, ids, worst = json.loads(Path(prompts).read_text()), [int(k) for k in ids], 0.0
order = sorted(set(ids))
for number, (prompt, states) in enumerate(zip(prompts, tiny_models.reference_hidden_states(Path(model), prompts, order))):
    sample = torch.load(Path(output) / f"data_{number}.pt", weights_only=True)
    assert sample["input_ids"].tolist() == prompt, number
    assert len(sample["hidden_states"]) == len(ids)
    for got, k in zip(sample["hidden_states"], ids):
        wanted = states[order.index(k)]
        assert got.shape == wanted.shape
        worst = max(worst, ((got - wanted).abs().max() / wanted.abs().max()).item())
print("WORST", worst)
"""


@pytest.fixture(scope="module")
def env() -> VllmEnv:
    return make(VLLM)


@pytest.fixture(scope="module")
def model(env: VllmEnv, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newest") / "llama"
    build = f"tiny_models.build_llama(sys.argv[2], num_layers={LAYERS})"
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import tiny_models; {build}"
    done = env.run("-c", code, ROOT / "examples", folder, speculators=None)
    assert done.returncode == 0, done.stdout
    return folder


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(9)
    # Some tokens are frequent, as in text, so that there is something to learn.
    return [[min(511, 8 + int(draw.expovariate(1 / 40))) for _ in range(draw.randrange(8, 60))] for _ in range(count)]


def test_an_old_script_runs_unchanged(env: VllmEnv, model: Path, tmp_path: Path) -> None:
    file, ids = tmp_path / "prompts.json", ["2", "4", "5", "7"]
    file.write_text(json.dumps(prompts(28)))  # more than ten in a call: released 0.4 returned them in another order
    variables = {"SPECULATORS_COMPAT_VLLM_ARGS": EXACT, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    script = HERE / "script_of_0_4.py"
    done = env.run(script, model, file, tmp_path / "out", *ids, speculators=SPECULATORS, **variables)
    assert done.returncode == 0, done.stdout[-6000:]
    # What the ids count is said once, in both conventions, with what the trainer must be told.
    assert done.stdout.count("count the layers that are left") == 1
    assert "boundaries [3, 5, 6, 8]" in done.stdout
    assert "--target-layer-ids 3 5 6," in done.stdout
    assert "untested" not in done.stdout
    checked = env.run("-c", CHECK, ROOT / "examples", model, file, tmp_path / "out", *ids, speculators=None)
    assert checked.returncode == 0, checked.stdout[-6000:]
    assert 0 < float(checked.stdout.rpartition("WORST ")[2]) <= 1e-5


def test_undone_on_the_real_packages(env: VllmEnv) -> None:
    """What users meet today, what activation changes, and that undoing leaves neither a module nor an attribute."""
    code = """
os.environ["SPECULATORS_COMPAT"] = "0"
import speculators_compat, speculators_compat.worker, speculators_compat.registry
speculators_compat.registry.registry()
import speculators.data_generation.vllm_client, vllm.entrypoints.llm, vllm.engine.arg_utils, vllm.config.speculative
import transformers.configuration_utils, torch
from vllm.v1.engine.llm_engine import LLMEngine
today, before, had = [fails(FROM_MODULE), fails(FROM_PACKAGE)], snapshot(), left()
del os.environ["SPECULATORS_COMPAT"]
speculators_compat.activate()
works = [fails(FROM_MODULE), fails(FROM_PACKAGE)]
states = {a.id: str(a.state) for a in speculators_compat.status().adapters}
speculators_compat.deactivate()
show(today=today, works=works, undone=[fails(FROM_MODULE), fails(FROM_PACKAGE)], left=sorted(set(left()) - set(had)),
     after=differences(before, snapshot()), states=states, compared=len(before))
"""
    done = env.run("-c", TOOLS + MORE + code, speculators=SPECULATORS)
    found = answer_of(done.returncode, done.stdout)
    assert found["compared"] > 3000
    module, package = found["today"]
    assert module == f"ModuleNotFoundError: No module named '{GENERATOR_MODULE}'"
    assert package.startswith("ImportError: cannot import name 'VllmHiddenStatesGenerator'")
    assert found["works"] == ["no error", "no error"]
    assert found["undone"] == found["today"]
    assert found["left"] == []
    assert found["after"] == []
    assert set(found["states"].values()) <= {"applied", "not-needed", "not-applicable", "waiting"}


@pytest.fixture(scope="module")
def written(env: VllmEnv, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the example writes if neither format nor layer ids are given: both are those of the installed trainer."""
    folder = tmp_path_factory.mktemp("written")
    lines = [json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) for ids in prompts(40)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    arguments = ["--model-path", model, "--prepared-data", folder / "prompts.jsonl", "--output-dir", folder / "out"]
    arguments += ["--vllm-args", EXACT, "--max-seq-len", 100, "--gpu-memory-utilization", 0.3, "--skip-check"]
    script = ROOT / "examples" / "extract_hidden_states.py"
    done = env.run(script, *arguments, speculators=SPECULATORS, VLLM_CPU_OMP_THREADS_BIND="nobind")
    assert done.returncode == 0, done.stdout[-6000:]
    assert "count the layers that are left" not in done.stdout  # nothing is in doubt here
    return folder / "out"


def test_the_trainer_reads_what_the_example_writes(
    env: VllmEnv, model: Path, written: Path, tmp_path: Path
) -> None:
    """By its own data set and collation, its own choice of layers, and transformers' states of those."""
    recorded = json.loads((written / "manifest.json").read_text())["recorded"]
    assert recorded["boundaries"] == [2, LAYERS // 2, LAYERS - 3, LAYERS]
    assert [layer["boundary"] for layer in recorded["layers_captured"]] == recorded["boundaries"]
    assert recorded["way"] == "restored"
    answer = tmp_path / "answer.json"
    done = env.run(
        HERE / "train.py", written, model, answer, "only-read", speculators=SPECULATORS, SPECULATORS_COMPAT="0"
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found = json.loads(answer.read_text())
    assert found["samples"] == 40
    assert found["trainer"]["layers"] == [2, LAYERS // 2, LAYERS - 3]
    assert found["trainer"]["error"] <= 1e-5
    assert found["batch"]["hidden_states"] == [1, 128, 3 * 128]


@pytest.mark.wide
def test_the_trainer_learns(vllm_env: VllmEnv, model: Path, written: Path, tmp_path: Path) -> None:
    # Beside an older torch: the newest one's flex attention, which the trainer uses, has no backward pass on a CPU.
    answer = tmp_path / "answer.json"
    done = vllm_env.run(
        HERE / "train.py", written, model, answer, speculators=SPECULATORS, timeout=900, SPECULATORS_COMPAT="0"
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found = json.loads(answer.read_text())
    assert found["trainer"]["layers"] == found["aux_layers"]
    assert found["last"] < 0.8 * found["first"]
