"""What both ways of driving vLLM have in common: capture set-up, fetching states, assembling results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .errors import CompatError
from .handover import Depot

log = logging.getLogger("speculators_compat")
#: Calls a method of every worker and returns their replies, rank 0 first.
RPC = Callable[..., list[Any]]


class Session:
    """One generator's captured states, from the workers to the results.

    Args:
        rpc: vLLM's ``collective_rpc``.
        layer_ids: in the order in which results hold them; duplicates are honoured.

    Attributes:
        report: what the workers found, see :meth:`HiddenStatesExtension.speculators_compat_setup`.
    """

    def __init__(self, rpc: RPC, layer_ids: list[int]) -> None:
        self._rpc = rpc
        self._rows = [sorted(set(layer_ids)).index(k) for k in layer_ids]
        self._depot = Depot()
        try:
            replies = rpc("speculators_compat_setup", args=(list(layer_ids), str(self._depot.path)))
            for reply in replies:
                if "error" in reply:
                    raise CompatError.from_dict(reply["error"])
        except BaseException:
            self.close()
            raise
        self.report: dict[str, Any] = replies[0]
        log.info("capturing at %(model)s.%(path)s, %(num_layers)d layers", self.report)

    def expect(self, ids: list[str]) -> None:
        """These requests are about to be added to vLLM."""
        self._depot.expect(ids)

    def collect(self, id: str) -> list[Any]:
        """States of a request that vLLM finished: for each layer id a CPU tensor of shape (tokens, hidden size)."""
        return self._depot.collect(id, self._rows)

    def reset(self) -> None:
        """Forget requests that will not be collected."""
        self._rpc("speculators_compat_reset")
        self._depot.forget()

    def close(self) -> None:
        """Remove what is left in shared memory."""
        self._depot.close()


def results(prompts: list[list[int]], states: list[list[Any]]) -> list[dict[str, Any]]:
    """What ``generate()`` returns: as speculators' own results, in the order of the prompts."""
    import torch

    return [
        {"input_ids": torch.as_tensor(prompt, dtype=torch.long), "hidden_states": layers, "loss_mask": None}
        for prompt, layers in zip(prompts, states, strict=True)
    ]


def not_ours() -> CompatError:
    """The error for a generator that has no session."""
    return CompatError(
        "SC509",
        found="a generator without capture: it was made before speculators_compat was activated, or was shut down",
        expected="a generator made while speculators_compat is active",
        why="the released capture can return states of other prompts",
        mend="import speculators_compat first, then make the generator again",
    )
