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
import inspect
from typing import Any

from speculators_compat import settings
from speculators_compat.adapter import GENERATOR_MODULE, Adapter, Context, Probe, State
from speculators_compat.alignment import Verdict
from speculators_compat.construction import Construction, constructing
from speculators_compat.errors import InputError
from speculators_compat.extraction import Session, not_ours, results
from speculators_compat.hookspecs import hookimpl
from speculators_compat.prompts import (
    check_layer_ids,
    check_model,
    check_prefix_caching,
    check_prompts,
    placeholder_tokens,
)
from speculators_compat.surface import Surface
from speculators_compat.watchdog import SHUTDOWN, Watchdog, clean_up, end_workers, starting, watching
from speculators_compat.worker import EXTENSION

CLASS = "VllmHiddenStatesGenerator"
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
        owner, module = getattr(context.module, CLASS), context.module
        signature = inspect.signature(owner.__init__)

        def init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bound = signature.bind(instance, *args, **kwargs)
            bound.apply_defaults()
            vllm_args = settings.current().vllm_args
            check_model(str(bound.arguments["model_path"]), vllm_args.get("load_format"))
            construction = Construction(instance, dict(bound.arguments), vllm_args)
            watched = starting(instance, settings.current().watchdog)
            with watched, constructing(construction):
                try:
                    _start(instance, module, bound.arguments, vllm_args)
                except BaseException:
                    shutdown(instance)
                    raise

        def generate(self: Any, token_ids: Any) -> list[dict[str, Any]]:
            with watching(self, settings.current().watchdog, "vLLM computes the first step") as dog:
                return _generate(self, token_ids, dog)

        generate.__doc__ = owner.generate.__doc__
        context.journal.wrap(owner, "__init__", init, adapter=self.id)
        for name, function in (("generate", generate), ("shutdown", shutdown), ("__del__", shutdown)):
            context.journal.replace(owner, name, function, adapter=self.id)


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
    if ids is None:  # speculators' own choice
        ids = [2, num_layers // 2, num_layers - 3, num_layers - 1]
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
    if vllm_args.get("pipeline_parallel_size", 1) != 1:
        raise InputError(
            "SC404",
            found=f"pipeline_parallel_size={vllm_args['pipeline_parallel_size']}",
            expected="1",
            why="each pipeline rank sees its own decoder layers only; the others would be missing",
            mend="use tensor_parallel_size instead",
        )


def shutdown(self: Any) -> None:
    """End the engine and free what it holds. Safe to call twice; the generator cannot be used afterwards."""
    llm, session = self.__dict__.pop("llm", None), self.__dict__.pop("session", None)
    try:
        if llm is not None:
            with watching(self, SHUTDOWN, "vLLM shuts down"):
                llm.llm_engine.engine_core.shutdown()
    finally:
        end_workers(self)
        if session is not None:
            session.close()


def _generate(self: Any, token_ids: Any, dog: Watchdog) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    session: Session | None = getattr(self, "session", None)
    if session is None:
        raise not_ours()
    config, engine = self.vllm_config.model_config, self.llm.llm_engine
    prompts = check_prompts(
        token_ids,
        vocab_size=config.get_vocab_size(),
        max_tokens=config.max_model_len - 1,
        placeholders=placeholder_tokens(config.hf_config),
    )
    ids = [f"req_{self._request_counter}_{index}" for index in range(len(prompts))]
    self._request_counter += 1
    states: dict[str, list[Any]] = {}
    verdicts: dict[str, Verdict] = {}
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    session.expect(ids)
    try:
        for id, prompt in zip(ids, prompts, strict=True):
            engine.add_request(id, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            dog.beat(f"vLLM computes a step ({len(states)} of {len(ids)} prompts done)")
            for output in outputs:
                if output.finished:
                    id, token = output.request_id, next(iter(output.outputs[0].token_ids), None)
                    states[id] = session.collect(id)
                    verdicts[id] = session.prove(id, states[id], token)
    except BaseException:

        def abort() -> None:
            engine.abort_request([id for id in ids if id not in states])
            session.reset()

        clean_up(self, dog, abort)
        raise
    return results(session, prompts, [states[id] for id in ids], [verdicts[id] for id in ids])


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [Engine()]
