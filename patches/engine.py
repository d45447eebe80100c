"""Engine: ``VllmHiddenStatesGenerator`` on vLLM's public ``LLM`` engine.

What breaks: the generator builds vLLM's scheduler, executor and KV cache from private parts, which move from release to
release (0.17 Request, 0.24 model runner V2, 0.29 KV-cache layout, 0.33 KV-cache builder).
Since: vLLM 0.17.0.
How it is mended: the class keeps its constructor and ``generate``; behind them ``vllm.LLM`` does the work, and the worker
extension captures what leaves the decoder layers. Nothing private is called in the caller's process.
Upstream: https://docs.vllm.ai (``LLM``, ``LLMEngine.step``, ``collective_rpc``, ``worker_extension_cls``).
Retire when: speculators drives vLLM's public engine itself.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from speculators_compat.adapter import GENERATOR_MODULE, Adapter, Context, Probe, State
from speculators_compat.errors import InputError
from speculators_compat.extraction import Session
from speculators_compat.generator import CLASS, Driver, install
from speculators_compat.hookspecs import hookimpl
from speculators_compat.layer_ids import generator_defaults
from speculators_compat.prompts import check_layer_ids, check_parallelism, check_prefix_caching
from speculators_compat.surface import Surface
from speculators_compat.worker import EXTENSION

#: What the generator sets itself, as speculators does.
MAX_NUM_SEQS = 32
MIN_MAX_BATCHED_TOKENS = 8192
#: vLLM arguments that the constructor has a parameter for.
CONSTRUCTOR = {
    "model": "model_path",
    "max_model_len": "max_model_len",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_parallel_size",
}


class Engine(Adapter):
    id = "engine"
    seam = "VllmHiddenStatesGenerator's constructor and generate()"
    why = "the private parts of vLLM that the generator is built from moved or went; it dies, or returns wrong states"
    since = "vLLM 0.17.0"
    how = "keeps the class and drives vLLM's public LLM engine behind it, capturing through the worker extension"
    upstream = "vllm.LLM, LLMEngine.step, collective_rpc, worker_extension_cls"
    retire_when = "speculators drives vLLM's public engine itself"

    def probe(self, surface: Surface) -> Probe:
        wanted = {
            "vllm.entrypoints.llm:LLM": ("model",),
            "vllm.v1.engine.llm_engine:LLMEngine.add_request": ("request_id", "prompt", "params"),
            "vllm.v1.engine.llm_engine:LLMEngine.step": (),
            "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests": (),
            "vllm.v1.engine.llm_engine:LLMEngine.abort_request": ("request_ids",),
            "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": ("method",),
        }
        for name, names in wanted.items():
            parameters = surface.parameters(name)
            if parameters is None:
                return Probe(State.DRIFTED, f"{name} no longer exists")
            if parameters.unknown(names) or parameters.missing(names):
                return Probe(State.DRIFTED, f"{name} now takes {', '.join(parameters.names)}")
        arguments = surface.parameters("vllm.engine.arg_utils:EngineArgs")
        if arguments is None or arguments.unknown(["worker_extension_cls", "enforce_eager", "enable_prefix_caching"]):
            return Probe(State.DRIFTED, "EngineArgs no longer takes worker_extension_cls")
        if not surface.has(f"{GENERATOR_MODULE}:{CLASS}"):
            return Probe(State.DRIFTED, f"{CLASS} no longer exists")
        return Probe(State.APPLIED, "drives vllm.LLM")

    def apply(self, context: Context) -> None:
        install(context, self.id, _start)


def _start(self: Any, module: Any, arguments: dict[str, Any], vllm_args: dict[str, Any]) -> None:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.transformers_utils.config import get_hf_text_config

    self.model_path = arguments["model_path"]
    self.tensor_parallel_size = arguments["tensor_parallel_size"]
    self._request_counter = 0
    self.tokenizer = module.AutoTokenizer.from_pretrained(self.model_path)
    config = module.AutoConfig.from_pretrained(self.model_path, trust_remote_code=True)
    num_layers = get_hf_text_config(config).num_hidden_layers
    ids = arguments["layer_ids"]
    if ids is None:  # this speculators' own choice
        ids = generator_defaults(num_layers, boundaries=getattr(module, "RESTORED", False))
    self.layer_ids = check_layer_ids(ids, num_layers)
    budget = arguments.get("max_num_batched_tokens") or max(MIN_MAX_BATCHED_TOKENS, arguments["max_model_len"])
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    _check(vllm_args, known)
    engine_args: dict[str, Any] = {
        "trust_remote_code": True,
        "enforce_eager": True,
        # A token found in the prefix cache is not computed again, so its state cannot be captured.
        "enable_prefix_caching": False,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": budget,
        "disable_log_stats": True,
        # Prompts are tokens; profiling the vision encoder with its largest input would only cost memory.
        **({"skip_mm_profiling": True} if "skip_mm_profiling" in known else {}),
        **vllm_args,
        **{name: arguments[parameter] for name, parameter in CONSTRUCTOR.items()},
        "worker_extension_cls": EXTENSION,
    }
    self.llm = LLM(**engine_args)
    self.driver = _Engine(self.llm.llm_engine)
    self.vllm_config = self.llm.llm_engine.vllm_config
    self.session = Session(self.llm.llm_engine.collective_rpc, self.layer_ids)


def _check(vllm_args: dict[str, Any], known: set[str]) -> None:
    for argument in vllm_args:
        parameter = CONSTRUCTOR.get(argument)
        if parameter is None and argument in known and argument != "worker_extension_cls":
            continue
        near = difflib.get_close_matches(argument, sorted(known - CONSTRUCTOR.keys()), n=3)
        raise InputError(
            "SC403",
            found=f"vLLM argument {argument!r}",
            expected="one of this vLLM's engine arguments that the generator does not set itself",
            why="it would have no effect, or contradict the constructor",
            mend=f"pass {parameter}= to VllmHiddenStatesGenerator"
            if parameter
            else (f"did you mean {' or '.join(near)}?" if near else "leave it out"),
        )
    check_prefix_caching(vllm_args)
    check_parallelism(vllm_args)


class _Engine(Driver):
    """Steps vLLM's public engine."""

    def __init__(self, engine: Any) -> None:
        from vllm import SamplingParams

        self._engine = engine
        self._params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def add(self, id: str, prompt: list[int]) -> None:
        self._engine.add_request(id, {"prompt_token_ids": prompt}, self._params)

    def step(self) -> dict[str, int | None]:
        finished = [output for output in self._engine.step() if output.finished]
        return {output.request_id: next(iter(output.outputs[0].token_ids), None) for output in finished}

    def flush(self) -> None:
        """The engine tells its workers by itself."""

    def abort(self, ids: Iterable[str]) -> None:
        self._engine.abort_request(list(ids))

    def end(self) -> None:
        self._engine.engine_core.shutdown()


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [Engine()]
