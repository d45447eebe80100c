"""What both ways of driving vLLM share: the constructor's frame, ``generate()`` and ``shutdown()`` of the patched class."""

from __future__ import annotations

import inspect
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import layer_ids, settings
from .adapter import Context
from .alignment import Verdict
from .construction import Construction, constructing
from .errors import CompatWarning, InputError
from .extraction import Session, input_ids, not_ours, result, results
from .prompts import check_model, check_prompts, placeholder_tokens, text_only
from .watchdog import SHUTDOWN, clean_up, end_workers, starting, watching

CLASS = "VllmHiddenStatesGenerator"


class Driver(ABC):
    """How a generator has its prompts computed."""

    @abstractmethod
    def add(self, id: str, prompt: list[int]) -> None:
        """Queue a prompt for one greedy token."""

    @abstractmethod
    def step(self) -> dict[str, int | None]:
        """Compute one step; the requests it finished, with the token sampled for each."""

    @abstractmethod
    def flush(self) -> None:
        """All requests are finished; tell the workers."""

    @abstractmethod
    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests."""

    @abstractmethod
    def end(self) -> None:
        """End the workers."""


def install(context: Context, adapter: str, constructor: Callable[..., None] | None = None) -> None:
    """Put the shared methods on the generator's class.

    Args:
        constructor: called as ``constructor(generator, module, arguments, vllm_args)`` instead of speculators' own.
            Either must leave ``driver``, ``session`` and ``vllm_config`` on the generator.
    """
    owner, module = getattr(context.module, CLASS), context.module
    signature = inspect.signature(owner.__init__)

    def init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = signature.bind(instance, *args, **kwargs)
        bound.apply_defaults()
        _count_layers(bound.arguments, restored=getattr(module, "RESTORED", False), release=context.versions)
        vllm_args = settings.current().vllm_args
        check_model(str(bound.arguments["model_path"]), vllm_args.get("load_format"))
        construction = Construction(instance, dict(bound.arguments), vllm_args)
        with starting(instance, settings.current().watchdog), constructing(construction):
            try:
                if constructor is None:
                    wrapped(*bound.args[1:], **bound.kwargs)
                else:
                    constructor(instance, module, bound.arguments, vllm_args)
                instance.boundaries = [k + 1 for k in instance.layer_ids]
            except BaseException:
                shutdown(instance)
                raise

    context.journal.wrap(owner, "__init__", init, adapter=adapter)
    for name, function in (("generate", generate), ("shutdown", shutdown), ("__del__", collected)):
        context.journal.replace(owner, name, function, adapter=adapter)


def _count_layers(arguments: dict[str, Any], *, restored: bool, release: Mapping[str, str]) -> None:
    """Make the ids that a script gives after-layer ids, in place.

    Without a setting they are taken as the class has always taken them. A script that uses this class was written for
    0.3 or 0.4, where the last id is ``n - 1`` for the target's state; read as a boundary it would be the state one layer
    before, without any error. Taken this way, an id of the other convention that names the target's state, ``n``, does
    not exist and is refused. From 0.5 on a warning names the boundaries.
    """
    ids, convention = arguments["layer_ids"], settings.current().layer_convention
    if ids is None:
        return
    if not isinstance(ids, Iterable):
        raise InputError(
            "SC406",
            found=f"layer_ids={ids!r}",
            expected="a list of integers, or None",
            why="the layers would have to be guessed",
            mend=f"layer_ids=[{ids!r}]",
        )
    if convention == layer_ids.BOUNDARY:
        arguments["layer_ids"] = layer_ids.from_boundaries(list(ids))
    elif convention is None and restored and all(type(k) is int for k in ids):
        boundaries = [k + 1 for k in ids]
        warnings.warn(
            f"layer_ids={list(ids)} count the layers that are left, as this class always did: they are boundaries "
            f"{boundaries}, which speculators {release.get('speculators', '0.5 and later')} counts. Train with "
            f"--target-layer-ids {' '.join(map(str, boundaries[:-1]))}, if the last one is the target's state. "
            'configure(layer_convention="after-layer") or "boundary" chooses, and this warning goes.',
            CompatWarning,
            stacklevel=4,
        )


def generate(
    self: Any, token_ids: Any, *, on_result: Callable[[int, dict[str, Any]], object] | None = None
) -> list[dict[str, Any]]:
    """Extract hidden states of prompts.

    Args:
        token_ids: a list of lists of token ids, or a 2-D tensor. Prompts longer than ``max_model_len - 1`` are cut.
        on_result: called as ``on_result(index, result)`` as soon as a prompt's states are complete and verified, while
            the engine computes the others. Results are then not kept, and the list returned is empty.

    Returns:
        In the order of the prompts: ``input_ids``, a long tensor of shape (tokens,); ``hidden_states``, for each layer id
        a CPU tensor of shape (tokens, hidden size) in the model's dtype; ``loss_mask``, ``None``.

    Raises:
        CompatError: SC407 for a prompt that cannot be used; SC5xx if capture or proof failed.
    """
    session: Session | None = getattr(self, "session", None)
    if session is None:
        raise not_ours()
    driver: Driver = self.driver
    config = self.vllm_config.model_config
    placeholders = placeholder_tokens(config.hf_config)
    checked = check_prompts(
        text_only(token_ids, placeholders),
        vocab_size=config.get_vocab_size(),
        max_tokens=config.max_model_len - 1,
        placeholders=placeholders,
    )
    call, self._request_counter = self._request_counter, self._request_counter + 1
    prompts: list[Any] = []
    index: dict[str, int] = {}
    waiting: set[str] = set()
    with watching(self, settings.current().watchdog, "vLLM computes the first step") as dog:
        try:
            for i, prompt in enumerate(checked):
                id = f"req_{call}_{i}"
                session.expect([id])
                driver.add(id, prompt)
                index[id] = i
                waiting.add(id)
                prompts.append(prompt)
            # The engine computes already: the time that this takes is not lost.
            prompts = [input_ids(prompt) for prompt in prompts]
            states: list[list[Any]] = [[] for _ in prompts]
            verdicts: list[Verdict] = [Verdict() for _ in prompts]
            while waiting:
                finished = driver.step()
                dog.beat(f"vLLM computes a step ({len(index) - len(waiting)} of {len(index)} prompts done)")
                for id, token in finished.items():
                    i, layers = index[id], session.collect(id)
                    verdicts[i] = session.prove(id, layers, token)
                    if on_result is None:
                        states[i] = layers
                    elif not verdicts[i].fault:
                        on_result(i, result(prompts[i], layers))
                    waiting.discard(id)
            driver.flush()
        except BaseException:

            def abort() -> None:
                driver.abort(waiting)
                session.reset()

            clean_up(self, dog, abort)
            raise
    made = results(session, prompts, states, verdicts, kept=on_result is None)
    return made if on_result is None else []


def shutdown(self: Any) -> None:
    """End the workers and free what they hold. Safe to call twice; the generator cannot be used afterwards."""
    driver, session = self.__dict__.pop("driver", None), self.__dict__.pop("session", None)
    try:
        if driver is not None:
            with watching(self, SHUTDOWN, "vLLM shuts down", ending=True):
                driver.end()
    finally:
        end_workers(self)
        if session is not None:
            session.close()


def collected(self: Any, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    """The same when nobody holds the generator any more; at the interpreter's end vLLM has ended its processes itself, and
    the names used here may be gone."""
    if not finalizing():
        shutdown(self)
