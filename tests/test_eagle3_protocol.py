"""The EAGLE-3 protocol shim on small torch models: what it captures, refuses, and puts back."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="runs where vLLM is installed")
pytest.importorskip("vllm", reason="runs where vLLM is installed")

from speculators_compat.errors import CompatError  # noqa: E402
from speculators_compat.patcher import Journal  # noqa: E402
from speculators_compat.patches.eagle3_protocol import (  # noqa: E402
    Eagle3AllowList,
    Eagle3Protocol,
    entered_layer,
    equip,
    equipped,
)

WIDTH = 4


class Layer(torch.nn.Module):
    """Like vLLM's: a residual that the layer itself updates in place."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states.clone()
        else:
            residual += hidden_states
        return torch.full_like(hidden_states, float(self.number + 1)), residual


class Decoder(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(k) for k in range(count)])

    def forward(self, positions: Any, embeds: Any) -> Any:
        hidden, residual = embeds, None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden + residual


class Model(torch.nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=count)
        self.model = Decoder(count)

    def forward(self, positions: Any, embeds: Any) -> Any:
        return self.model(positions, embeds)


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def model(journal: Journal) -> Any:
    made = Model()
    equip(made, 4, journal, adapter="test")
    return made


def run(model: Any) -> Any:
    return model(torch.arange(3), torch.full((3, WIDTH), 0.5))


#: Boundary k is 0.5 + 1 + ... + k.
STATES = [0.5, 1.5, 3.5, 6.5, 10.5]


def test_what_the_protocol_asks_for(model: Any) -> None:
    from vllm.model_executor.models.interfaces import supports_eagle3

    assert supports_eagle3(model)
    assert not supports_eagle3(Model())
    assert model.get_eagle3_aux_hidden_state_layers() == (2, 2, 1)
    assert model.get_eagle3_default_aux_hidden_state_layers() == (2, 2, 1)


def test_states_at_every_boundary(model: Any) -> None:
    """In-place updates after a layer do not reach what was kept; states are ascending, each once."""
    assert isinstance(run(model), torch.Tensor)
    model.set_aux_hidden_state_layers((4, 1, 0, 3, 2, 1))
    hidden, aux = run(model)
    assert hidden.flatten()[0].item() == 10.5
    assert [state.unique().tolist() for state in aux] == [[value] for value in STATES]
    assert [state.shape for state in aux] == [(3, WIDTH)] * 5


def test_layers_can_be_changed_and_cleared(model: Any) -> None:
    model.set_aux_hidden_state_layers((1, 2))
    model.set_aux_hidden_state_layers((4,))
    assert [state[0, 0].item() for state in run(model)[1]] == [10.5]
    model.set_aux_hidden_state_layers(())
    assert isinstance(run(model), torch.Tensor)


@pytest.mark.parametrize("layers", [(5,), (-1,), (1, True), ("1",), (1.0,)])
def test_boundaries_that_do_not_exist(model: Any, layers: Any) -> None:
    model.set_aux_hidden_state_layers((1,))
    with pytest.raises(CompatError) as caught:
        model.set_aux_hidden_state_layers(layers)
    assert caught.value.id == "SC520"
    assert [state[0, 0].item() for state in run(model)[1]] == [1.5]  # as before


def test_layers_that_are_not_found(journal: Journal) -> None:
    made = Model(3)
    with pytest.raises(CompatError) as caught:
        equip(made, 5, journal, adapter="test")
    assert caught.value.id == "SC501"
    assert not equipped(made)
    assert not journal.changes


def test_layers_that_run_without_hooks(model: Any) -> None:
    model.set_aux_hidden_state_layers((1, 2))
    layer = model.model.layers[1]
    layer.__class__ = type("Compiled", (Layer,), {"__call__": lambda self, *a: self.forward(*a)})
    with pytest.raises(CompatError) as caught:
        run(model)
    assert caught.value.id == "SC502"
    layer.__class__ = Layer
    assert len(run(model)[1]) == 2


def test_rows_that_are_missing(model: Any) -> None:
    model.set_aux_hidden_state_layers((2,))
    model.model.layers[1].register_forward_hook(lambda m, a, o: (o[0][:2], o[1][:2]), prepend=True)
    model.model.layers[2].forward = lambda p, h, r: (torch.zeros(3, WIDTH), torch.zeros(3, WIDTH))
    with pytest.raises(CompatError) as caught:
        run(model)
    assert caught.value.id == "SC507"


def test_undone(model: Any, journal: Journal) -> None:
    model.set_aux_hidden_state_layers((0, 1))
    journal.undo()
    assert not equipped(model)
    assert not hasattr(model, "supports_eagle3")
    assert isinstance(run(model), torch.Tensor)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_journal_keeps_no_model_alive(journal: Journal) -> None:
    made = Model()
    equip(made, 4, journal, adapter="test")
    reference = weakref.ref(made)
    del made
    gc.collect()
    assert reference() is None
    assert journal.undo() == []


def test_equipped_twice(model: Any, journal: Journal) -> None:
    changes = len(journal.changes)
    equip(model, 4, journal, adapter="test")
    assert len(journal.changes) == changes


def test_the_runner_asks(journal: Journal) -> None:
    """Native models and classes get the answer they got before; others are equipped."""

    class Native(Model):
        supports_eagle3 = True
        has_own_lm_head = False
        has_own_embed_tokens = False

        def set_aux_hidden_state_layers(self, layers: Any) -> None: ...

        def get_eagle3_aux_hidden_state_layers(self) -> Any: ...

        def get_eagle3_default_aux_hidden_state_layers(self) -> Any: ...

    from vllm.model_executor.models import interfaces

    module = SimpleNamespace(supports_eagle3=interfaces.supports_eagle3)
    Eagle3Protocol().apply(SimpleNamespace(module=module, journal=journal))  # type: ignore[arg-type]
    native, other = Native(), Model()
    before = dict(vars(native))
    assert module.supports_eagle3(native)
    assert vars(native) == before
    assert not module.supports_eagle3(Model)
    other.config.get_text_config = lambda: other.config  # type: ignore[attr-defined]
    assert module.supports_eagle3(other)
    assert equipped(other)
    journal.undo()
    assert module.supports_eagle3 is interfaces.supports_eagle3


def test_entered_layer() -> None:
    a, b = torch.ones(2, WIDTH), torch.full((2, WIDTH), 2.0)
    layer = Layer(0)
    assert entered_layer(layer, (None, a, None), {}).unique().tolist() == [1.0]
    named = {"positions": b, "hidden_states": a, "residual": b}
    assert entered_layer(layer, (), named).unique().tolist() == [3.0]

    class Odd(torch.nn.Module):
        def forward(self, one: Any, other: Any) -> Any: ...

    assert entered_layer(Odd(), (a, torch.arange(2)), {}) is not a
    with pytest.raises(CompatError) as caught:
        entered_layer(Odd(), (a, b), {})
    assert caught.value.id == "SC508"


def test_allow_list(journal: Journal) -> None:
    """The list goes from the very function that others hold, and comes back."""

    def _verify_args(self: Any) -> bool:
        listed = ["llama", "qwen", "minicpm"]
        return any(known in self for known in listed)

    class SpeculativeConfig:
        pass

    SpeculativeConfig._verify_args = _verify_args  # type: ignore[attr-defined]
    context = SimpleNamespace(module=SimpleNamespace(SpeculativeConfig=SpeculativeConfig), journal=journal)
    assert not _verify_args("deepseek_v3")
    code = _verify_args.__code__
    Eagle3AllowList().apply(context)  # type: ignore[arg-type]
    assert _verify_args("deepseek_v3")
    journal.undo()
    assert _verify_args.__code__ is code
    assert not _verify_args("deepseek_v3")
