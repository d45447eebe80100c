"""Runs in a vLLM environment, the engine in this very process: plants silent faults under a real engine.

    python trust_runner.py MODEL ANSWER.json

Also compares schedules that compute prompts in pieces or anew with a plain one.
"""

import speculators_compat  # isort: skip

import json
import random
import sys
from pathlib import Path

EXACT = {"dtype": "float32", "compilation_config": {"custom_ops": ["none"]}}
LAYERS = [3, 1, 5]


def prompts():
    draw = random.Random(5)
    return [[draw.randrange(8, 500) for _ in range(draw.randrange(20, 120))] for _ in range(12)]


def make(model, final_norm=None, **vllm_args):
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    speculators_compat.configure(vllm_args={**EXACT, **vllm_args}, final_norm=final_norm)
    return VllmHiddenStatesGenerator(
        str(model), layer_ids=LAYERS, max_model_len=256, gpu_memory_utilization=0.3
    )


def worker_of(generator):
    """The worker, in this process."""
    return generator.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def states(generator, asked=None):
    return [result["hidden_states"] for result in generator.generate(asked or prompts())]


def differ(some, others):
    """The largest relative difference."""
    return max(
        ((a - b).abs().max() / b.abs().max()).item()
        for one, other in zip(some, others, strict=True)
        for a, b in zip(one, other, strict=True)
    )


class Planted:
    """Replaces an attribute for a while."""

    def __init__(self, owner, name, value):
        self.owner, self.name, self.value = owner, name, value

    def __enter__(self):
        self.had = self.name in vars(self.owner)
        self.former = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.value)

    def __exit__(self, *_):
        if self.had:
            setattr(self.owner, self.name, self.former)
        else:
            delattr(self.owner, self.name)


def plants(generator):
    """Name to the context managers that plant a fault."""
    import torch

    from speculators_compat import capture, residual
    from speculators_compat.extraction import Session

    worker = worker_of(generator)
    caught = worker._speculators_compat_capture
    runner = worker.model_runner
    layers = runner.get_model().model.layers
    collect, layout, begin = Session.collect, capture.Capture._layout, capture.Capture._begin

    def other_order(self, step):
        class Batch:
            req_ids = list(reversed([id for id in runner.input_batch.req_ids if id in step.scheduled]))

        real = self._runner
        self._runner = type("Runner", (), {"input_batch": Batch, "input_ids": real.input_ids})()
        try:
            return layout(self, step)
        finally:
            self._runner = real

    kept = {}

    def sorted_as_text(self, id):
        kept[id] = collect(self, id)
        return kept[sorted(kept)[0]]

    def neighbours(self, scheduled):
        begin(self, scheduled)
        for request in self._requests.values():
            request.prompt[:] = [token + 1 for token in request.prompt]

    def shifted(self, id):
        return [state.roll(1, 0) for state in collect(self, id)]

    def poison(value):
        def hook(module, args, output):
            output[0][-1, 7] = value
            return output

        return Hook(layers[2], hook)

    def zero(module, args, output):
        return tuple(torch.zeros_like(part) for part in output)

    earlier = Hooked(caught, layers, lambda k: layers[k - 1])
    normed = Hooked(caught, layers, lambda k: layers[k], runner.get_model().model.norm)
    return {
        "order of the batch": [Planted(capture.Capture, "_layout", other_order)],
        "order of the batch, unseen by token ids": [
            Planted(capture.Capture, "_layout", other_order),
            Planted(capture, "_check_tokens", lambda *_: None),
        ],
        "results sorted as text": [Planted(Session, "collect", sorted_as_text)],
        "a neighbour's tokens": [Planted(capture.Capture, "_begin", neighbours)],
        "positions shifted": [Planted(Session, "collect", shifted)],
        "another layer": [earlier],
        "after the norm instead of before": [normed],
        "the residual left out": [
            Planted(residual, "left_layer", lambda layer, output: (output[0], None)),
            Planted(capture, "left_layer", lambda layer, output: (output[0], None)),
        ],
        "NaN": [poison(float("nan"))],
        "infinity": [poison(float("inf"))],
        "all zeros": [Hook(layers[3], zero)],
        "hooks skipped": [Planted(type(layers[1]), "__call__", lambda self, *a, **k: self.forward(*a, **k))],
    }


class Hook:
    """A forward hook for a while, before the others."""

    def __init__(self, module, hook):
        self.module, self.hook = module, hook

    def __enter__(self):
        self.handle = self.module.register_forward_hook(self.hook, prepend=True)

    def __exit__(self, *_):
        self.handle.remove()


class Hooked:
    """Capture's hooks on other modules for a while."""

    def __init__(self, capture, layers, module_of, norm=None):
        self.capture, self.layers, self.module_of, self.norm = capture, layers, module_of, norm

    def __enter__(self):
        for handle in self.capture._handles:
            handle.remove()
        self._hook(self.module_of, self.norm)

    def __exit__(self, *_):
        for handle in self.capture._handles:
            handle.remove()
        self._hook(lambda k: self.layers[k], None)

    def _hook(self, module_of, norm):
        last = len(self.layers) - 1
        self.capture._handles = [
            (norm if norm is not None and k == last else module_of(k)).register_forward_hook(
                self.capture._hook(i, k, normed=norm is not None and k == last)
            )
            for i, k in enumerate(self.capture._ids)
        ]


def planted(model):
    from contextlib import ExitStack

    from speculators_compat.alignment import Report

    generator = make(model)
    sound = states(generator)
    answer = {"proved": generator.session.alignment.to_dict(), "faults": {}, "afterwards": 0.0}
    for name, contexts in plants(generator).items():
        generator.session.alignment = Report()
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            try:
                generator.generate(prompts())
                answer["faults"][name] = {"id": None, "text": str(generator.session.alignment.to_dict())}
            except Exception as error:
                answer["faults"][name] = {"id": getattr(error, "id", None), "text": f"{type(error).__name__}: {error}"}
        if not hasattr(generator, "session"):
            generator = make(model)
        answer["afterwards"] = max(answer["afterwards"], differ(states(generator), sound))
    generator.shutdown()
    return answer, sound


def schedules(model, sound):
    """The same prompts under schedules that cut them in pieces, or throw away what was computed."""
    from vllm.v1.core.sched.scheduler import Scheduler

    answer = {}
    preempted = []
    real = Scheduler._preempt_request

    def preempt(self, request, *args, **kwargs):
        preempted.append(request.request_id)
        return real(self, request, *args, **kwargs)

    cases = {
        "chunked prefill": {"max_num_batched_tokens": 32, "enable_chunked_prefill": True},
        "preemption": {
            "num_gpu_blocks_override": 20,
            "block_size": 16,
            "max_num_batched_tokens": 64,
            "long_prefill_token_threshold": 16,
        },
        "one at a time": {"max_num_seqs": 1},
    }
    for name, arguments in cases.items():
        del preempted[:]
        generator = make(model, **arguments)
        with Planted(Scheduler, "_preempt_request", preempt):
            error = differ(states(generator), sound)
        answer[name] = {
            "error": error,
            "proved": generator.session.alignment.to_dict(),
            "preempted": len(preempted),
        }
        generator.shutdown()
    return answer


def caching(model):
    """Prefix caching is refused; where the refusal is circumvented, the missing states are noticed."""
    from speculators_compat.patches import engine

    answer = {}
    try:
        make(model, enable_prefix_caching=True)
    except Exception as error:
        answer["refused"] = getattr(error, "id", None)
    with Planted(engine, "check_prefix_caching", lambda _: None):
        generator = make(model, enable_prefix_caching=True, block_size=16)
    same = prompts()[0] * 2
    generator.generate([same])
    try:
        generator.generate([same])
    except Exception as error:
        answer["circumvented"] = getattr(error, "id", None)
    generator.shutdown()
    return answer


def normed(model):
    """The last layer after the final norm, on request."""
    import torch
    from safetensors.torch import load_file

    generator = make(model)
    before = states(generator)
    generator.shutdown()
    generator = make(model, final_norm=True)
    after = states(generator)
    report = generator.session.alignment.to_dict()
    generator.shutdown()
    weight = load_file(Path(model) / "model.safetensors")["model.norm.weight"]
    error = 0.0
    for one, other in zip(before, after, strict=True):
        wanted = one[2] * torch.rsqrt(one[2].pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        error = max(error, ((other[2] - wanted).abs().max() / wanted.abs().max()).item())
        assert differ([one[:2]], [other[:2]]) < 1e-5
    return {"error": error, "proved": report}


def main(model, answer_path):
    answer = {}
    answer["planted"], sound = planted(model)
    Path(answer_path).write_text(json.dumps(answer, indent=1))
    answer["schedules"] = schedules(model, sound)
    answer["caching"] = caching(model)
    answer["normed"] = normed(model)
    Path(answer_path).write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
