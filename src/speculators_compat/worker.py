"""What runs inside vLLM's workers: the extension of its worker class."""

from __future__ import annotations

from typing import Any

from .errors import CompatError

EXTENSION = "speculators_compat.worker.HiddenStatesExtension"


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

    def speculators_compat_setup(
        self, layer_ids: list[int], depot: str, final_norm: bool = False, caller: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Hook the target model's decoder layers, on tensor-parallel rank 0: all ranks compute the same states.

        Args:
            caller: the caller's :func:`~speculators_compat.handover.machine`; rank 0 must run there too (SC870).

        Returns:
            ``model``: class of the loaded model; ``path``: where its decoder layers are; ``num_layers``: how many;
            ``runner``: vLLM's model runner, V1 or V2; ``native``: whether the class implements vLLM's ``SupportsEagle3``
            itself; ``unproved``: why samples cannot be proved (:mod:`speculators_compat.alignment`). Or ``error``.
        """
        try:
            return self._speculators_compat_setup(layer_ids, depot, final_norm, caller)
        except CompatError as error:
            return {"error": error.to_dict()}

    def _speculators_compat_setup(
        self, layer_ids: list[int], depot: str, final_norm: bool, caller: dict[str, str] | None
    ) -> dict[str, Any]:
        from vllm.distributed import get_pp_group, get_tp_group

        from .alignment import Alignment, final_norm_of
        from .capture import Capture
        from .handover import check_machine
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
            if caller is not None:
                check_machine(caller)
            for former in ("_speculators_compat_alignment", "_speculators_compat_capture"):
                if hasattr(self, former):
                    getattr(self, former).close()
            capture = self._speculators_compat_capture = Capture(
                runner,
                stack.layers,
                sorted(set(layer_ids)),
                depot,
                runner.scheduler_config.max_num_batched_tokens,
                final_norm=final_norm_of(model, stack.path) if final_norm else None,
            )
            alignment = Alignment(capture, model, stack.path, stack.layers, normed=final_norm)
            self._speculators_compat_alignment = alignment
            unproved = alignment.reason
        else:
            unproved = ""
        return {
            "unproved": unproved,
            "model": type(model).__name__,
            "path": stack.path,
            "num_layers": len(stack.layers),
            "runner": "V1" if hasattr(runner, "input_batch") else "V2",
            "native": native(model),
        }

    def speculators_compat_reset(self) -> None:
        """Forget all requests."""
        capture = getattr(self, "_speculators_compat_capture", None)
        if capture is not None:
            capture.reset()
