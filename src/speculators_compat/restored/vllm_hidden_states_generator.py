"""``VllmHiddenStatesGenerator`` for releases of speculators that have none, from 0.5.0 on.

Imported as ``speculators.data_generation.vllm_hidden_states_generator``. The class has the constructor and the methods of
speculators 0.4.0.1; the adapter ``engine`` puts vLLM's public engine behind them, as it does there.
"""

from __future__ import annotations

from typing import Any

# The adapter config_loading mends these two names, as in speculators' own module.
from transformers import AutoConfig, AutoTokenizer  # noqa: F401

from speculators_compat.extraction import not_ours

__all__ = ["VllmHiddenStatesGenerator"]

#: Tells the adapters that this is not speculators' own class.
RESTORED = True


class VllmHiddenStatesGenerator:
    """Extracts the hidden states of chosen decoder layers while vLLM computes prompts.

    Args:
        model_path: model folder, or a name on the Hugging Face hub.
        layer_ids: id ``k`` is the state that leaves decoder layer ``k``, counting from 0, as in speculators 0.3 and 0.4
            (``configure(layer_convention="boundary")``: the state that enters it, as speculators from 0.5 on counts).
            ``None``: the layers that this speculators' trainer expects, boundaries ``2, n // 2, n - 3`` and ``n`` of n.
        max_model_len: longest prompt, plus the one token that is sampled after it.
        gpu_memory_utilization: vLLM's part of the GPU's memory.
        tensor_parallel_size: GPUs to split the model over.
        max_num_batched_tokens: tokens a step; 8192, or ``max_model_len`` where that is more, by default.

    Attributes:
        layer_ids: what is returned, in its order, in after-layer ids whatever convention was asked for.
        boundaries: the same layers as this speculators counts them: all but the last are the trainer's
            ``--target-layer-ids``.
        tokenizer, model_path, tensor_parallel_size, vllm_config: as in speculators 0.4.

    Raises:
        CompatError: SC4xx for arguments that cannot be right.
    """

    def __init__(
        self,
        model_path: str,
        layer_ids: list[int] | None = None,
        max_model_len: int = 2048,
        gpu_memory_utilization: float = 0.8,
        tensor_parallel_size: int = 1,
        max_num_batched_tokens: int | None = None,
    ):
        raise not_ours()

    def generate(self, token_ids: Any) -> list[dict[str, Any]]:
        """See :func:`speculators_compat.generator.generate`, which takes this method's place.

        Raises:
            CompatError: SC509 where the plugin was deactivated.
        """
        raise not_ours()
