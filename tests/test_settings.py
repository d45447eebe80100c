"""Environment variables and configure()."""

from __future__ import annotations

import json

import pytest

import speculators_compat
from speculators_compat import settings
from speculators_compat.errors import CompatError


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_configured", {})
    for name in (settings.OFF_SWITCH, settings.STRICT, settings.WAY, settings.VLLM_ARGS):
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    assert settings.current().vllm_args == {}
    assert settings.current().trust_remote_code is True
    assert not settings.switched_off()
    assert not settings.strict()
    assert settings.forced_way() is None


def test_variable_and_configure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.VLLM_ARGS, '{"dtype": "float32"}')
    assert settings.current().vllm_args == {"dtype": "float32"}
    speculators_compat.configure(vllm_args={"block_size": 32})  # wins, and replaces
    assert settings.current().vllm_args == {"block_size": 32}
    speculators_compat.configure(vllm_args={"trust_remote_code": False})
    assert settings.current().trust_remote_code is False


def test_the_callers_object_is_not_kept() -> None:
    args = {"dtype": "float32"}
    speculators_compat.configure(vllm_args=args)
    args["dtype"] = "other"
    settings.current().vllm_args["dtype"] = "another"
    assert settings.current().vllm_args == {"dtype": "float32"}


@pytest.mark.parametrize("text", ["{", "[]", '"float32"', "dtype=float32", "3"])
def test_variable_that_is_no_object(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(settings.VLLM_ARGS, text)
    with pytest.raises(CompatError, match=settings.VLLM_ARGS) as refused:
        settings.current()
    assert refused.value.id == "SC401"
    # The mend that is offered works.
    offered = refused.value.mend
    if "'" in offered:
        json.loads(offered.split("'")[1])


@pytest.mark.parametrize("args", [[("dtype", "float32")], "dtype", {1: 2}])
def test_configure_with_something_else(args: object) -> None:
    with pytest.raises(CompatError) as refused:
        speculators_compat.configure(vllm_args=args)  # type: ignore[arg-type]
    assert refused.value.id == "SC401"
    assert settings.current().vllm_args == {}


@pytest.mark.parametrize(
    ("value", "off"),
    [("0", True), ("off", True), ("OFF", True), (" false ", True), ("no", True), ("1", False), ("", False)],
)
def test_off_switch(monkeypatch: pytest.MonkeyPatch, value: str, off: bool) -> None:
    monkeypatch.setenv(settings.OFF_SWITCH, value)
    assert settings.switched_off() is off


@pytest.mark.parametrize(("value", "strict"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_strict(monkeypatch: pytest.MonkeyPatch, value: str, strict: bool) -> None:
    monkeypatch.setenv(settings.STRICT, value)
    assert settings.strict() is strict


@pytest.mark.parametrize("way", settings.WAYS)
def test_forced_way(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv(settings.WAY, way)
    assert settings.forced_way() == way


def test_forced_way_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.WAY, "sideways")
    with pytest.raises(CompatError) as refused:
        settings.forced_way()
    assert "sideways" in refused.value.found
    assert all(way in str(refused.value) for way in settings.WAYS)
