"""Source text and live objects must tell the same, or compat-check would promise what activation then refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_env import SPECULATORS, VLLM, VllmEnv

from speculators_compat.surface import LiveSurface, Parameters, SourceSurface

TESTS = Path(__file__).parent
COMPARE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import stubs
from speculators_compat.surface import LiveSurface
import speculators.data_generation.vllm_hidden_states_generator, torch, transformers, vllm
packages = ("vllm", "speculators", "transformers", "torch")
recorder = stubs.Recorder({p: Path(sys.modules[p].__file__).parents[1] for p in packages})
from_source = stubs.probes(recorder)
live = LiveSurface()
answer = {"version": vllm.__version__, "asked": [], "probes": {}}
for kind, args in sorted(recorder.asked):
    values = [getattr(surface, kind)(*args) for surface in (recorder, live)]
    if kind == "text_lists":
        # The compiler drops repeated constants and keeps others; what counts is the lists that are written out.
        values = [sorted(set(v or ())) for v in values]
        values[1] = [v for v in values[1] if v in values[0]]
    answer["asked"].append([kind, args, *map(repr, values)])
for id, probe in stubs.probes(live).items():
    answer["probes"][id] = [repr(from_source[id]), repr(probe)]
print("ANSWER" + json.dumps(answer))
"""


@pytest.mark.real
@pytest.mark.parametrize("speculators", SPECULATORS)
def test_source_and_live_agree_on_a_real_vllm(vllm_env: VllmEnv, speculators: str) -> None:
    done = vllm_env.run("-c", COMPARE, TESTS, speculators=speculators, SPECULATORS_COMPAT="0")
    assert done.returncode == 0, done.stdout
    answer = json.loads(done.stdout.rpartition("ANSWER")[2])
    assert answer["version"] == VLLM
    assert len(answer["asked"]) > 30
    assert [asked for asked in answer["asked"] if asked[2] != asked[3]] == []
    assert [(id, *both) for id, both in answer["probes"].items() if both[0] != both[1]] == []


MODULE = """
import dataclasses
from dataclasses import InitVar
from typing import Any, ClassVar, overload
from .other import moved as renamed, Moved
if True:
    from .other import conditional
try:
    import nothing_of_the_kind
except ImportError:
    def fallback(a): ...

def plain(a, b=1, *args, c, d=2, **kwargs): ...
def closed(a, /, b, *, c=1): ...

class Class:
    def __init__(self, x, *, y=1): ...
    def method(self, z): ...
    @overload
    def twice(self, a: int): ...
    @overload
    def twice(self, a: str): ...
    def twice(self, a, b=2): ...

@dataclasses.dataclass
class Fields:
    required: int
    initial: InitVar[int]
    kind: ClassVar[str] = "k"
    made: list = dataclasses.field(default_factory=list)
    hidden: int = dataclasses.field(init=False)
    optional: Any = None

CONSTANT = 3
def caller():
    plain(1, c=2)
    return Fields(required=1, initial=2)
"""
OTHER = """
def moved(m, n=1): ...
class Moved:
    def __init__(self, here): ...
def conditional(c): ...
"""
NAMES = [
    "plain",
    "closed",
    "fallback",
    "renamed",
    "conditional",
    "Moved",
    "Class",
    "Class.method",
    "Class.twice",
    "Fields",
    "CONSTANT",
    "absent",
    "Class.absent",
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "surfaced"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .module import Class\n")
    (folder / "module.py").write_text(MODULE)
    (folder / "other.py").write_text(OTHER)
    (folder / "broken.py").write_text("def broken(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_both_read_the_same(package: Path, name: str) -> None:
    source, live = SourceSurface({"surfaced": package}), LiveSurface()
    name = f"surfaced.module:{name}"
    assert source.has(name) == live.has(name) == ("absent" not in name)
    assert source.parameters(name) == live.parameters(name)


def test_what_is_read(package: Path) -> None:
    source = SourceSurface({"surfaced": package})
    assert source.parameters("surfaced.module:plain") == Parameters(("a", "b", "c", "d"), ("a", "c"), True)
    assert source.parameters("surfaced.module:Class.twice") == Parameters(("a", "b"), ("a",))
    assert source.parameters("surfaced.module:Fields") == Parameters(
        ("required", "initial", "made", "optional"), ("required", "initial")
    )
    assert source.parameters("surfaced.module:renamed") == Parameters(("m", "n"), ("m",))
    assert source.parameters("surfaced:Class") == Parameters(("x", "y"), ("x",))
    for surface in (source, LiveSurface()):
        assert surface.call_keywords("surfaced.module", "Fields") == ("required", "initial")
        assert surface.call_keywords("surfaced.module", "closed") is None
        assert surface.has_module("surfaced.other")
        assert not surface.has_module("surfaced.nowhere")
        assert not surface.has_module("surfaced.nowhere.deeper")
        assert not surface.has_module("nowhere")


def test_a_file_that_is_no_python_holds_no_names(package: Path) -> None:
    assert not SourceSurface({"surfaced": package}).has("surfaced.broken:broken")


def test_parameters_compared_with_a_call() -> None:
    takes = Parameters(("a", "b"), ("a",))
    assert takes.missing(["b"]) == ["a"]
    assert takes.unknown(["a", "x"]) == ["x"]
    assert Parameters(("a",), (), open=True).unknown(["x"]) == []
