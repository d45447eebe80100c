"""States of models that declare the interface, and files of states, with real tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="runs where vLLM is installed")
pytest.importorskip("vllm", reason="runs where vLLM is installed")

from safetensors.torch import save_file  # noqa: E402

from speculators_compat.errors import CompatError  # noqa: E402
from speculators_compat.patcher import Journal  # noqa: E402
from speculators_compat.patches.server_states import _compiled, complete  # noqa: E402
from speculators_compat.statefile import checked_states  # noqa: E402


class Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states.clone() if residual is None else residual + hidden_states
        return torch.full_like(hidden_states, float(self.number + 1)), residual


class Model(torch.nn.Module):
    """Declares the interface; returns what ``looks`` says of the boundaries asked for."""

    def __init__(self, looks: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=4)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([Layer(k) for k in range(4)])
        self.looks, self.asked = looks, ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.asked = layers

    def forward(self, positions: Any, embeds: Any) -> Any:
        hidden, residual, aux = embeds, None, []
        for number, layer in enumerate(self.model.layers):
            if number in self.asked:
                aux.append(hidden.clone() if residual is None else hidden + residual)
            hidden, residual = layer(positions, hidden, residual)
        if self.looks == "everywhere" and 4 in self.asked:
            aux.append(hidden + residual)
        out = hidden + residual
        return (out, aux) if aux and self.looks != "nowhere" else out


def states(looks: str, boundaries: tuple[int, ...], journal: Journal | None = None) -> Any:
    model = Model(looks)
    complete(model, 4, journal or Journal(), adapter="test")
    model.set_aux_hidden_state_layers(boundaries)
    run = (torch.arange(3), torch.full((3, 2), 0.5))
    first, second = model(*run), model(*run)
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    return model, second


@pytest.mark.parametrize("looks", ["everywhere", "before layers only", "nowhere"])
def test_every_boundary_that_was_asked_for(looks: str) -> None:
    _, (hidden, aux) = states(looks, (0, 1, 3, 4))
    assert [float(a[0, 0]) for a in aux] == [0.5, 1.5, 6.5, 10.5]
    assert torch.equal(aux[-1], hidden)


def test_a_model_that_is_right_keeps_its_own_and_loses_the_hooks() -> None:
    model, _ = states("everywhere", (1, 4))
    assert model.asked == (1, 4)
    assert not any(layer._forward_hooks for layer in model.model.layers)
    model, _ = states("before layers only", (1, 4))
    assert sum(len(layer._forward_hooks) for layer in model.model.layers) == 2


def test_undone() -> None:
    journal = Journal()
    model, _ = states("nowhere", (1, 4), journal)
    journal.undo()
    assert "set_aux_hidden_state_layers" not in vars(model)
    assert not model._forward_hooks
    assert torch.is_tensor(model(torch.arange(3), torch.full((3, 2), 0.5)))


def test_compiled_models_are_left_alone() -> None:
    model = Model("everywhere")
    assert not _compiled(model)
    model.model.do_not_compile = True
    assert not _compiled(model)
    model.model.do_not_compile = False
    assert _compiled(model)


# --------------------------------------------------------------------------- files


def file(folder: Path, tokens: list[int], spoil: Any = None, **more: Any) -> Path:
    path = folder / "a.safetensors"
    tensors = {"hidden_states": torch.rand(len(tokens), 2, 8) + 0.1, "token_ids": torch.tensor(tokens), **more}
    if spoil is not None:
        spoil(tensors)
    save_file({k: v for k, v in tensors.items() if v is not None}, path)
    return path


def test_states_of_the_prompt(tmp_path: Path) -> None:
    path = file(tmp_path, [5, 6, 7])
    lock = Path(f"{path}.lock")
    lock.touch()
    assert checked_states(path, [5, 6, 7], layers=2, hidden_size=8, keep_lock=True).shape == (3, 2, 8)
    assert lock.exists()
    checked_states(path, [5, 6, 7])
    assert not lock.exists()
    assert path.exists()


def _nan(tensors: Any) -> None:
    tensors["hidden_states"][1, 1, 3] = float("nan")


def _infinite(tensors: Any) -> None:
    tensors["hidden_states"] = tensors["hidden_states"].to(torch.bfloat16)
    tensors["hidden_states"][2, 0, 0] = float("-inf")


def _zeros(tensors: Any) -> None:
    tensors["hidden_states"][2, 1] = 0


def _short(tensors: Any) -> None:
    tensors["hidden_states"] = tensors["hidden_states"][:2].clone()


@pytest.mark.parametrize(
    ("spoil", "said"), [(_nan, "1 tokens"), (_infinite, "not finite"), (_zeros, "zeros"), (_short, "shape")]
)
def test_what_is_refused(tmp_path: Path, spoil: Any, said: str) -> None:
    with pytest.raises(CompatError, match=said) as caught:
        checked_states(file(tmp_path, [5, 6, 7], spoil), [5, 6, 7], seconds=1)
    assert caught.value.id == "SC804"


@pytest.mark.parametrize(
    ("tokens", "wanted", "said"),
    [([5, 6], {}, "not the prompt's"), ([5, 6, 7], {"layers": 3}, "2 layers"), ([5, 6, 7], {"hidden_size": 9}, "size 8")],
)
def test_other_than_asked_for(tmp_path: Path, tokens: list[int], wanted: Any, said: str) -> None:
    with pytest.raises(CompatError, match=said):
        checked_states(file(tmp_path, [5, 6, 7]), tokens, seconds=1, **wanted)


def test_missing_tensors(tmp_path: Path) -> None:
    with pytest.raises(CompatError, match="no token_ids"):
        checked_states(file(tmp_path, [5], token_ids=None), [5], seconds=1)
