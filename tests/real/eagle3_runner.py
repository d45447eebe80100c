"""Runs in a vLLM environment: auxiliary states as vLLM's own model runner gets them.

    python eagle3_runner.py JOB.json ANSWER.json

The job names the folder of tiny models and the kinds; the answer holds what was found for each kind.
One engine a kind, in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).
"""

import importlib
import json
import sys
import traceback
from pathlib import Path

import speculators_compat

EXACT = {"dtype": "float32", "compilation_config": {"custom_ops": ["none"]}}
PROMPTS = [[(7 * i + k) % 500 + 8 for i in range(n)] for k, n in enumerate((37, 1, 60))]
RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"


class Extension:
    """Mixed into vLLM's worker; its methods are called by ``collective_rpc`` in this very process."""

    def ask(self):
        """Ask as the runner does after it loaded a model for EAGLE-3, and have it use what it is given."""
        from speculators_compat.patches.eagle3_protocol import equipped, native

        runner, model = self.model_runner, self.model_runner.get_model()
        was_native = native(model)
        forward = type(model).forward
        runner.use_aux_hidden_state_outputs = True
        if not importlib.import_module(RUNNER_MODULE).supports_eagle3(model):
            raise RuntimeError("the runner refuses the model")
        getter = next(n for n in dir(model) if n.startswith("get_eagle3_") and n.endswith("layers"))
        self.kept = []
        execute = runner._model_forward

        def keep(*args, **kwargs):
            output = execute(*args, **kwargs)
            self.kept.append([state.clone() for state in output[1]] if isinstance(output, tuple) else None)
            return output

        runner._model_forward = keep
        return {
            "native": was_native,
            "equipped": equipped(model),
            "default": list(getattr(model, getter)()),
            "both_spellings": all(
                hasattr(model, f"get_eagle3_{word}aux_hidden_state_layers") for word in ("", "default_")
            ),
            "forward_kept": type(model).forward is forward and "forward" not in vars(model),
        }

    def set_layers(self, layers):
        self.model_runner.get_model().set_aux_hidden_state_layers(tuple(layers))

    def force(self, num_layers):
        """Equip a model that has no need of it."""
        from speculators_compat.activation import _process
        from speculators_compat.patches.eagle3_protocol import equip, equipped

        model = self.model_runner.get_model()
        model.set_aux_hidden_state_layers(())  # what the class itself does
        equip(model, num_layers, _process.journal, adapter="test")
        return equipped(model)

    def take(self):
        kept, self.kept = self.kept, []
        return kept


def states(llm, layers):
    """For each prompt its states at these boundaries."""
    from vllm import SamplingParams

    llm.collective_rpc("set_layers", args=(layers,))
    found = []
    for prompt in PROMPTS:
        llm.collective_rpc("take")
        params = SamplingParams(max_tokens=1, temperature=0)
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        (step,) = llm.collective_rpc("take")[0]
        found.append([state[: len(prompt)] for state in step])
    return found


def largest(found, wanted):
    return max(
        ((a - b).abs().max() / b.abs().max()).item()
        for one, other in zip(found, wanted, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def refused(call):
    try:
        call()
    except Exception as error:
        return getattr(error, "id", type(error).__name__)
    return None


def one_kind(folder, kind):
    import tiny_models
    from safetensors.torch import load_file
    from vllm import LLM

    path = folder / kind
    config = json.loads((path / "config.json").read_text())
    count = config.get("text_config", config)["num_hidden_layers"]
    after = tiny_models.reference_hidden_states(str(path), PROMPTS, list(range(count)))
    weights = load_file(path / "model.safetensors")
    embedding = next(t for n, t in weights.items() if n.endswith("embed_tokens.weight"))
    wanted = [[embedding[prompt], *layers] for prompt, layers in zip(PROMPTS, after, strict=True)]
    llm = LLM(
        str(path),
        enforce_eager=True,
        max_model_len=256,
        trust_remote_code=True,
        enable_prefix_caching=False,
        worker_extension_cls="eagle3_runner.Extension",
        **EXACT,
    )
    (answer,) = llm.collective_rpc("ask")
    chosen = [3, 1, 2, 1]  # comes back ascending and once
    found = states(llm, chosen)
    answer["error"] = largest(found, [[layers[k] for k in (1, 2, 3)] for layers in wanted])
    if answer["native"]:
        assert llm.collective_rpc("force", args=(count,)) == [True]
        answer["shim_equals_native"] = largest(states(llm, chosen), found) == 0.0
    answer["all"] = largest(states(llm, list(range(count + 1))), wanted)
    answer["refused"] = [
        refused(lambda layers=layers: llm.collective_rpc("set_layers", args=(layers,)))
        for layers in ([count + 1], [-1], [True])
    ]
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    model = executor.driver_worker.worker.model_runner.get_model()
    speculators_compat.deactivate()
    answer["left"] = [n for n in vars(model) if "eagle3" in n or "aux" in n] + [
        type(m).__name__ for m in model.modules() if m._forward_hooks or m._forward_pre_hooks
    ]
    answer["asked"] = type(importlib.import_module(RUNNER_MODULE).supports_eagle3).__name__
    speculators_compat.activate()
    llm.llm_engine.engine_core.shutdown()
    return answer


def allow_list(folder):
    """Make a draft model's config for a target whose type is not on the list, without and with the plugin."""
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    draft = folder / "draft"
    draft.mkdir(exist_ok=True)
    config = json.loads((folder / "llama" / "config.json").read_text())
    config.update(architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1)
    (draft / "config.json").write_text(json.dumps(config))

    def make():
        SpeculativeConfig(
            method="eagle3",
            model=str(draft),
            num_speculative_tokens=1,
            target_model_config=ModelConfig(str(folder / "deepseek_v3"), dtype="float32"),
            target_parallel_config=ParallelConfig(),
        )

    code = SpeculativeConfig._verify_args.__code__
    found = {"with": refused(make)}
    speculators_compat.deactivate()
    found["without"] = refused(make)
    found["put back"] = SpeculativeConfig._verify_args.__code__ is not code
    speculators_compat.activate()
    found["again"] = refused(make)
    return found


def main(job_path, answer_path):
    job = json.loads(Path(job_path).read_text())
    folder = Path(job["models"])
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    answers = {}
    for kind in job["kinds"]:
        try:
            answers[kind] = one_kind(folder, kind)
        except Exception:
            answers[kind] = {"failed": traceback.format_exc()}
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()  # a dense model's process groups do not serve one with experts
    try:
        answers["allow_list"] = allow_list(folder)
    except Exception:
        answers["allow_list"] = {"failed": traceback.format_exc()}
    Path(answer_path).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
