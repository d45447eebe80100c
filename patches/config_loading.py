"""Config and tokenizer loading: models that need ``trust_remote_code``, or that only vLLM knows.

What breaks: ``AutoTokenizer.from_pretrained(model_path)`` asks for confirmation or raises for a tokenizer with code of
its own, although the config is loaded with ``trust_remote_code=True``; and the layer count is looked up on the config
and its ``text_config`` only.
Since: every vLLM.
How it is mended: both loads obey one setting, which is the generator's ``True`` unless ``trust_remote_code=False`` was
given through ``configure``; a config that transformers cannot load is loaded as vLLM does; the layer count comes from
vLLM's text config. Layer ids are checked here, before the load.
Upstream: speculators/data_generation/vllm_hidden_states_generator.py.
Retire when: speculators loads both through vLLM.
"""

from __future__ import annotations

from typing import Any

from speculators_compat.adapter import GENERATOR_MODULE, Adapter, Context, Probe, State
from speculators_compat.construction import running
from speculators_compat.hookspecs import hookimpl
from speculators_compat.prompts import check_layer_ids
from speculators_compat.surface import Surface


class ConfigLoading(Adapter):
    id = "config_loading"
    seam = "AutoConfig and AutoTokenizer in the generator's constructor"
    why = "tokenizers with code of their own are refused, and layer counts of nested configs are not found"
    since = "every vLLM"
    how = "one trust_remote_code setting for both; vLLM's own config loader and text config where transformers fails"
    upstream = "speculators/data_generation/vllm_hidden_states_generator.py"
    retire_when = "speculators loads both through vLLM"

    def probe(self, surface: Surface) -> Probe:
        for name in ("get_config", "get_hf_text_config"):
            if not surface.has(f"vllm.transformers_utils.config:{name}"):
                return Probe(State.DRIFTED, f"vllm.transformers_utils.config.{name} no longer exists")
        restored = surface.has(f"{GENERATOR_MODULE}:RESTORED")  # the adapter engine loads both for it
        if not restored and surface.call_keywords(GENERATOR_MODULE, "from_pretrained") is None:
            return Probe(State.NOT_APPLICABLE, "this speculators loads neither config nor tokenizer")
        return Probe(State.APPLIED, "in the generator's constructor")

    def apply(self, context: Context) -> None:
        context.journal.replace(context.module, "AutoConfig", _Config(context.module.AutoConfig), adapter=self.id)
        context.journal.replace(
            context.module, "AutoTokenizer", _Tokenizer(context.module.AutoTokenizer), adapter=self.id
        )


class _Loader:
    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def _trusted(asked: bool) -> bool:
    construction = running()
    return bool(construction.vllm_args.get("trust_remote_code", True)) if construction else asked


class _Tokenizer(_Loader):
    def from_pretrained(self, name: str, *args: Any, **kwargs: Any) -> Any:
        kwargs["trust_remote_code"] = _trusted(kwargs.get("trust_remote_code", False))
        return self._wrapped.from_pretrained(name, *args, **kwargs)


class _Config(_Loader):
    def from_pretrained(self, name: str, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import ModelConfig
        from vllm.transformers_utils.config import get_config, get_hf_text_config

        from speculators_compat.worker import num_layers

        kwargs["trust_remote_code"] = trust = _trusted(kwargs.get("trust_remote_code", False))
        try:
            config = self._wrapped.from_pretrained(name, *args, **kwargs)
        except (ValueError, KeyError, ImportError):
            config = get_config(name, trust_remote_code=trust)
        construction = running()
        if construction is None:
            return config
        layers = getattr(get_hf_text_config(config), "num_hidden_layers", None)
        if layers is None:  # a sub-config of another name: counted as vLLM will
            layers = num_layers(ModelConfig(name, trust_remote_code=trust))
        if construction.arguments["layer_ids"] is not None:
            check_layer_ids(construction.arguments["layer_ids"], layers)
        if not hasattr(config, "num_hidden_layers") and not hasattr(config, "text_config"):
            config.num_hidden_layers = layers
        return config


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [ConfigLoading()]
