"""The undo log: every change can be listed and is undone to the very same object."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest
import wrapt

from speculators_compat.errors import CompatWarning
from speculators_compat.patcher import Journal


def add(a: int, b: int = 1) -> int:
    return a + b


class Base:
    def inherited(self) -> str:
        return "base"


class Owner(Base):
    value = object()

    def method(self, x: int) -> int:
        return x

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def of_class(cls, x: int) -> tuple[type, int]:
        return cls, x


def double(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs), "wrapped"


@pytest.fixture
def module() -> types.ModuleType:
    module = types.ModuleType("a_module")
    module.function = add  # type: ignore[attr-defined]
    return module


def test_replace_and_undo(module: types.ModuleType) -> None:
    journal, before = Journal(), dict(vars(module))
    journal.replace(module, "function", "other", adapter="x")
    journal.replace(module, "added", 1, adapter="y")
    assert (module.function, module.added) == ("other", 1)
    assert [(c.adapter, c.where) for c in journal.changes] == [("x", "a_module.function"), ("y", "a_module.added")]
    assert journal.undo() == []
    assert vars(module) == before
    assert module.function is add
    assert journal.changes == []


@pytest.mark.parametrize("name", ["value", "method", "static", "of_class"])
def test_wrapping_what_a_class_defines(name: str) -> None:
    journal, before = Journal(), dict(vars(Owner))
    journal.wrap(Owner, name, double, adapter="x") if name != "value" else journal.replace(
        Owner, name, 2, adapter="x"
    )
    owner = Owner()
    expected = {"value": 2, "method": (3, "wrapped"), "static": (3, "wrapped"), "of_class": ((Owner, 3), "wrapped")}
    got = getattr(owner, name)
    assert (got if name == "value" else got(3)) == expected[name]
    journal.undo()
    after = dict(vars(Owner))
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)


def test_wrapping_what_a_class_inherits_leaves_the_base_alone() -> None:
    journal, before = Journal(), dict(vars(Owner))
    journal.wrap(Owner, "inherited", double, adapter="x")
    assert Owner().inherited() == ("base", "wrapped")
    assert Base().inherited() == "base"
    journal.undo()
    assert "inherited" not in vars(Owner)
    assert vars(Owner).keys() == before.keys()
    assert Owner().inherited() == "base"


def test_a_wrapper_keeps_name_and_signature(module: types.ModuleType) -> None:
    journal = Journal()
    journal.wrap(module, "function", double, adapter="x")
    assert isinstance(module.function, wrapt.FunctionWrapper)
    assert module.function.__name__ == "add"
    assert module.function(1, b=4) == (5, "wrapped")


def test_two_layers_come_off_in_order(module: types.ModuleType) -> None:
    journal = Journal()
    journal.wrap(module, "function", double, adapter="x")
    journal.wrap(module, "function", double, adapter="y")
    assert module.function(1) == ((2, "wrapped"), "wrapped")
    journal.undo(down_to=1)
    assert module.function(1) == (2, "wrapped")
    journal.undo()
    assert module.function is add


def test_somebody_elses_later_change_is_left_and_named(module: types.ModuleType) -> None:
    journal = Journal()
    journal.replace(module, "function", 1, adapter="x")
    journal.replace(module, "other", 2, adapter="x")
    module.function = theirs = object()  # type: ignore[attr-defined]
    with pytest.warns(CompatWarning, match=r"a_module\.function"):
        assert journal.undo() == ["a_module.function"]
    assert module.function is theirs
    assert not hasattr(module, "other")


def test_a_group_is_all_or_nothing(module: types.ModuleType) -> None:
    journal = Journal()
    with journal:
        journal.replace(module, "kept", 1, adapter="x")

    def group() -> None:
        with journal:
            journal.replace(module, "function", 1, adapter="x")
            with journal:
                journal.replace(module, "inner", 1, adapter="x")
            journal.set_env("SC_TEST_VARIABLE", "1", adapter="x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        group()
    assert module.kept == 1
    assert module.function is add
    assert not hasattr(module, "inner")
    assert "SC_TEST_VARIABLE" not in os.environ
    assert [c.where for c in journal.changes] == ["a_module.kept"]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SC_TEST_OLD", "before")
    monkeypatch.delenv("SC_TEST_NEW", raising=False)
    journal = Journal()
    journal.set_env("SC_TEST_OLD", "after", adapter="x")
    journal.set_env("SC_TEST_NEW", "1", adapter="x")
    assert (os.environ["SC_TEST_OLD"], os.environ["SC_TEST_NEW"]) == ("after", "1")
    journal.undo()
    assert os.environ["SC_TEST_OLD"] == "before"
    assert "SC_TEST_NEW" not in os.environ


def test_environment_that_the_user_changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SC_TEST_OLD", "before")
    journal = Journal()
    journal.set_env("SC_TEST_OLD", "after", adapter="x")
    monkeypatch.setenv("SC_TEST_OLD", "theirs")
    with pytest.warns(CompatWarning, match="SC_TEST_OLD"):
        journal.undo()
    assert os.environ["SC_TEST_OLD"] == "theirs"


def test_modules() -> None:
    journal, module = Journal(), types.ModuleType("sc_test_module")
    journal.add_module("sc_test_module", module, adapter="x")
    assert __import__("sc_test_module") is module
    journal.undo()
    assert "sc_test_module" not in sys.modules


def test_code_object() -> None:
    def function() -> int:
        return 1

    def other() -> int:
        return 2

    journal, code, alias = Journal(), function.__code__, function
    journal.replace_code(function, other.__code__, adapter="x")
    assert alias() == 2
    journal.undo()
    assert function.__code__ is code
    assert alias() == 1


def test_an_object_is_extended_and_not_kept_alive() -> None:
    class Close:
        calls = 0

        def close(self) -> None:
            self.calls += 1

    journal, owner, closer = Journal(), Base(), Close()
    journal.extend(owner, {"extra": 1}, closer.close, adapter="x")
    assert owner.extra == 1  # type: ignore[attr-defined]
    journal.undo()
    assert not hasattr(owner, "extra")
    assert closer.calls == 1

    journal.extend(owner, {"extra": 1}, closer.close, adapter="x")
    del owner
    assert journal.undo() == []
