"""What both ways of driving vLLM have in common: capture set-up, fetching states, assembling results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from . import handover
from .errors import CompatError

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
        self._depot = handover.open_depot()
        try:
            replies = rpc("speculators_compat_setup", args=(list(layer_ids), str(self._depot)))
            for reply in replies:
                _raise(reply)
        except BaseException:
            self.close()
            raise
        self.report: dict[str, Any] = replies[0]
        log.info("capturing at %(model)s.%(path)s of %(num_layers)d layers", self.report)

    def collect(self, ids: list[str]) -> dict[str, list[Any]]:
        """States of finished requests.

        Returns:
            For each id a list of CPU tensors of shape (tokens, hidden size), one for each layer id.
        """
        reply = self._rpc("speculators_compat_take", args=(ids,))[0]
        _raise(reply)
        parcels = {id: handover.Parcel.from_list(values) for id, values in reply["parcels"].items()}
        return {id: handover.receive(parcel, self._rows) for id, parcel in parcels.items()}

    def reset(self) -> None:
        """Forget requests that will not be collected, and remove their states."""
        self._rpc("speculators_compat_reset")
        handover.empty_depot(self._depot)

    def close(self) -> None:
        """Remove what is left in shared memory."""
        handover.close_depot(self._depot)


def _raise(reply: dict[str, Any]) -> None:
    if "error" in reply:
        raise CompatError.from_dict(reply["error"])


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
