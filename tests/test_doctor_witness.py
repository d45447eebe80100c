"""What a rehearsal does inside the workers, on a model of a few modules."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest

from speculators_compat.doctor import rehearsal_child, rehearsal_worker

torch = pytest.importorskip("torch", reason="runs where vLLM is installed")
HIDDEN = 8


class Layer(torch.nn.Module):  # type: ignore[name-defined, misc]
    """As vLLM's: takes and returns hidden states and a residual, the sum of which is the state."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm = torch.nn.LayerNorm(HIDDEN, bias=False)
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, positions: Any, hidden: Any, residual: Any) -> Any:
        residual = hidden if residual is None else hidden + residual
        return self.linear(self.input_norm(residual)), residual


class Norm(torch.nn.Module):  # type: ignore[name-defined, misc]
    def forward(self, hidden: Any, residual: Any) -> Any:
        return hidden + residual


class Model(torch.nn.Module):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.vision = torch.nn.ModuleList(Layer() for _ in range(4))
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(16, HIDDEN)
        self.model.layers = torch.nn.ModuleList(Layer() for _ in range(4))
        self.model.norm = Norm()

    def forward(self, ids: Any) -> list[Any]:
        hidden, residual, states = self.model.embed_tokens(ids), None, []
        for layer in self.model.layers:
            hidden, residual = layer(ids, hidden, residual)
            states.append(hidden + residual)
        self.model.norm(hidden, residual)
        return states


@pytest.fixture
def model() -> Any:
    made = Model()
    with torch.no_grad():
        rehearsal_worker.draw_weights(made)
    return made


@pytest.mark.parametrize("path", ["model.layers", "elsewhere.layers", "model.norm", None])
def test_witness(model: Any, path: str | None) -> None:
    witness = rehearsal_worker.Witness(model, path, 4, HIDDEN, [0, 3, 3])
    assert witness.path == "model.layers"
    ids = torch.tensor([1, 5, 5, 2])
    with torch.no_grad():
        states = model(ids)
        model(ids[:2])  # the second part of a chunked prompt
    assert set(witness.seen) == {"0 enters", "0 leaves", "3 enters", "3 leaves"}
    for key, parts in witness.seen.items():
        assert len(parts) == 2
        torch.testing.assert_close(parts[0], states[int(key[0])])


def test_no_layers(model: Any) -> None:
    with pytest.raises(LookupError, match="no list of 5 layers"):
        rehearsal_worker.Witness(model, None, 5, HIDDEN, [0])


def test_weights_are_the_same_everywhere_and_move_the_states(model: Any) -> None:
    again = Model()
    with torch.no_grad():
        rehearsal_worker.draw_weights(again)
        for one, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
            assert torch.equal(one, other)
        states = model(torch.tensor([1, 2, 3]))
    for one, other in itertools.pairwise(states):
        assert rehearsal_child._error(one, other) > 0.2  # another layer's states would be noticed
        assert rehearsal_child._error(one, one) == 0
    assert rehearsal_child._error(states[0], states[0][:2]) == float("inf")


def test_quantized_and_odd_weights() -> None:
    made = torch.nn.Module()
    made.register_buffer("packed", torch.zeros(4, 4, dtype=torch.int32))
    made.register_buffer("weight_scale", torch.full((4,), 0.5))
    made.register_buffer("A_log", torch.full((4,), 0.5))
    made.register_buffer("empty", torch.zeros(0))
    made.register_buffer("e_score_correction_bias", torch.zeros(4))
    rehearsal_worker.draw_weights(made)
    assert made.packed.unique().numel() > 8
    assert torch.equal(made.weight_scale, torch.full((4,), 0.5))
    assert torch.equal(made.A_log, torch.full((4,), 0.5))
    assert (made.e_score_correction_bias >= 0).all()


def test_dummy_loader_is_extended() -> None:
    class DummyModelLoader:
        def load_weights(self, model: Any, model_config: Any) -> None:
            torch.nn.init.constant_(model.weight, 0.001)

    module = types.ModuleType("dummy_loader")
    module.DummyModelLoader = DummyModelLoader  # type: ignore[attr-defined]
    rehearsal_worker.speaking_weights(module)
    linear = torch.nn.Linear(64, 64)
    with torch.no_grad():
        module.DummyModelLoader().load_weights(linear, None)  # type: ignore[attr-defined]
    assert linear.weight.std() > 0.05
