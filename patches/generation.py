"""Generation: the generator's loop, its results, and what happens when something fails.

What breaks, without any error: released 0.4 returns results sorted by the text of the request id (scrambled from 11
prompts on), never calls ``scheduler.update_from_output`` (so 33 prompts in one call never finish), and leaves finished
requests in the workers; 0.3 cuts the batch in the order the prompts were given although vLLM reorders it. Both capture
through a rewritten forward pass that many models do not fit, hand results back as pickles, lose the order of the
requested layers, and leave workers behind when the start fails.
Since: every vLLM; ``execute_model`` no longer samples by itself since 0.11.1.
How it is mended: ``generate`` is replaced by vLLM's own step - schedule, execute, sample, update - with the worker
extension capturing what leaves the decoder layers; results come in the order of the prompts, layers in the order asked
for. A failed start or step shuts the workers down, or leaves the generator usable.
Upstream: speculators/data_generation/vllm_hidden_states_generator.py.
Retire when: no supported speculators has the class.
"""

from __future__ import annotations

import inspect
from typing import Any

from speculators_compat import settings
from speculators_compat.adapter import GENERATOR_MODULE, Adapter, Context, Probe, State
from speculators_compat.alignment import Verdict
from speculators_compat.construction import Construction, constructing
from speculators_compat.errors import CompatError
from speculators_compat.extraction import Session, not_ours, results
from speculators_compat.hookspecs import hookimpl
from speculators_compat.prompts import check_model, check_prompts, placeholder_tokens
from speculators_compat.surface import Surface
from speculators_compat.watchdog import SHUTDOWN, Watchdog, clean_up, end_workers, starting, watching

CLASS = "VllmHiddenStatesGenerator"


class Generation(Adapter):
    id = "generation"
    seam = "the loop of VllmHiddenStatesGenerator.generate"
    why = "results come back in the wrong order, more than 32 prompts never finish, workers outlive a failed start"
    since = "every vLLM"
    how = "steps vLLM's scheduler and executor as its engine does; captures by forward hooks; orders results by prompt"
    upstream = "speculators/data_generation/vllm_hidden_states_generator.py"
    retire_when = "no supported speculators has the class"

    def probe(self, surface: Surface) -> Probe:
        scheduler = "vllm.v1.core.sched.scheduler:Scheduler"
        wanted = {
            f"{scheduler}.schedule": (),
            f"{scheduler}.update_from_output": ("scheduler_output", "model_runner_output"),
            f"{scheduler}.finish_requests": ("request_ids", "finished_status"),
            f"{scheduler}.add_request": ("request",),
        }
        for name, names in wanted.items():
            parameters = surface.parameters(name)
            if parameters is None:
                return Probe(State.DRIFTED, f"{name} no longer exists")
            if not set(names) <= set(parameters.names) or set(parameters.required) - set(names):
                return Probe(State.DRIFTED, f"{name} now takes {', '.join(parameters.names)}")
        for method in ("__init__", "generate", "_setup_capture", "_create_vllm_config"):
            if surface.parameters(f"{GENERATOR_MODULE}:{CLASS}.{method}") is None:
                return Probe(State.DRIFTED, f"{CLASS}.{method} no longer exists")
        return Probe(State.APPLIED, "replaces generate()")

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
                    wrapped(*args, **kwargs)
                except BaseException:
                    shutdown(instance)
                    raise

        def setup_capture(self: Any) -> None:
            self.session = Session(self.executor.collective_rpc, self.layer_ids)

        def generate(self: Any, token_ids: Any) -> list[dict[str, Any]]:
            with watching(self, settings.current().watchdog, "vLLM computes the first step") as dog:
                return _generate(self, module, token_ids, dog)

        generate.__doc__ = owner.generate.__doc__
        context.journal.wrap(owner, "__init__", init, adapter=self.id)
        for name, function in (("_setup_capture", setup_capture), ("generate", generate), ("shutdown", shutdown)):
            context.journal.replace(owner, name, function, adapter=self.id)


def shutdown(self: Any) -> None:
    """End the workers and free what they hold. Safe to call twice; the generator cannot be used afterwards."""
    executor, session = self.__dict__.pop("executor", None), self.__dict__.pop("session", None)
    try:
        if executor is not None:
            with watching(self, SHUTDOWN, "vLLM shuts down"):
                executor.shutdown()
    finally:
        end_workers(self)
        if session is not None:
            session.close()


def _generate(self: Any, module: Any, token_ids: Any, dog: Watchdog) -> list[dict[str, Any]]:
    session: Session | None = getattr(self, "session", None)
    if session is None:
        raise not_ours()
    config = self.vllm_config.model_config
    prompts = check_prompts(
        token_ids,
        vocab_size=config.get_vocab_size(),
        max_tokens=config.max_model_len - 1,
        placeholders=placeholder_tokens(config.hf_config),
    )
    ids = [f"req_{self._request_counter}_{index}" for index in range(len(prompts))]
    self._request_counter += 1
    # Only what this speculators passes itself: 0.3 has no block hasher, and needs none without prefix caching.
    hasher = {"block_hasher": self.block_hasher} if hasattr(self, "block_hasher") else {}
    states: dict[str, list[Any]] = {}
    verdicts: dict[str, Verdict] = {}
    session.expect(ids)
    try:
        for id, prompt in zip(ids, prompts, strict=True):
            self.scheduler.add_request(
                module.Request(
                    request_id=id,
                    prompt_token_ids=prompt,
                    sampling_params=module.SamplingParams(max_tokens=1, temperature=0.0),
                    pooling_params=None,
                    eos_token_id=self.tokenizer.eos_token_id,
                    arrival_time=0.0,
                    **hasher,
                )
            )
        while len(states) < len(ids):
            finished = _step(self)
            dog.beat(f"vLLM computes a step ({len(states)} of {len(ids)} prompts done)")
            for id, token in finished.items():
                states[id] = session.collect(id)
                verdicts[id] = session.prove(id, states[id], token)
        _step(self, flush=True)
    except BaseException:

        def abort() -> None:
            self.scheduler.finish_requests(ids, module.RequestStatus.FINISHED_ABORTED)
            session.reset()

        clean_up(self, dog, abort)
        raise
    return results(session, prompts, [states[id] for id in ids], [verdicts[id] for id in ids])


def _step(self: Any, *, flush: bool = False) -> dict[str, int | None]:
    """One step of vLLM's engine; returns the requests that it finished, with the token sampled for each.

    Args:
        flush: the step has nothing to compute, it only tells the workers which requests are over.
    """
    scheduled = self.scheduler.schedule()
    if not scheduled.total_num_scheduled_tokens and not flush:
        raise CompatError(
            "SC510",
            found="vLLM's scheduler schedules nothing although prompts are waiting",
            expected="at least one token a step",
            why="the call would never end",
            mend="raise gpu_memory_utilization (or VLLM_CPU_KVCACHE_SPACE): the KV cache may be too small for one prompt",
        )
    output = self.executor.execute_model(scheduled)
    if output is None:  # sampling is a step of its own since vLLM 0.11.1
        output = self.executor.sample_tokens(None)
    updates = self.scheduler.update_from_output(scheduled, output)
    finished = [out for engine in updates.values() for out in engine.outputs if out.finish_reason is not None]
    return {out.request_id: next(iter(out.new_token_ids), None) for out in finished}


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [Generation()]
