"""The worker extension's name, for releases of speculators that have none, from 0.5.0 on.

Imported as ``speculators.data_generation.custom_worker``. The restored generator brings its own extension; this one is for
scripts that import the name, or have vLLM mix it into its workers. The private calls of 0.4 are refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

from speculators_compat.errors import CompatError
from speculators_compat.worker import HiddenStatesExtension

__all__ = ["HiddenStatesWorkerExtension"]


class HiddenStatesWorkerExtension(HiddenStatesExtension):
    """speculators_compat's worker extension under its old name.

    Raises:
        CompatError: SC308 from the methods by which speculators 0.4's generator talked to it.
    """

    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
        _refuse("_setup_hidden_states_capture")

    def _set_request_metadata(self, request_metadata: dict[str, int]) -> None:
        _refuse("_set_request_metadata")

    def _reset_capture(self) -> None:
        _refuse("_reset_capture")

    def _get_captured_states(self) -> dict[str, list[Any]] | None:
        _refuse("_get_captured_states")


def _refuse(method: str) -> NoReturn:
    raise CompatError(
        "SC308",
        found=f"a call of HiddenStatesWorkerExtension.{method}, which speculators 0.5.0 removed",
        expected="VllmHiddenStatesGenerator.generate()",
        why="the released capture could return states of other prompts, so it is not restored",
        mend="use VllmHiddenStatesGenerator, or pip install --no-deps speculators==0.4.0.1",
    )
