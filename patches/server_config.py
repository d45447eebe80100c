"""Server's draft config: the text part of a vision-language model's config stays a config.

What breaks: for the method `extract_hidden_states` vLLM copies the target's config into ``ExtractHiddenStatesConfig``, by
way of a dict. The text part of a vision-language model is a plain dict afterwards, and the server ends before it loads
anything: ``The text_config extracted from the model config does not have `num_attention_heads` attribute``.
Since: vLLM 0.17, mended by vLLM in 0.20. How it is mended: the new config is given the target's own text
config object, under the name that the target has it.
Upstream: vllm/transformers_utils/configs/extract_hidden_states.py.
Retire when: vLLM 0.19 is no longer supported.
"""

from __future__ import annotations

from typing import Any

from speculators_compat.adapter import Adapter, Context, Probe, State
from speculators_compat.hookspecs import hookimpl
from speculators_compat.surface import Surface

CONFIG = "vllm.transformers_utils.configs.extract_hidden_states"


class ServerConfig(Adapter):
    id = "server_config"
    seam = "the target's text config in ExtractHiddenStatesConfig"
    why = "the server refuses vision-language models before it loads them"
    since = "vLLM 0.17"
    how = "puts the target's own text config object in the place of the dict"
    upstream = "vllm/transformers_utils/configs/extract_hidden_states.py"
    retire_when = "vLLM 0.19 is no longer supported"
    trigger = CONFIG

    def probe(self, surface: Surface) -> Probe:
        parameters = surface.parameters(f"{CONFIG}:ExtractHiddenStatesConfig")
        if parameters is None:
            return Probe(State.NOT_APPLICABLE, "this vLLM has no ExtractHiddenStatesConfig")
        if surface.call_keywords(CONFIG, "get_text_config") is not None:
            return Probe(State.NOT_NEEDED, "the config keeps the target's text config itself")
        if "model" not in parameters.names:
            return Probe(State.DRIFTED, "ExtractHiddenStatesConfig takes the target's config by another name")
        return Probe(State.APPLIED, "the target's text config is put back")

    def apply(self, context: Context) -> None:
        def make(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            wrapped(*args, **kwargs)
            target: Any = kwargs.get("model", args[0] if args else None)
            text = target.get_text_config() if hasattr(target, "get_text_config") else target
            if text is not target:
                names = [name for name, value in vars(target).items() if value is text] or ["text_config"]
                vars(instance).update(dict.fromkeys(names, text))

        context.journal.wrap(context.module.ExtractHiddenStatesConfig, "__init__", make, adapter=self.id)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [ServerConfig()]
