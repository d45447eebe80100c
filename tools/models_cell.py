"""One vLLM, many architectures: builds a tiny model of each, extracts with the plugin, and checks.

Runs in a vLLM environment:

    python models_cell.py REQUEST.json

The request is ``{"architectures": [...], "scratch": FOLDER, "answer": FILE, "limit": SECONDS}``.
Each architecture is
a process of its own, forked from this one after everything has been imported once. The answer is written anew after
each.

What is checked, for every decoder layer:

* count, shape, finite, not all zero;
* equal, bit for bit, to a second capture of the same forward pass, whose hooks share no code with the plugin and
  which decides between ``hidden_states`` and ``hidden_states + residual`` by which of the two the model's final norm
  turns into what it really put out;
* where transformers has the architecture: float32, its random weights saved and loaded by vLLM, its decoder layers'
  outputs within 1e-4 of the largest value (in bfloat16: twice what transformers itself loses in it).
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import itertools
import json
import math
import os
import re
import signal
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
EXACT = {"dtype": "float32", "compilation_config": {"custom_ops": ["none"]}, "runner": "generate"}
TOLERANCE = 1e-4
#: Where the engine's kernels exist for bfloat16 only: as often what transformers itself loses in bfloat16.
ROUNDING = 2.0
LENGTHS = [23, 1, 40]
MAX_MODEL_LEN = 128


def prompts() -> list[list[int]]:
    """Token ids from 16 on: smaller ones are special tokens."""
    return [[(11 * i + 5 * k) % 480 + 16 for i in range(n)] for k, n in enumerate(LENGTHS)]


# --------------------------------------------------------------------------- weights


def draw(model: Any) -> None:
    """Give every parameter random values that move the residual stream visibly, whatever its initialisation was."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            if any(word in name for word in ("A_log", "dt_bias", ".D", "time_", "decay", "lambda")):
                continue  # state-space parameters have a meaning of their own
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if name.endswith("e_score_correction_bias"):
                values = 0.1 * noise.abs()
            elif parameter.dim() == 1:
                is_norm = name.endswith("weight") or "norm" in name
                values = 1.0 + 0.1 * noise if is_norm else 0.1 * noise
            elif "embed" in name or name.endswith(("wte.weight", "word_embeddings.weight")):
                values = noise
            else:
                # A wide spread of the router's logits, so that its choices are no close calls.
                gain = 2.0 if name.endswith(("gate.weight", "router.weight", "gate.wg.weight")) else 0.7
                values = noise * (gain / math.sqrt(max(parameter.shape[-1], 1)))
            # As checkpoints have them: some implementations keep a few parameters in bfloat16.
            parameter.data.copy_(values.to(torch.bfloat16).to(parameter.dtype))


def draw_dummy_weights() -> None:
    """Have vLLM's dummy loader draw such values too, instead of almost zero."""
    from vllm.model_executor.model_loader import dummy_loader

    def initialize(model: Any, *args: Any, **kwargs: Any) -> None:
        draw(model)

    dummy_loader.initialize_dummy_weights = initialize


def rename(file: Path, made: Any) -> None:
    """Give stored weights the names that checkpoints of the architecture have."""
    from safetensors.torch import load_file, save_file

    weights = {}
    for name, tensor in load_file(file).items():
        for old, new in made.renames:
            name = name.replace(old, new)
        weights[made.prefix + name] = tensor
    save_file(weights, file, metadata={"format": "pt"})


def transformers_states(folder: Path, made: Any, layers: int) -> tuple[list[list[Any]], float]:
    """Build the model with transformers and save its weights.

    Returns:
        What left each decoder layer for each prompt, in float32; and how far from it the engine's states may be.
    """
    import torch
    import transformers

    from speculators_compat.patches.layer_navigation import find_decoder_layers

    kind = getattr(transformers, made.transformers or made.twin)
    if made.reference:
        given = {k: v for k, v in made.reference.items() if k not in ("architectures", "model_type", "auto_map")}
        config = kind.config_class(**given)
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = kind(config).to(torch.float32).eval()
    with contextlib.suppress(Exception):
        model.set_attn_implementation("eager")
    draw(model)
    with contextlib.suppress(Exception):
        model.tie_weights()
    text = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)  # as vLLM's own config class wrote it
    if made.prefix or made.renames:
        rename(folder / "model.safetensors", made)
    stack = find_decoder_layers(model, layers)
    seen: list[Any] = []
    for layer in stack.layers:
        layer.register_forward_hook(
            lambda module, args, output: seen.append((output[0] if isinstance(output, tuple) else output)[0].clone())
        )

    def states() -> list[list[Any]]:
        found = []
        with torch.inference_mode():
            for prompt in prompts():
                seen.clear()
                model(input_ids=torch.tensor([prompt]), use_cache=False)
                found.append([state.float() for state in seen])
        return found

    exact = states()
    if made.args.get("dtype") != "bfloat16":
        return exact, TOLERANCE
    model.to(torch.bfloat16)
    return exact, ROUNDING * max(map(distance, itertools.chain(*states()), itertools.chain(*exact)))


def distance(state: Any, wanted: Any) -> float:
    """Largest difference, in parts of the largest value."""
    return float((state - wanted).abs().max() / wanted.abs().max())


# --------------------------------------------------------------------------- the second capture


class Second:
    """What the decoder layers and the norm after them really returned, in one forward pass."""

    def __init__(self, model: Any, path: str) -> None:
        self.layers: dict[int, tuple[Any, Any]] = {}
        self.norm: Any = None
        self.output: Any = None
        model.register_forward_hook(self._returned)
        for index, layer in enumerate(model.get_submodule(path)):
            layer.register_forward_hook(self._left(index))
        for name, module in model.named_modules():
            if "norm" in type(module).__name__.lower() and not name.startswith(path + "."):
                module.register_forward_hook(self._normed)
        self._last = len(model.get_submodule(path)) - 1

    def _left(self, index: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            first, second = (tuple(output) + (None,))[:2] if isinstance(output, (tuple, list)) else (output, None)
            if first.dim() == 3:
                first = first[0]
            self.layers[index] = (first.clone(), second.clone() if hasattr(second, "clone") else None)
            self.norm = None

        return hook

    def _normed(self, module: Any, args: Any, output: Any) -> None:
        if self._last in self.layers and self.norm is None:
            value = output[0] if isinstance(output, tuple) else output
            self.norm = (module, value.clone().reshape(-1, value.shape[-1]))

    def _returned(self, module: Any, args: Any, output: Any) -> None:
        self.output = output[0] if isinstance(output, tuple) else output

    def habit(self) -> str:
        """``sum``, ``hidden`` or ``unknown``: what the final norm turned into what it put out."""
        hidden, residual = self.layers[self._last]
        if residual is None:
            return "hidden"
        if self.norm is None or len(self.norm[1]) != len(hidden):  # then the model returns the stream as it is
            found = {"sum": hidden + residual, "hidden": hidden}
            same = [name for name, state in found.items() if state.equal(self.output)]
            return same[0] if len(same) == 1 else "unknown"
        module, wanted = self.norm
        forward = getattr(module, "forward_native", None) or module.forward
        matches = []
        for name, state in (("sum", hidden + residual), ("hidden", hidden)):
            with contextlib.suppress(Exception):
                value = forward(state.clone())
                value = value[0] if isinstance(value, tuple) else value
                close = 1e-4 if wanted.dtype == value.dtype and wanted.element_size() == 4 else 2e-2
                if (value - wanted).abs().max() <= close * wanted.abs().max():
                    matches.append(name)
        return matches[0] if len(matches) == 1 else "unknown"

    def states(self, habit: str) -> list[Any]:
        """The states of all layers."""
        found = []
        for index in sorted(self.layers):
            hidden, residual = self.layers[index]
            found.append(hidden if habit == "hidden" or residual is None else hidden + residual)
        return found


# --------------------------------------------------------------------------- one architecture


def run(architecture: str, folder: Path) -> dict[str, Any]:
    """Build, extract, check."""
    import models_configs
    import torch

    try:
        made = models_configs.plan(architecture)
    except models_configs.NoPlan as error:
        return {"status": "not built", "reason": str(error)}
    models_configs.write(folder, made)
    import tiny_models

    tiny_models.write_tokenizer(folder)
    add_tokens(folder, made.tokens)
    if architecture.startswith("KimiK25"):
        tiny_models.write_kimi_image_processor(folder)
    result: dict[str, Any] = {"config": made.note, **facts(folder)}
    os.environ.update(made.env)
    if made.lengths:
        LENGTHS[:] = result["lengths"] = made.lengths
    for aid in made.aids:
        AIDS[aid]()
        result["aid"] = AIDS[aid].__doc__
    layers = result.pop("layers")
    args: dict[str, Any] = {**EXACT, **text_only(), **made.args}
    reference: list[list[Any]] | None = None
    allowed = TOLERANCE
    if (made.transformers or made.twin) and result["layers_expected"]:
        try:
            reference, allowed = transformers_states(folder, made, layers)
        except Exception as error:
            result["no_transformers"] = short(error)
    if reference is None:
        draw_dummy_weights()
        args["load_format"] = "dummy"
        for stale in folder.glob("*.safetensors*"):
            stale.unlink()
    else:
        load_text_only()
        if made.twin:
            result["twin"] = made.twin
    result["weights"] = "dummy" if reference is None else "transformers"
    try:
        result.update(extract(folder, layers, args, reference, allowed))
    except Exception as error:
        if reference is None:
            raise
        # vLLM does not take the weights as transformers saved them: then its own dummy weights.
        result["no_transformers"] = "extraction with its weights: " + short(error)
        raise Retry(result) from error
    if result["status"] == "differs" and made.differs:
        result["reason"] += ": " + made.differs
    torch.set_num_threads(1)
    return result


def add_tokens(folder: Path, tokens: list[str]) -> None:
    """Special tokens, in place of spare ones."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for index, token in enumerate(tokens):
        vocabulary[token] = number = vocabulary.pop(f"<spare{index}>")
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": token, **flags, "special": True})
    file.write_text(json.dumps(tokenizer))


class Retry(Exception):
    """To be run again without transformers' weights."""


def extract(
    folder: Path, layers: int, args: dict[str, Any], reference: list[list[Any]] | None, allowed: float
) -> dict[str, Any]:
    """Extract all layers with the plugin's generator and compare."""
    import torch
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    import speculators_compat

    speculators_compat.configure(vllm_args=args)
    generator = VllmHiddenStatesGenerator(
        str(folder),
        layer_ids=list(range(layers)),
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=0.3,
        tensor_parallel_size=1,
    )
    report = generator.session.report
    executor = generator.llm.llm_engine.engine_core.engine_core.model_executor
    runner = executor.driver_worker.worker.model_runner
    model = runner.get_model()
    result: dict[str, Any] = {
        "class": report["model"],
        "path": report["path"],
        "native": report["native"],
        "layers": report["num_layers"],
    }
    if args["dtype"] != "float32":
        result["dtype"] = args["dtype"]
        if reference is not None:
            result["allowed"] = float(f"{allowed:.2e}")
    if NO_TOWER:
        result["without_tower"] = NO_TOWER[0]
    second = Second(model, report["path"])
    together = generator.generate(prompts())
    error, differs = 0.0, layers
    habit = ""
    for index, prompt in enumerate(prompts()):
        second.layers.clear()
        (alone,) = generator.generate([prompt])
        habit = habit or second.habit()
        others = second.states(habit)
        for k, state in enumerate(alone["hidden_states"]):
            if tuple(state.shape) != (len(prompt), runner.model_config.get_hidden_size()):
                return {**result, "status": "failed", "reason": f"layer {k}: shape {tuple(state.shape)}"}
            if not torch.isfinite(state).all() or not state.any():
                return {**result, "status": "failed", "reason": f"layer {k}: not finite, or all zero"}
            if habit != "unknown" and not torch.equal(state, others[k][: len(prompt)]):
                return {**result, "status": "failed", "reason": f"layer {k}: the second capture differs"}
            batched = together[index]["hidden_states"][k]
            if (batched - state).abs().max() > 1e-3 * state.abs().max():
                return {**result, "status": "failed", "reason": f"layer {k}: another state in a batch"}
            if reference is not None:
                here = distance(state, reference[index][k])
                error = max(error, here)
                if not here <= allowed:
                    differs = min(differs, k)
    result["residual"] = habit
    with contextlib.suppress(Exception):
        proof = generator.session.alignment.to_dict()
        result["aligned"] = proof["proved"]
        if proof["not_proved"]:
            result["not_aligned"] = next(iter(proof["not_proved"]))
    if reference is not None:
        result["error"] = float(f"{error:.2e}")
        if not error <= allowed:
            return {**result, "status": "differs", "reason": f"{error:.2e} from transformers, from layer {differs} on"}
    elif habit == "unknown":
        return {**result, "status": "unproved", "reason": "no final norm tells what the residual stream is"}
    return {**result, "status": "passed"}


def facts(folder: Path) -> dict[str, Any]:
    """The family by the config alone, as compat-check names it."""
    from vllm.config import ModelConfig

    from speculators_compat.doctor.facts import ModelFacts

    found = ModelFacts(json.loads((folder / "config.json").read_text()))
    family = [w.split(" ", 1)[1] if w.endswith("experts") else w for w in found.traits]
    config = ModelConfig(str(folder), trust_remote_code=True, dtype="float32", max_model_len=MAX_MODEL_LEN)
    layers = int(config.get_total_num_hidden_layers())
    return {"family": family or ["dense"], "layers_expected": layers, "layers": layers}


def plain(folder: Path) -> str:
    """Why vLLM itself cannot run the model here, without the plugin; empty if it can."""
    import speculators_compat

    speculators_compat.deactivate()
    draw_dummy_weights()
    import models_configs
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry

    made = models_configs.plan(folder.name)
    os.environ.update(made.env)
    LENGTHS[:] = made.lengths or LENGTHS
    for aid in made.aids:
        AIDS[aid]()
    try:
        llm = LLM(
            str(folder),
            load_format="dummy",
            max_model_len=MAX_MODEL_LEN,
            trust_remote_code=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            **{**EXACT, **text_only(), **made.args},
        )
        for batch in [prompts(), *([prompt] for prompt in prompts())]:
            llm.generate(
                [{"prompt_token_ids": p} for p in batch], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False
            )
    except BaseException as error:
        if "failed to be inspected" in str(error):  # vLLM only logs why
            try:
                module, name = registry._VLLM_MODELS[folder.name][:2]
                where = module if "." in module else f"vllm.model_executor.models.{module}"
                registry._LazyRegisteredModel(where, name).load_model_cls()
            except Exception as cause:
                return short(cause)
        return short(error)
    return ""


#: What vLLM says to a tiny config that lacks something, or to towers that are left out: a gap of this file's.
INCOMPLETE = re.compile(
    r"'\w*(Config|Inner)' object has no attribute|StrictDataclass\w*Error|'NoneType'|has no attribute 'model'"
    r"|AssertionError:  \((mrope|mistral3)|inputs_embeds is required"
)


# --------------------------------------------------------------------------- processes


def short(error: BaseException) -> str:
    """One line that says what was raised, and where."""
    found = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(found[-1].filename).name}:{found[-1].lineno})" if found else ""
    text = " ".join(str(error).split())
    if type(error).__name__ == "CompatError":
        return text[:400]
    return f"{type(error).__name__}: {text[:300]}{place}"


def in_a_process(function: Any, arguments: tuple[Any, ...], log: Path, limit: float) -> dict[str, Any]:
    """Fork, call ``function`` there and return what it returned; ``failed`` with the reason if it did not."""
    answer = log.with_suffix(".json")
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.dump_traceback_later(limit - 5)  # where it hangs
        try:
            found = function(*arguments)
        except Retry as again:
            found = {**again.args[0], "status": "retry"}
        except BaseException as error:
            traceback.print_exc()
            refused = type(error).__name__ == "CompatError"
            found = {"status": "refused" if refused else "failed", "reason": short(error)}
            if NO_TOWER:
                found["without_tower"] = NO_TOWER[0]
        sys.stderr.flush()
        answer.with_suffix(".part").write_text(json.dumps(found))
        answer.with_suffix(".part").rename(answer)
        os._exit(0)
    deadline = time.monotonic() + limit
    status = 0
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
        return {"status": "failed", "reason": f"still running after {limit:.0f} s"}
    if answer.exists():
        return dict(json.loads(answer.read_text()))
    return {"status": "failed", "reason": f"the process died (wait status {status})"}


def without_transformers(architecture: str, folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    """The same with vLLM's own dummy weights."""
    import models_configs

    given = models_configs.plan

    def changed(name: str) -> Any:
        made = given(name)
        made.transformers = made.twin = ""
        return made

    models_configs.plan = changed
    return {**run(architecture, folder), "no_transformers": before.get("no_transformers", "")}


def one(architecture: str, scratch: Path, limit: float) -> dict[str, Any]:
    """Everything about one architecture."""
    folder, log = scratch / architecture, scratch / f"{architecture}.log"
    log.unlink(missing_ok=True)
    began = time.monotonic()
    for _ in range(10):
        found = in_a_process(run, (architecture, folder), log, limit)
        if "Available memory on node" not in str(found):
            break
        time.sleep(20)  # the machine's other work has it
    if found["status"] == "retry":
        found = in_a_process(without_transformers, (architecture, folder, found), log, limit)
    if found["status"] == "failed":
        why = in_a_process(lambda: {"status": "", "reason": plain(folder)}, (), log, limit)
        if why["reason"]:
            found = {**found, "status": "vllm cannot", "reason": why["reason"]}
    if found["status"] == "vllm cannot" and INCOMPLETE.search(found["reason"]):
        found = {**found, "status": "not built", "reason": f"its tiny config is incomplete: {found['reason']}"}
    if found["status"] in ("not built", "vllm cannot") and (reason := platforms(architecture)):
        found = {**found, "status": "vllm cannot", "reason": f"{reason}: {found['reason']}"}
    found["seconds"] = round(time.monotonic() - began, 1)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return found


def platforms(architecture: str) -> str:
    """Says so where vLLM has an architecture for other platforms than CPUs only."""
    from vllm.model_executor.models import registry

    where = getattr(registry, "_VLLM_MODELS", {}).get(architecture, ("",))[0]
    folder = Path(registry.__file__).parents[3] / where.replace(".", "/")
    if not where.startswith("vllm.models.") or (folder / "cpu").is_dir():
        return ""
    others = sorted({"amd", "nvidia", "xpu"} & {path.name for path in folder.iterdir()})
    return f"vLLM has it for {' and '.join(others)} only" if others else ""


def text_only() -> dict[str, Any]:
    """Arguments, and a change to vLLM, that leave out a multimodal model's other towers and their processors."""
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal.registry import MultiModalRegistry

    MultiModalRegistry.supports_multimodal_inputs = lambda self, model_config: False
    leave_towers_out()
    if "language_model_only" in {field.name for field in dataclasses.fields(EngineArgs)}:
        return {"language_model_only": True}
    return {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}}


#: Why a tower could not even be outlined from the tiny config.
NO_TOWER: list[str] = []


def leave_towers_out() -> None:
    """vLLM outlines a tower that is left out, from a config that the tiny models may lack: then without outlines."""
    from vllm.model_executor.models.interfaces import SupportsMultiModal

    original = getattr(SupportsMultiModal, "_mark_tower_model", None)

    @contextlib.contextmanager
    def mark(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_modules" not in vars(self):  # the whole model is made inside
            with original(self, *args, **kwargs):
                yield
            return
        before = set(self._modules)
        try:
            with original(self, *args, **kwargs):
                yield
        except Exception as error:
            NO_TOWER.append(short(error))
            for name in set(self._modules) - before:
                del self._modules[name]

    if original is not None:
        SupportsMultiModal._mark_tower_model = mark


def load_text_only() -> None:
    """The other towers of a multimodal model have no weights here; vLLM's loader insists on them too."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from speculators_compat.patches.layer_navigation import OTHER_TOWERS

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        wanted = {name for name, _ in model.named_parameters() if not OTHER_TOWERS & set(name.split("."))}
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        missing = sorted(name for name in wanted - set(loaded or wanted) if "layers." in name or ".h." in name)
        if missing:
            raise ValueError(f"weights that transformers has not: {', '.join(missing)}")

    DefaultModelLoader.load_weights = load_weights


def aid_router() -> None:
    """The CPU build's router knows sigmoid scores and correction biases only in groups: one group is the same."""
    with contextlib.suppress(ImportError):
        from vllm.model_executor.layers.fused_moe.router import cpu_router

        original = cpu_router.CPURouter._compute_routing

        def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
            odd = self.scoring_func == "sigmoid" or self.e_score_correction_bias is not None
            if odd and not self.use_grouped_topk and self.custom_routing_function is None:
                self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
            return original(self, *args, **kwargs)

        cpu_router.CPURouter._compute_routing = compute
    with contextlib.suppress(ImportError, AttributeError):  # earlier releases
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe

        select_experts = cpu_fused_moe.select_experts

        def select(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(select_experts).bind(*args, **kwargs)
            given.apply_defaults()
            values = given.arguments
            odd = values["scoring_func"] == "sigmoid" or values["e_score_correction_bias"] is not None
            if odd and not values["use_grouped_topk"] and values["custom_routing_function"] is None:
                values.update(use_grouped_topk=True, num_expert_group=1, topk_group=1)
            return select_experts(**values)

        cpu_fused_moe.select_experts = select


def aid_kernels() -> None:
    """vLLM looks for its kernels in every module that is imported, and stumbles over llvmlite's."""
    with contextlib.suppress(ImportError):
        from vllm.triton_utils import dispatcher

        original = dispatcher._rebind_kernels

        def rebind(kernels: Any) -> None:
            hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
            try:
                original(kernels)
            finally:
                sys.modules.update(hidden)

        dispatcher._rebind_kernels = rebind


#: What stands in for parts that vLLM's CPU build lacks or has wrong, by name in ``models_special.json``.
AIDS = {"kernels": aid_kernels, "router": aid_router}


def inspect_here() -> None:
    """vLLM looks at a model's class in a process of its own, which imports everything again; this one will do."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def import_everything() -> None:
    """What takes long to import, and is the same for all."""
    import importlib

    import speculators_compat  # noqa: F401

    importlib.import_module("speculators.data_generation.vllm_hidden_states_generator")
    for name in (
        "vllm",
        "vllm.entrypoints.llm",
        "vllm.v1.engine.core",
        "vllm.v1.engine.core_client",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.deepseek_v2",
        "vllm.model_executor.model_loader.default_loader",
        "vllm.model_executor.model_loader.dummy_loader",
        "transformers.modeling_utils",
        "transformers.models.llama.modeling_llama",
        "torch._dynamo",
    ):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


#: vLLM's tables of architectures; the last is of those that it runs through transformers' own code.
GROUPS = {
    "text": "_TEXT_GENERATION_MODELS",
    "multimodal": "_MULTIMODAL_MODELS",
    "through transformers": "_TRANSFORMERS_SUPPORTED_MODELS",
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "SPECULATORS_COMPAT_WAY": "engine",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_MLA_DISABLE": "1",  # most CPU builds have no MLA kernel
    "VLLM_NO_USAGE_STATS": "1",
}


def main(path: str) -> None:
    """Do what the request says; see the top."""
    os.environ.update(ENVIRONMENT)
    request = json.loads(Path(path).read_text())
    scratch = Path(request["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(TOOLS), str(TOOLS.parent / "examples")]
    import_everything()
    inspect_here()
    if request.get("list"):
        from vllm.model_executor.models import registry

        names = {
            group: {name: list(where)[:2] for name, where in getattr(registry, table, {}).items()}
            for group, table in GROUPS.items()
        }
        Path(request["answer"]).write_text(json.dumps(names))
        return
    answers: dict[str, Any] = {}
    for architecture in request["architectures"]:
        answers[architecture] = one(architecture, scratch, request["limit"])
        print(architecture, json.dumps(answers[architecture]), flush=True)
        partial = Path(request["answer"] + ".part")
        partial.write_text(json.dumps(answers))
        partial.rename(request["answer"])


if __name__ == "__main__":
    main(sys.argv[1])
