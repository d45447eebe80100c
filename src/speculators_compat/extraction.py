"""What both ways of driving vLLM have in common: capture set-up, fetching states, assembling results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from . import alignment, settings
from .errors import CompatError
from .handover import Depot, machine

log = logging.getLogger("speculators_compat")
#: Calls a method of every worker and returns their replies, rank 0 first.
RPC = Callable[..., list[Any]]
#: How long a proof may arrive after its request, in seconds. Without one the sample counts as not proved.
PATIENCE = 10.0


class UnprovedError(CompatError):
    """Samples of a call failed their proof.

    Attributes:
        failed: prompt index to what is wrong with its states.
        results: what ``generate()`` would have returned, with ``None`` for these prompts; for all of them where
            ``on_result`` was given.
    """

    failed: dict[int, str]
    results: list[dict[str, Any] | None]


class Session:
    """One generator's captured states, from the workers to the results.

    Args:
        rpc: vLLM's ``collective_rpc``.
        layer_ids: in the order in which results hold them; duplicates are honoured.

    Attributes:
        report: what the workers found, see :meth:`HiddenStatesExtension.speculators_compat_setup`.
        alignment: how many samples were proved, see :mod:`~speculators_compat.alignment`.
    """

    def __init__(self, rpc: RPC, layer_ids: list[int]) -> None:
        self._rpc = rpc
        self._ids = list(layer_ids)
        self._rows = [sorted(set(layer_ids)).index(k) for k in layer_ids]
        self.alignment = alignment.Report()
        self.final_norm = settings.current().final_norm
        # A logits processor may change which token is sampled.
        self._greedy = "logits_processors" not in settings.current().vllm_args
        self._depot = Depot()
        try:
            args = (self._ids, str(self._depot.path), self.final_norm, machine())
            replies = rpc("speculators_compat_setup", args=args)
            for reply in replies:
                if "error" in reply:
                    raise CompatError.from_dict(reply["error"])
        except BaseException:
            self.close()
            raise
        self.report: dict[str, Any] = replies[0]
        log.info("capturing at %(model)s.%(path)s, %(num_layers)d layers", self.report)
        last = int(self.report["num_layers"]) - 1
        self._last = self._ids.index(last) if last in self._ids else None
        self._unproved: str = self.report.get("unproved", "")
        if self._unproved:
            log.warning("samples cannot be proved to belong to their prompts: %s", self._unproved)

    def expect(self, ids: list[str]) -> None:
        """These requests are about to be added to vLLM."""
        self._depot.expect(ids)

    def collect(self, id: str) -> list[Any]:
        """States of a request that vLLM finished: for each layer id a CPU tensor of shape (tokens, hidden size)."""
        return self._depot.collect(id, self._rows)

    def prove(self, id: str, states: list[Any], token: int | None) -> alignment.Verdict:
        """Whether a request's states are its own.

        Args:
            states: what :meth:`collect` returned.
            token: what the engine sampled for the request.
        """
        verdict = alignment.Verdict(skipped=self._unproved)
        if not self._unproved:
            found = self._depot.proof(id, PATIENCE)
            if found is None:
                self._unproved = "the engine's logits could not be observed"
                log.warning("samples cannot be proved to belong to their prompts: %s", self._unproved)
                verdict = alignment.Verdict(skipped=self._unproved)
            else:
                row = None if self._last is None else alignment.checksum(states[self._last][-1])
                proof = alignment.Proof(**found)
                verdict = alignment.judge(proof, token=token if self._greedy else None, row=row)
                if verdict.skipped and not self.alignment.skipped[verdict.skipped]:
                    log.warning("samples cannot be proved to belong to their prompts: %s", verdict.skipped)
        self.alignment.count(verdict)
        return verdict

    def reset(self) -> None:
        """Forget requests that will not be collected."""
        self._rpc("speculators_compat_reset")
        self._depot.forget()

    def close(self) -> None:
        """Remove what is left in shared memory."""
        self._depot.close()


def input_ids(prompt: list[int]) -> Any:
    """A prompt as a long tensor of shape (tokens,)."""
    import torch

    return torch.tensor(prompt, dtype=torch.long)


def result(prompt: Any, layers: list[Any]) -> dict[str, Any]:
    """One prompt's result, in speculators' own form."""
    return {"input_ids": prompt, "hidden_states": layers, "loss_mask": None}


def results(
    session: Session,
    prompts: list[Any],
    states: list[list[Any]],
    verdicts: list[alignment.Verdict],
    *,
    kept: bool = True,
) -> list[dict[str, Any]]:
    """What ``generate()`` returns: as speculators' own results, in the order of the prompts.

    Args:
        prompts: as :func:`input_ids` makes them.
        kept: ``states`` holds them; otherwise each was handed on when it was proved.

    Raises:
        UnprovedError: SC515 naming the prompts whose states are not their own, SC516 if that happens all the time.
    """
    made = [result(prompt, layers) for prompt, layers in zip(prompts, states, strict=True)]
    failed = {index: verdict.fault for index, verdict in enumerate(verdicts) if verdict.fault}
    if not failed:
        return made
    cause = session.alignment.systematic()
    first = next(iter(failed))
    found = f"prompt {first}: {failed[first]}" + (f" (and {len(failed) - 1} more prompts)" if len(failed) > 1 else "")
    if cause:
        error = UnprovedError(
            "SC516",
            found=f"{found}; {sum(session.alignment.failed.values())} samples so far, {session.alignment.proved} proved",
            expected="final norm and LM head, applied to the captured state, give the engine's own token",
            why=f"likely cause: {alignment.CAUSES[cause]}; a draft model trained on such states is poor",
            mend="report the model and the versions that compat-check prints; "
            + ("nothing of this call was returned" if kept else "what on_result was given had been proved"),
        )
        error.results = [None] * len(made)
    else:
        error = UnprovedError(
            "SC515",
            found=found,
            expected="final norm and LM head, applied to the captured state, give the engine's own token",
            why="the states belong to another prompt, token or layer",
            mend="leave the prompt out, or run it again; the other prompts' states "
            + ("are in the error's .results" if kept else "were given to on_result"),
        )
        error.results = [None if not kept or index in failed else result for index, result in enumerate(made)]
    error.failed = failed
    raise error


def not_ours() -> CompatError:
    """The error for a generator that has no session."""
    return CompatError(
        "SC509",
        found="a generator without capture: it was made before speculators_compat was activated, or was shut down",
        expected="a generator made while speculators_compat is active",
        why="the released capture can return states of other prompts",
        mend="import speculators_compat first, then make the generator again",
    )
