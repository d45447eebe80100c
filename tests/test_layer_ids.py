"""Layer ids in both conventions."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest

from speculators_compat import layer_ids
from speculators_compat.errors import InputError
from speculators_compat.prompts import check_layer_ids


def test_translation_both_ways() -> None:
    assert layer_ids.to_boundary([2, 0, 5, 2], 6) == [3, 1, 6, 3]
    assert layer_ids.to_after_layer([3, 1, 6, 3], 6) == [2, 0, 5, 2]
    for n in range(1, 20):
        ids = list(range(n))
        assert layer_ids.to_after_layer(layer_ids.to_boundary(ids, n), n) == ids
        assert layer_ids.translate(ids, n, "after-layer", "after-layer") == ids


@pytest.mark.parametrize(
    ("ids", "convention", "said"),
    [
        ([2, 6], "after-layer", r"these are boundaries: pass \[1, 5\]"),
        ([0, 6], "after-layer", "pass integers from 0 to 5"),
        ([7], "after-layer", "from 0 to 5"),
        ([-1], "after-layer", "from 0 to 5"),
        ([7], "boundary", "from 0 to 6"),
        ([], "boundary", "from 0 to 6"),
        ([True], "boundary", "from 0 to 6"),
        (["2"], "boundary", "from 0 to 6"),
        ([1.0], "after-layer", "from 0 to 5"),
    ],
)
def test_wrong_ids_are_refused_with_the_translation(ids: Any, convention: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        layer_ids.check(ids, 6, convention)
    assert caught.value.id == "SC411"


def test_boundary_0_leaves_no_layer() -> None:
    with pytest.raises(InputError, match="embeddings"):
        layer_ids.to_after_layer([0, 3], 6)


def test_the_generator_suggests_the_translation_too() -> None:
    with pytest.raises(InputError, match=r"if these are boundaries, pass \[1, 2, 5\]"):
        check_layer_ids([2, 3, 6], 6)


@pytest.mark.parametrize(
    ("version", "convention", "ids"),
    [
        ("0.3.0", "after-layer", [2, 16, 29, 31]),
        ("0.4.0.1", "after-layer", [2, 16, 29, 31]),
        ("0.5.0.dev1", "boundary", [2, 16, 29, 32]),
        ("0.5.0", "boundary", [2, 16, 29, 32]),
        ("0.9.0", "boundary", [2, 16, 29, 32]),
    ],
)
def test_defaults(version: str, convention: str, ids: list[int]) -> None:
    assert layer_ids.convention_of(version) == convention
    assert layer_ids.default_layer_ids(version, 32) == ids


def test_defaults_of_a_model_with_too_few_layers() -> None:
    with pytest.raises(InputError):
        layer_ids.default_layer_ids("0.4.0", 2)


def test_what_the_example_asks_for() -> None:
    def resolve(ids: Any, convention: Any, output: str, count: int | None = 6) -> list[int] | None:
        return layer_ids.resolve(ids, count, convention=convention, output=output)

    assert resolve(None, None, "pt") is None
    assert resolve(None, None, "safetensors") == [1, 2, 2, 5]
    assert resolve([1, 5], None, "pt") == [1, 5]
    assert resolve([1, 6], "boundary", "pt") == [0, 5]
    assert resolve([1, 6], "boundary", "safetensors") == [0, 5]
    assert resolve([1, 5], "after-layer", "safetensors") == [1, 5]
    assert resolve([1, 60], "boundary", "safetensors", None) == [0, 59]
    assert resolve([1, 60], None, "pt", None) == [1, 60]
    with pytest.raises(InputError, match=r"boundary \[1, 5\] is after-layer \[0, 4\]"):
        resolve([1, 5], None, "safetensors")
    with pytest.raises(InputError, match="not known before"):
        resolve(None, None, "safetensors", None)
    with pytest.raises(InputError, match="embeddings"):
        resolve([0, 5], "boundary", "safetensors", None)


def _lists(source: Path) -> list[str]:
    """Lists in a source file that mention the number of layers."""
    tree = ast.parse(source.read_text())
    found = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.List) and len(node.elts) >= 3]
    return [text for text in found if "num_layers" in text]


@pytest.mark.parametrize(
    ("version", "file", "wanted"),
    [
        (
            "0.3.0",
            "data_generation/vllm_hidden_states_generator.py",
            "[2, num_layers // 2, num_layers - 3, num_layers - 1]",
        ),
        (
            "0.4.0",
            "data_generation/vllm_hidden_states_generator.py",
            "[2, num_layers // 2, num_layers - 3, num_layers - 1]",
        ),
        (
            "0.4.0.1",
            "data_generation/vllm_hidden_states_generator.py",
            "[2, num_layers // 2, num_layers - 3, num_layers - 1]",
        ),
        ("0.5.0", "models/utils.py", "[2, num_layers // 2, num_layers - 3]"),
        ("0.9.0", "models/utils.py", "[2, num_layers // 2, num_layers - 3]"),
    ],
)
def test_the_defaults_are_those_of_the_releases(version: str, file: str, wanted: str) -> None:
    """Where a release is at hand, its source says the same."""
    roots = [Path(p) for p in os.environ.get("SPECULATORS_RELEASES", "").split(os.pathsep) if p]
    roots.append(Path(__file__).resolve().parent.parent / ".envs" / "speculators")
    sources = [root / version / "speculators" / file for root in roots]
    source = next((path for path in sources if path.is_file()), None)
    if source is None and "CI" not in os.environ:  # there `make env` has fetched it, and nothing is left out
        pytest.skip(f"speculators {version} is not in .envs/speculators: run make env")
    assert source is not None
    assert wanted in _lists(source)
