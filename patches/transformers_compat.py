"""transformers 5: names that speculators 0.3 and 0.4 expect at import.

What breaks: ``import speculators`` dies with ``PydanticUndefinedAnnotation: name 'torch' is not defined``, because
``PretrainedConfig``'s annotations name a module that transformers imports for type checkers only; and
``speculators.models.eagle`` imports ``transformers.modeling_attn_mask_utils``, which is gone.
Since: transformers 5.0; the module since about 5.2.
How it is mended: the name is supplied where pydantic looks for it. The missing module gets a stand-in whose one function
raises if it is called: only training the first EAGLE needs it, extraction does not.
Upstream: transformers/configuration_utils.py (``if TYPE_CHECKING: import torch``).
Retire when: speculators 0.4 is no longer supported (0.8 supports transformers 5).
"""

from __future__ import annotations

import importlib.util
import types
from typing import Any

from speculators_compat.adapter import Adapter, Context, Probe, State
from speculators_compat.errors import CompatError
from speculators_compat.hookspecs import hookimpl
from speculators_compat.surface import Surface

MASK_UTILS = "transformers.modeling_attn_mask_utils"


class TorchName(Adapter):
    id = "transformers_torch_name"
    seam = "pydantic's view of transformers' PretrainedConfig"
    why = "import speculators dies with PydanticUndefinedAnnotation: name 'torch' is not defined"
    since = "transformers 5.0"
    how = "supplies the name torch in transformers.configuration_utils, where pydantic resolves annotations"
    upstream = "transformers/configuration_utils.py: if TYPE_CHECKING: import torch"
    retire_when = "speculators 0.4 is no longer supported"
    trigger = "transformers.configuration_utils"

    def probe(self, surface: Surface) -> Probe:
        if not surface.has("transformers.configuration_utils:PreTrainedConfig"):
            return Probe(State.NOT_NEEDED, "transformers 4: the config class has no fields for pydantic to resolve")
        if surface.has("transformers.configuration_utils:torch"):
            return Probe(State.NOT_NEEDED, "transformers imports torch there")
        return Probe(State.APPLIED, "supplies the name torch")

    def apply(self, context: Context) -> None:
        import torch

        context.journal.replace(context.module, "torch", torch, adapter=self.id)


class MaskUtils(Adapter):
    id = "transformers_mask_utils"
    seam = "the import of transformers.modeling_attn_mask_utils"
    why = "import speculators dies with ModuleNotFoundError, although extraction needs nothing from that module"
    since = "transformers 5.2"
    how = "enters a stand-in module whose function refuses to be called"
    upstream = "transformers removed modeling_attn_mask_utils"
    retire_when = "speculators 0.4 is no longer supported"
    trigger = "transformers"

    def probe(self, surface: Surface) -> Probe:
        if surface.has_module(MASK_UTILS):
            return Probe(State.NOT_NEEDED, f"{MASK_UTILS} exists")
        return Probe(State.APPLIED, f"enters a stand-in for {MASK_UTILS}")

    def apply(self, context: Context) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise CompatError(
                "SC305",
                found="a call of transformers.modeling_attn_mask_utils, which this transformers no longer has",
                expected="transformers before 5.2 for training a first-generation EAGLE model",
                why="the mask it made has no replacement here",
                mend="pip install 'transformers<5' in the training environment",
            )

        module = types.ModuleType(MASK_UTILS, "Stand-in for a module that this transformers no longer has.")
        module._prepare_4d_causal_attention_mask = refuse  # type: ignore[attr-defined]
        module.__spec__ = importlib.util.spec_from_loader(MASK_UTILS, loader=None)
        context.journal.add_module(MASK_UTILS, module, adapter=self.id)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [MaskUtils(), TorchName()]
