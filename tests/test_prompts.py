"""What a caller passes to the generator: refused with the item named, before anything is computed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speculators_compat.errors import InputError
from speculators_compat.patches import engine, vllm_arguments
from speculators_compat.prompts import (
    check_layer_ids,
    check_model,
    check_parallelism,
    check_prefix_caching,
    check_prompts,
    media,
    placeholder_tokens,
    text_only,
)

REST: dict[str, set[str]] = {name: set() for name in vllm_arguments.CONFIGS if name != "ParallelConfig"}


def prompts(given: Any) -> list[list[int]]:
    return list(check_prompts(given, vocab_size=100, max_tokens=5))


class Tensor:
    """Anything with ``tolist``, as numpy's and torch's arrays have."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([(1, 2)], [[1, 2]]),
        (([1], [2]), [[1], [2]]),
        (Tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([Tensor([1, 2]), Tensor([3])], [[1, 2], [3]]),
        ([[0, 99]], [[0, 99]]),
    ],
)
def test_good(given: Any, expected: list[list[int]]) -> None:
    assert prompts(given) == expected


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([], "an empty list of prompts"),
        (Tensor([]), "an empty list of prompts"),
        ([[1], []], "prompt 1 is empty"),
        ([[1], Tensor([])], "prompt 1 is empty"),
        ([[1, 100]], "prompt 0 has 100 at position 1"),
        ([[1], [2, -1]], "prompt 1 has -1 at position 1"),
        ([[1.0]], "prompt 0 has 1.0 at position 0"),
        ([["1"]], "prompt 0 has '1' at position 0"),
        ([[None]], "prompt 0 has None at position 0"),
        ([[True]], "prompt 0 has True at position 0"),
        ([[[1]]], "prompt 0 has [1] at position 0"),
        ([1, 2], "prompt 0 is a int"),
        (Tensor([1, 2]), "prompt 0 is a int"),
        (["text"], "prompt 0 is a str"),
        ([{"input_ids": [1]}], "prompt 0 is a dict"),
        # Looked at before it is cut, so that the same data is good or bad whatever max_model_len is.
        ([[1, 1, 1, 1, 1, 1, 100]], "prompt 0 has 100 at position 6"),
    ],
)
def test_bad(given: Any, names: str) -> None:
    with pytest.raises(InputError) as refused:
        prompts(given)
    assert refused.value.id == "SC407"
    assert names in refused.value.found
    assert isinstance(refused.value, ValueError)  # as speculators raises


def test_long_prompts_are_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="speculators_compat"):
        assert prompts([[1] * 5, [2] * 6, [3] * 99]) == [[1] * 5, [2] * 5, [3] * 5]
    assert "2 of 3 prompts were cut to 5 tokens" in caplog.text


def test_prompts_are_copies() -> None:
    given = [[1, 2]]
    checked = prompts(given)
    checked[0].append(3)
    assert given == [[1, 2]]


@pytest.mark.parametrize("ids", [[0], [3, 1, 2], [2, 2], [0, 3]])
def test_good_layer_ids(ids: list[int]) -> None:
    assert check_layer_ids(ids, 4) == ids


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        ([4], "[4]"),
        ([0, -1, 9], "[-1, 9]"),
        ([], "an empty list"),
        ([1.0], "[1.0]"),
        (["1"], "['1']"),
        ([True], "[True]"),
    ],
)
def test_bad_layer_ids(ids: list[Any], names: str) -> None:
    with pytest.raises(InputError) as refused:
        check_layer_ids(ids, 4)
    assert refused.value.id == "SC406"
    assert names in refused.value.found
    assert "0 to 3" in refused.value.expected


def test_duplicate_layer_ids_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="speculators_compat"):
        check_layer_ids([1, 2, 1], 4)
    assert "duplicates" in caplog.text


def test_model_folder(tmp_path: Path) -> None:
    def refused(path: object, **kwargs: Any) -> str:
        with pytest.raises(InputError) as error:
            check_model(str(path), **kwargs)
        assert error.value.id == "SC405"
        return error.value.found

    assert "is not a folder" in refused(tmp_path / "nowhere")
    assert "is not a folder" in refused("./nowhere")
    assert "no config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "no weights" in refused(tmp_path)
    check_model(str(tmp_path), load_format="dummy")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    check_model(str(tmp_path))
    check_model("somebody/a-model")  # a name on the hub


def test_places_for_images() -> None:
    config = SimpleNamespace(media_placeholder_token_id=3, image_token_id=None, vision_token_id=7, bos_token_id=5)
    places = placeholder_tokens(config)
    assert places == placeholder_tokens(vars(config)) == {3, 7}
    with pytest.raises(InputError, match="prompt 1 has a place for an image"):
        list(check_prompts([[1, 5], [1, 3]], vocab_size=100, max_tokens=5, placeholders=places))
    assert list(check_prompts([[1, 5]], vocab_size=100, max_tokens=5, placeholders=places)) == [[1, 5]]


def test_places_in_a_part_of_the_config() -> None:
    thinker = SimpleNamespace(audio_token_index=4)
    assert placeholder_tokens(SimpleNamespace(image_token_id=3, thinker_config=thinker)) == {3, 4}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"prompt_token_ids": [1], "multi_modal_data": {}}, "a dict of prompt_token_ids, multi_modal_data"),
        ([[1], {"prompt_token_ids": [1], "multi_modal_data": {"image": "x"}}], "prompt 1 is a dict with multi_modal_data"),
        ([{"input_ids": [1], "pixel_values": Tensor([1.0]), "images": []}], "prompt 0 is a dict with pixel_values"),
        ([{"input_ids": [1], "multi_modal_data": None}], "prompt 0 is a dict of input_ids, multi_modal_data"),
        ([[1, 5], (1, 3)], "prompt 1 has a place for an image"),
    ],
)
def test_all_prompts_are_looked_at_for_images_before_the_first_is_used(given: Any, names: str) -> None:
    with pytest.raises(InputError) as refused:
        text_only(given, {3})
    assert refused.value.id == "SC407"
    assert names in refused.value.found


def test_text_alone_is_passed_on() -> None:
    assert text_only(([1], [2]), {3}) == [[1], [2]]
    assert text_only(Tensor([[1, 2]])) == [[1, 2]]
    assert text_only([[[1]], "text"], {3}) == [[[1]], "text"]  # what is wrong with these is said elsewhere
    assert media({"images": [], "image": None, "input_ids": [1]}) == []


def test_prefix_caching_is_refused() -> None:
    with pytest.raises(InputError, match="SC408"):
        check_prefix_caching({"enable_prefix_caching": True})
    check_prefix_caching({"enable_prefix_caching": False})
    check_prefix_caching({})


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "data_parallel_size"])
def test_layers_or_prompts_spread_over_processes_are_refused(name: str) -> None:
    for refuse in (
        check_parallelism,
        lambda given: engine._check(given, {*given}),
        lambda given: vllm_arguments.route(given, REST | {"ParallelConfig": {*given}}),
    ):
        with pytest.raises(InputError) as refused:
            refuse({name: 2})
        assert refused.value.id == "SC404"
        assert refused.value.found == f"{name}=2"
        refuse({name: 1})


def test_expert_parallelism_is_passed_on() -> None:
    given = {"enable_expert_parallel": True}
    engine._check(given, {*given})
    check_parallelism(given)
    fields = REST | {"ParallelConfig": {*given}}
    assert vllm_arguments.route(given, fields)["ParallelConfig"] == given
