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

from collections.abc import Iterable
from typing import Any

from speculators_compat.adapter import GENERATOR_MODULE, Adapter, Context, Probe, State
from speculators_compat.errors import CompatError
from speculators_compat.extraction import Session
from speculators_compat.generator import CLASS, Driver, install
from speculators_compat.hookspecs import hookimpl
from speculators_compat.surface import Surface


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
        module = context.module

        def setup_capture(self: Any) -> None:
            self.driver = _Loop(self, module)
            self.session = Session(self.executor.collective_rpc, self.layer_ids)

        install(context, self.id)
        context.journal.replace(getattr(module, CLASS), "_setup_capture", setup_capture, adapter=self.id)


class _Loop(Driver):
    """Steps the generator's own scheduler and executor."""

    def __init__(self, generator: Any, module: Any) -> None:
        # Attributes are read when they are used: the scheduler is made after capture is set up.
        self._attributes = generator.__dict__
        self._module = module

    def add(self, id: str, prompt: list[int]) -> None:
        own = self._attributes
        # Only what this speculators passes itself: 0.3 has no block hasher, and needs none without prefix caching.
        hasher = {"block_hasher": own["block_hasher"]} if "block_hasher" in own else {}
        own["scheduler"].add_request(
            self._module.Request(
                request_id=id,
                prompt_token_ids=prompt,
                sampling_params=self._module.SamplingParams(max_tokens=1, temperature=0.0),
                pooling_params=None,
                eos_token_id=own["tokenizer"].eos_token_id,
                arrival_time=0.0,
                **hasher,
            )
        )

    def step(self) -> dict[str, int | None]:
        scheduled = self._attributes["scheduler"].schedule()
        if not scheduled.total_num_scheduled_tokens:
            raise CompatError(
                "SC510",
                found="vLLM's scheduler schedules nothing although prompts are waiting",
                expected="at least one token a step",
                why="the call would never end",
                mend="raise gpu_memory_utilization (or VLLM_CPU_KVCACHE_SPACE): the KV cache may be too small for one "
                "prompt",
            )
        return self._execute(scheduled)

    def flush(self) -> None:
        self._execute(self._attributes["scheduler"].schedule())

    def abort(self, ids: Iterable[str]) -> None:
        self._attributes["scheduler"].finish_requests(list(ids), self._module.RequestStatus.FINISHED_ABORTED)

    def end(self) -> None:
        self._attributes["executor"].shutdown()

    def _execute(self, scheduled: Any) -> dict[str, int | None]:
        executor = self._attributes["executor"]
        output = executor.execute_model(scheduled)
        if output is None:  # sampling is a step of its own since vLLM 0.11.1
            output = executor.sample_tokens(None)
        updates = self._attributes["scheduler"].update_from_output(scheduled, output)
        finished = [out for engine in updates.values() for out in engine.outputs if out.finish_reason is not None]
        return {out.request_id: next(iter(out.new_token_ids), None) for out in finished}


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [Generation()]
