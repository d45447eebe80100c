"""The class on releases of speculators that no longer have it: import hooks, undoing, layer ids. Real runs: tests/real."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import stubs
from packaging.version import Version
from test_order import TOOLS, answer_of, on_stubs
from vllm_env import VLLM, VllmEnv, environments, interpreter

from speculators_compat import generator, layer_ids, restored, settings
from speculators_compat.adapter import GENERATOR_MODULE, GENERATOR_PACKAGE, State
from speculators_compat.doctor.facts import default_layer_ids
from speculators_compat.errors import CompatError, CompatWarning, InputError
from speculators_compat.matrix import load_matrix
from speculators_compat.registry import registry
from speculators_compat.surface import SourceSurface

CLASS = "VllmHiddenStatesGenerator"
MORE = f"""
PACKAGE = {GENERATOR_PACKAGE!r}
def left():
    package = sys.modules.get(PACKAGE)
    names = ("__getattr__", "{CLASS}", "vllm_hidden_states_generator", "custom_worker")
    found = [n for n in sys.modules if n.startswith(PACKAGE + ".")]
    return sorted(found + [n for n in vars(package) if n in names])
def fails(code):
    try:
        exec(code, {{}})
    except ImportError as error:
        return f"{{type(error).__name__}}: {{error}}"
    return "no error"
FROM_MODULE = f"from {{GENERATOR}} import {CLASS}"
FROM_PACKAGE = f"from {{PACKAGE}} import {CLASS}"
"""


def make_site(env: VllmEnv, target: Path, speculators: str = "0.9.0", vllm: str = VLLM) -> Path:
    release = environments.install_speculators("0.4.0.1", python=interpreter())
    site = stubs.site(env.site, release, target, vllm, speculators)
    (site / stubs.GENERATOR).unlink()
    return site


@pytest.fixture(scope="module")
def site(vllm_env: VllmEnv, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(vllm_env, tmp_path_factory.mktemp("newest"))


ORDERS = {
    "plugin first": "import speculators_compat; importlib.import_module(GENERATOR)",
    "from the package": "import speculators_compat; exec(FROM_PACKAGE)",
    "as an attribute": (
        "import speculators_compat; package = importlib.import_module(PACKAGE); package.VllmHiddenStatesGenerator"
    ),
    "the module from the package": (
        "import speculators_compat; exec('from speculators.data_generation import vllm_hidden_states_generator')"
    ),
    "speculators before": "import speculators, speculators_compat; importlib.import_module(GENERATOR)",
    "the package before": "importlib.import_module(PACKAGE); import speculators_compat; exec(FROM_PACKAGE)",
    "after an import that failed": "fails(FROM_MODULE); import speculators_compat; importlib.import_module(GENERATOR)",
    "vllm before": "import vllm.config, speculators_compat; exec(FROM_PACKAGE)",
    "activated twice": "import speculators_compat; exec(FROM_MODULE); speculators_compat.activate(); exec(FROM_PACKAGE)",
    "undone and done again": (
        "import speculators_compat; exec(FROM_PACKAGE); speculators_compat.deactivate();"
        "speculators_compat.activate(); exec(FROM_PACKAGE)"
    ),
    "undone before": (
        "import speculators_compat; speculators_compat.deactivate(); fails(FROM_PACKAGE);"
        "speculators_compat.activate(); exec(FROM_PACKAGE)"
    ),
    "undone thrice": (
        "import speculators_compat\n"
        "for _ in range(3):\n"
        "    exec(FROM_MODULE); speculators_compat.deactivate(); speculators_compat.activate()\n"
        "exec(FROM_MODULE)"
    ),
    "in many threads": (
        "import threading, speculators_compat\n"
        "ts = [threading.Thread(target=importlib.import_module, args=(GENERATOR,)) for _ in range(8)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]"
    ),
}
STATE = """
module = importlib.import_module(GENERATOR)
package = sys.modules[PACKAGE]
status = speculators_compat.status()
changes = sorted(c for c in status.changes if not c.startswith("activation"))
show(names=names(), way=status.way, changes=changes, states={a.id: str(a.state) for a in status.adapters},
     same=package.VllmHiddenStatesGenerator is vars(module)["VllmHiddenStatesGenerator"],
     told=module.VllmHiddenStatesGenerator.__module__ == GENERATOR == module.__name__)
"""


@pytest.fixture(scope="module")
def usual(site: Path) -> dict[str, Any]:
    return on_stubs(site, MORE + ORDERS["plugin first"] + "\n" + STATE)


def test_what_is_applied(usual: dict[str, Any]) -> None:
    assert usual["way"] == "restored"
    assert usual["same"]
    assert usual["told"]
    needed = {id for id, state in usual["states"].items() if state == "applied"}
    assert {"restored_generator", "config_loading", "engine", "layer_navigation"} <= needed
    assert not {"failed", "drifted", "undone"} & set(usual["states"].values())
    supplied = [place for place in usual["changes"] if place.startswith("restored_generator")]
    assert supplied == [
        f"restored_generator: {GENERATOR_PACKAGE}.__getattr__",
        f"restored_generator: sys.meta_path: {', '.join(restored.FILES)}",
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_ends_in_the_same_state(site: Path, usual: dict[str, Any], order: str) -> None:
    found = on_stubs(site, MORE + ORDERS[order] + "\n" + STATE)
    assert len(set(found["changes"])) == len(found["changes"]), "something was changed twice"
    assert found == usual


def test_undone_as_if_it_had_never_been(site: Path) -> None:
    code = """
importlib.import_module(PACKAGE)
off = [fails(FROM_MODULE), fails(FROM_PACKAGE)]
before, finders = snapshot(), len(sys.meta_path)
import speculators_compat
exec(FROM_PACKAGE); exec(FROM_MODULE)
importlib.import_module(PACKAGE + ".custom_worker")
during = left()
made = sys.modules[GENERATOR].VllmHiddenStatesGenerator
speculators_compat.deactivate()
try:
    made("model")
    error = None
except speculators_compat.CompatError as refused:
    error = refused.id
show(during=during, left=left(), off=off, now=[fails(FROM_MODULE), fails(FROM_PACKAGE)], error=error,
     changes=list(speculators_compat.status().changes), after=differences(before, snapshot()),
     finders=[type(f).__name__ for f in sys.meta_path if "speculators_compat" in type(f).__module__])
"""
    found = on_stubs(site, MORE + code)
    assert len(found["during"]) == 5
    assert found["left"] == []
    assert found["off"] == found["now"]
    assert [text.partition(":")[0] for text in found["off"]] == ["ModuleNotFoundError", "ImportError"]
    assert (found["changes"], found["after"], found["finders"]) == ([], [], [])
    assert found["error"] == "SC509"  # a class that somebody kept refuses to work unchecked


def test_nothing_is_imported_before_somebody_asks(site: Path) -> None:
    code = """
import speculators_compat
light = sorted({"torch", "vllm", "transformers", "speculators"} & sys.modules.keys())
importlib.import_module(PACKAGE)
show(light=light, vllm="vllm" in sys.modules, there=GENERATOR in sys.modules)
"""
    assert on_stubs(site, MORE + code) == {"light": [], "vllm": False, "there": False}


def test_off_switch(site: Path) -> None:
    code = "import speculators_compat\nshow(now=[fails(FROM_MODULE), fails(FROM_PACKAGE)])"
    found = on_stubs(site, MORE + code, SPECULATORS_COMPAT="0")
    assert [text.partition(":")[0] for text in found["now"]] == ["ModuleNotFoundError", "ImportError"]


@pytest.mark.parametrize(("way", "error"), [("engine", None), ("in-process", "SC307"), ("restored", "SC402")])
def test_forced_way(site: Path, way: str, error: str | None) -> None:
    code = """
import speculators_compat
errors = []
for how in (FROM_MODULE, FROM_PACKAGE, FROM_MODULE):
    try:
        exec(how, {})
        errors.append(None)
    except speculators_compat.CompatError as refused:
        errors.append(refused.id)
show(errors=errors, way=speculators_compat.status().way)
"""
    found = on_stubs(site, MORE + code, SPECULATORS_COMPAT_WAY=way)
    assert found["errors"] == [error] * 3
    assert found["way"] == ("" if error else "restored")


CHILD = """
def work(connection):
    from importlib.metadata import entry_points
    (point,) = entry_points(group="vllm.general_plugins", name="speculators_compat")
    point.load()()
    try:
        from speculators.data_generation import VllmHiddenStatesGenerator
        import tools
        connection.send(tools.names())
    except ImportError:
        connection.send(None)
"""


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children(site: Path, tmp_path: Path, method: str, activated: bool) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "workers.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(
        "import multiprocessing, tools, workers\n"
        'if __name__ == "__main__":\n'
        f"    {'import speculators_compat' if activated else 'pass'}\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    here, there = context.Pipe()\n"
        "    process = context.Process(target=workers.work, args=(there,))\n"
        "    process.start()\n"
        "    tools.show(names=here.recv())\n"
        "    process.join(30)\n"
    )
    variables = {"PYTHONPATH": f"{site}:{tmp_path}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "parent.py")], capture_output=True, text=True, timeout=60, env=variables
    )
    names = answer_of(done.returncode, done.stdout + done.stderr)["names"]
    assert (names is not None and "class.generate" in names) is activated


# --- what is restored ---


def _methods(file: Path, name: str) -> dict[str, str]:
    """Methods of a class to their parameters, as written."""
    (found,) = (
        node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {child.name: ast.unparse(child.args) for child in found.body if isinstance(child, ast.FunctionDef)}


def test_the_constructor_is_that_of_0_4() -> None:
    release = environments.install_speculators("0.4.0.1", python=interpreter())
    old = _methods(release / stubs.GENERATOR, CLASS)
    new = _methods(restored.FILES[GENERATOR_MODULE], CLASS)
    assert new["__init__"] == old["__init__"]
    assert "token_ids" in new["generate"]
    worker = (release / stubs.GENERATOR).with_name("custom_worker.py")
    (name,) = ("HiddenStatesWorkerExtension",)
    assert _methods(worker, name).keys() - _methods(restored.FILES[f"{GENERATOR_PACKAGE}.custom_worker"], name).keys() == {
        "_store_captured_states"  # called by the old worker itself
    }


def test_the_old_worker_protocol_is_refused() -> None:
    from speculators_compat.restored.custom_worker import HiddenStatesWorkerExtension
    from speculators_compat.worker import HiddenStatesExtension

    extension = HiddenStatesWorkerExtension()
    assert isinstance(extension, HiddenStatesExtension)
    for call in (
        lambda: extension._setup_hidden_states_capture([1]),
        lambda: extension._set_request_metadata({}),
        extension._reset_capture,
        extension._get_captured_states,
    ):
        with pytest.raises(CompatError, match="restored") as caught:
            call()
        assert caught.value.id == "SC308"


@pytest.mark.parametrize("version", ["0.5.0", "0.6.0", "0.7.0", "0.8.0", "0.9.0"])
def test_releases_have_neither_the_module_nor_another_one_of_its_name(version: str) -> None:
    surface = SourceSurface({"speculators": environments.install_speculators(version, python=interpreter())})
    probe = registry().adapters["restored_generator"].probe(surface)
    assert probe.state is State.APPLIED, probe.reason


@pytest.mark.parametrize("version", ["0.3.0", "0.4.0.1"])
def test_a_module_that_is_there_is_left_alone(version: str) -> None:
    surface = SourceSurface({"speculators": environments.install_speculators(version, python=interpreter())})
    probe = registry().adapters["restored_generator"].probe(surface)
    assert probe.state is State.NOT_NEEDED


@pytest.mark.parametrize(
    ("text", "reason"), [("class VllmHiddenStatesGenerator: ...", "another"), (None, "no longer exists")]
)
def test_another_shape_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    folder = tmp_path / "speculators"
    (folder / "data_generation").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    if text is not None:
        (folder / "data_generation" / "__init__.py").write_text(text)
    probe = registry().adapters["restored_generator"].probe(SourceSurface({"speculators": tmp_path}))
    assert probe.state is State.DRIFTED
    assert reason in probe.reason


def test_check_and_activation_agree(vllm_env: VllmEnv, usual: dict[str, Any]) -> None:
    """What compat-check reads from source is what activation finds in the live modules."""
    release = environments.install_speculators("0.9.0", python=interpreter())
    roots = {"vllm": vllm_env.site, "transformers": vllm_env.site, "speculators": release}
    surface = SourceSurface(roots, supplied=restored.FILES)
    ids = load_matrix().adapter_sets["restored"]
    said = {id: registry().adapters[id].probe(surface).state for id in ids}
    for id, state in usual["states"].items():
        assert state in (str(said[id]), "waiting"), id


# --- layer ids ---


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_configured", {})
    monkeypatch.delenv(settings.LAYER_IDS, raising=False)


def counted(ids: Any, *, restored: bool = True) -> tuple[Any, list[str]]:
    arguments = {"layer_ids": ids}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        generator._count_layers(arguments, restored=restored, release={"speculators": "0.9.0"})
    assert all(w.category is CompatWarning for w in caught)
    return arguments["layer_ids"], [str(w.message) for w in caught]


def test_explicit_ids_mean_what_they_always_meant() -> None:
    ids, said = counted([2, 16, 29, 31])
    assert ids == [2, 16, 29, 31]
    assert len(said) == 1
    assert "boundaries [3, 17, 30, 32], which speculators 0.9.0 counts" in said[0]
    assert "--target-layer-ids 3 17 30," in said[0]
    assert counted([2, 16, 29, 31], restored=False) == ([2, 16, 29, 31], [])
    assert counted(None) == (None, [])


def test_one_number_is_no_list_of_ids() -> None:
    for settled in (True, False):
        with pytest.raises(InputError, match=r"layer_ids=\[4\]") as refused:
            counted(4, restored=settled)
        assert refused.value.id == "SC406"


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize("by", ["configure", "environment"])
def test_the_setting_chooses(monkeypatch: pytest.MonkeyPatch, by: str, restored: bool) -> None:
    def choose(convention: Any) -> None:
        if by == "configure":
            settings.configure(layer_convention=convention)
        else:
            monkeypatch.setenv(settings.LAYER_IDS, convention)

    choose("boundary")
    assert counted([3, 17, 30, 32], restored=restored) == ([2, 16, 29, 31], [])
    for wrong in ([0, 3], [-1], ["a"], [True], []):
        with pytest.raises(InputError) as caught:
            counted(wrong, restored=restored)
        assert caught.value.id == "SC411"
    choose("after-layer")
    assert counted([2, 16, 29, 31], restored=restored) == ([2, 16, 29, 31], [])


@pytest.mark.parametrize("by", ["configure", "environment"])
def test_a_convention_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    if by == "environment":
        monkeypatch.setenv(settings.LAYER_IDS, "boundaries")
        action = settings.current
    else:

        def action() -> Any:
            settings.configure(layer_convention="boundaries")  # type: ignore[arg-type]

    with pytest.raises(CompatError) as caught:
        action()
    assert caught.value.id == "SC412"


def test_checks_before_the_load_take_the_same_defaults() -> None:
    for version in ("0.3.0", "0.4.0.1", "0.5.0", "0.9.0"):
        boundaries = Version(version) >= Version("0.5")
        assert default_layer_ids(61, Version(version)) == layer_ids.generator_defaults(61, boundaries=boundaries)
        assert layer_ids.trainer_format(Version(version)) == ("safetensors" if boundaries else "pt")
    assert default_layer_ids(61) == layer_ids.generator_defaults(61, boundaries=False)
    assert layer_ids.trainer_format(None) == "pt"


def test_defaults_are_those_of_the_installed_trainer() -> None:
    assert layer_ids.generator_defaults(32, boundaries=False) == [2, 16, 29, 31]
    assert layer_ids.generator_defaults(32, boundaries=True) == [1, 15, 28, 31]
    assert layer_ids.to_boundary([1, 15, 28, 31], 32) == layer_ids.default_layer_ids("0.9.0", 32)
    with pytest.raises(InputError, match="SC411"):
        layer_ids.generator_defaults(3, boundaries=True)
