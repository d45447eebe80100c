"""What runs inside vLLM's workers: the entry point vLLM calls, and the extension of its worker class."""

from __future__ import annotations

import os
from typing import Any

from .activation import MARKER, activate
from .errors import CompatError
from .settings import switched_off

EXTENSION = "speculators_compat.worker.HiddenStatesExtension"


def load_in_worker() -> None:
    """Entry point in ``vllm.general_plugins``: activates where the parent process did, else does nothing."""
    if os.environ.get(MARKER) and not switched_off():
        activate()


def num_layers(model_config: Any) -> int:
    """Decoder layers of the whole model, as vLLM counts them."""
    if hasattr(model_config, "get_total_num_hidden_layers"):
        return int(model_config.get_total_num_hidden_layers())
    return int(model_config.hf_text_config.num_hidden_layers)


class HiddenStatesExtension:
    """Mixed into vLLM's worker class through ``worker_extension_cls``; called by ``collective_rpc``.

    Replies hold plain values only, because vLLM's engine does not pickle them by default. Errors are part of the reply
    (see :meth:`CompatError.to_dict`): vLLM turns what a worker raises into text and may end the worker.
    """

    def speculators_compat_setup(self, layer_ids: list[int], depot: str) -> dict[str, Any]:
        """Hook the target model's decoder layers, on tensor-parallel rank 0: all ranks compute the same states.

        Returns:
            ``model``: class of the loaded model; ``path``: where its decoder layers are; ``num_layers``: how many;
            ``native``: whether the class implements vLLM's ``SupportsEagle3`` itself. Or ``error``.
        """
        try:
            return self._speculators_compat_setup(layer_ids, depot)
        except CompatError as error:
            return {"error": error.to_dict()}

    def _speculators_compat_setup(self, layer_ids: list[int], depot: str) -> dict[str, Any]:
        from vllm.distributed import get_pp_group, get_tp_group

        from .capture import Capture
        from .patches.eagle3_protocol import native
        from .patches.layer_navigation import find_decoder_layers

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if get_pp_group().world_size > 1:
            raise CompatError(
                "SC404",
                found=f"pipeline_parallel_size={get_pp_group().world_size}",
                expected="1",
                why="each pipeline rank sees its own decoder layers only; the others would be missing",
                mend="use tensor parallelism (tensor_parallel_size) instead",
            )
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        stack = find_decoder_layers(model, num_layers(runner.model_config))
        if get_tp_group().rank_in_group == 0:
            former = getattr(self, "_speculators_compat_capture", None)
            if former is not None:
                former.close()
            max_tokens = runner.scheduler_config.max_num_batched_tokens
            self._speculators_compat_capture = Capture(
                runner, stack.layers, sorted(set(layer_ids)), depot, max_tokens
            )
        return {
            "model": type(model).__name__,
            "path": stack.path,
            "num_layers": len(stack.layers),
            "native": native(model),
        }

    def speculators_compat_reset(self) -> None:
        """Forget all requests."""
        capture = getattr(self, "_speculators_compat_capture", None)
        if capture is not None:
            capture.reset()
