"""From any model to its decoder layers, final norm and embedding."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="runs where vLLM is installed")

from speculators_compat.errors import CompatError  # noqa: E402
from speculators_compat.patches.layer_navigation import find_decoder_layers  # noqa: E402

nn = torch.nn


class RMSNorm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(4)


class Layer(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm()
        if experts:
            self.experts = nn.ModuleList([nn.Linear(1, 1) for _ in range(experts)])


def layers(count: int, experts: int = 0) -> Any:
    return nn.ModuleList([Layer(experts) for _ in range(count)])


def tree(description: dict[str, Any]) -> Any:
    """A module with children by dotted path."""
    root = nn.Module()
    for path, module in description.items():
        holder = root
        *parts, last = path.split(".")
        for part in parts:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = getattr(holder, part)
        holder.add_module(last, module)
    return root


def embedding() -> Any:
    return nn.Embedding(3, 4)


@pytest.mark.parametrize(
    ("description", "path", "norm", "embed"),
    [
        (
            {"model.embed_tokens": embedding(), "model.layers": layers(3), "model.norm": RMSNorm()},
            "model.layers",
            "model.norm",
            "model.embed_tokens",
        ),
        (
            {
                "vision_tower.encoder.layers": layers(3),
                "language_model.model.layers": layers(3),
                "language_model.model.norm": RMSNorm(),
                "language_model.model.embed_tokens": embedding(),
            },
            "language_model.model.layers",
            "language_model.model.norm",
            "language_model.model.embed_tokens",
        ),
        (
            {"model.layers.layers": layers(3), "model.norm": RMSNorm(), "model.embed_tokens": embedding()},
            "model.layers.layers",
            "model.norm",
            "model.embed_tokens",
        ),
        (
            {"transformer.h": layers(3), "transformer.ln_f": RMSNorm(), "transformer.wte": embedding()}
            | {"transformer.wpe": embedding()},
            "transformer.h",
            "transformer.ln_f",
            "transformer.wte",
        ),
        # as many experts as layers
        ({"model.layers": layers(3, experts=3)}, "model.layers", None, None),
        # a second list beside the layers: the known path decides
        ({"model.layers": layers(3), "model.gates": nn.ModuleList([nn.Linear(1, 1)] * 3)}, "model.layers", None, None),
        # several norms, none of them called as final norms are
        (
            {"model.layers": layers(3), "model.norm_a": RMSNorm(), "model.norm_b": RMSNorm()},
            "model.layers",
            None,
            None,
        ),
        ({"thinker.language_model.model.layers": layers(3), "talker.layers": layers(3)},) * 1
        + ("thinker.language_model.model.layers", None, None),
        ({"somewhere.else.entirely": layers(3)}, "somewhere.else.entirely", None, None),
    ],
)
def test_found(description: Any, path: str, norm: str | None, embed: str | None) -> None:
    stack = find_decoder_layers(tree(description), 3)
    assert (stack.path, stack.norm_path, stack.embedding_path) == (path, norm, embed)
    assert len(stack.layers) == 3


def test_what_vllm_calls_the_language_model_decides() -> None:
    model = tree({"one.layers": layers(3), "two.layers": layers(3)})
    with pytest.raises(CompatError):
        find_decoder_layers(model, 3)
    model.get_language_model = lambda: model.two
    assert find_decoder_layers(model, 3).path == "two.layers"

    def not_here() -> None:
        raise NotImplementedError

    model.get_language_model = not_here
    with pytest.raises(CompatError):
        find_decoder_layers(model, 3)


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"model.layers": layers(2)},
        {"one.layers": layers(3), "two.layers": layers(3)},
        {"vision_tower.layers": layers(3)},
    ],
)
def test_refused_with_the_candidates(description: Any) -> None:
    with pytest.raises(CompatError) as caught:
        find_decoder_layers(tree(description), 3)
    assert caught.value.id == "SC501"
    for name in description:
        assert name in caught.value.found
