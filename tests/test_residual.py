"""Which of a decoder layer's outputs make up the residual stream."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="runs where vLLM is installed")

from speculators_compat.errors import CompatError  # noqa: E402
from speculators_compat.residual import adds_residual, left_layer  # noqa: E402

H, R = torch.ones(2, 4), torch.full((2, 4), 2.0)


class Fused:
    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
        else:
            hidden_states, residual = self.norm(hidden_states, residual)  # type: ignore[attr-defined]
        return hidden_states, residual


class Added:
    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states, residual


class AddedInOneLine:
    def forward(self, positions: Any, hidden_states: Any, residual: Any = None, **kwargs: Any) -> Any:
        hidden_states, residual = self.norm(hidden_states), hidden_states  # type: ignore[attr-defined]
        return hidden_states + residual, residual


class OneStream:
    def forward(self, positions: Any, hidden_states: Any) -> Any: ...


class Delegating:
    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        return self.inner(positions, hidden_states, residual)  # type: ignore[attr-defined]


class Closed:
    def forward(self, hidden_states: Any, residual: Any) -> Any:
        return (lambda: hidden_states + residual)()


class Unknown:
    def forward(self, hidden_states: Any, pending: Any) -> Any: ...


class Generic:
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("kind", "adds"),
    [
        (Fused, True),
        (Added, False),
        (AddedInOneLine, False),
        (OneStream, False),
        (Delegating, True),
        (Closed, True),
        (Unknown, None),
        (Generic, None),
    ],
)
def test_adds_residual(kind: Any, adds: bool | None) -> None:
    assert adds_residual(kind) is adds


@pytest.mark.parametrize(
    ("kind", "output", "value"),
    [
        (Fused, (H, R), 3.0),
        (Fused, [H, R], 3.0),
        (Fused, (H, None), 1.0),
        (Fused, H, 1.0),
        (Fused, (H,), 1.0),
        (Added, (H, R), 1.0),
        (OneStream, (H, R), 1.0),
        (Fused, (H, R, (R, R)), 3.0),  # a cache of keys and values
        (Fused, (H, R, None), 3.0),
        (Unknown, (H, None), 1.0),
        (Generic, H[None], 1.0),  # transformers' own layers
        (Generic, (H[None],), 1.0),
    ],
)
def test_left_layer(kind: Any, output: Any, value: float) -> None:
    hidden, residual = left_layer(kind(), output)
    state = hidden if residual is None else hidden + residual
    assert state.shape == (2, 4)
    assert state.unique().tolist() == [value]


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        (Unknown, (H, R)),
        (Generic, (H, R)),
        (Fused, (H, R, R)),
        (Fused, (H, R[:1])),
        (Fused, (H, "residual")),
        (Fused, ()),
        (Fused, None),
        (Fused, torch.ones(3, 2, 4)),
        (Fused, {"hidden_states": H}),
    ],
)
def test_refused(kind: Any, output: Any) -> None:
    with pytest.raises(CompatError) as caught:
        left_layer(kind(), output)
    assert caught.value.id == "SC508"
    assert kind.__name__ in caught.value.found
