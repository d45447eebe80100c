"""When the plugin is imported, activated and undone: every order, in processes of their own.

Plumbing that needs signatures only runs on stubs (see ``stubs.py``); where the real packages matter, on the real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stubs
from vllm_env import SPECULATORS, VLLM, VllmEnv, environments, interpreter

from speculators_compat.adapter import GENERATOR_MODULE

#: Put before every snippet: ``names()`` tells which attributes of the generator's module and class are patched.
TOOLS = f"""
import importlib, json, os, sys, types, warnings
GENERATOR = {GENERATOR_MODULE!r}
PACKAGES = ("vllm", "speculators", "transformers", "torch")
def show(**answer):
    print("ANSWER" + json.dumps(answer))
def ours(value):
    if type(value).__name__ == "FunctionWrapper":  # wrapt's; it answers for what it wraps in all other respects
        return True
    return "speculators_compat" in type(value).__module__ + " " + str(getattr(value, "__module__", ""))
def names():
    module = sys.modules[GENERATOR]
    found = [n for n, v in vars(module).items() if ours(v)]
    found += ["class." + n for n, v in vars(module.VllmHiddenStatesGenerator).items() if ours(v)]
    return sorted(found)
def snapshot():
    taken = {{}}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in PACKAGES and isinstance(module, types.ModuleType):
            taken[name] = dict(vars(module))
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    taken[name + ":" + key] = dict(vars(value))
    return taken
def differences(before, after):
    # Modules that were imported meanwhile become attributes of their packages; that is no change of ours.
    return sorted(
        f"{{owner}}.{{key}}"
        for owner in before.keys() & after.keys()
        for key in before[owner].keys() | after[owner].keys()
        if before[owner].get(key) is not after[owner].get(key)
        and not isinstance(after[owner].get(key), types.ModuleType)
    )
"""
PATCHED = ["class.__init__", "class._setup_capture", "class.generate", "class.shutdown", "Scheduler", "SchedulerConfig"]


@pytest.fixture(scope="module")
def site(vllm_env: VllmEnv, tmp_path_factory: pytest.TempPathFactory) -> Path:
    release = environments.install_speculators("0.4.0.1", python=interpreter())
    return stubs.site(vllm_env.site, release, tmp_path_factory.mktemp("stubs"), VLLM, "0.4.0.1")


def answer_of(returncode: int, output: str) -> dict:
    assert returncode == 0, output
    assert "ANSWER" in output, output
    return json.loads(output.rpartition("ANSWER")[2].splitlines()[0])


def on_stubs(site: Path, code: str, **variables: str) -> dict:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPECULATORS_COMPAT", "VLLM_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-c", TOOLS + code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env={**kept, "PYTHONPATH": str(site), **variables},
    )
    return answer_of(done.returncode, done.stdout)


def on_real(env: VllmEnv, code: str, speculators: str = "0.4.0.1", **variables: str) -> dict:
    done = env.run("-c", TOOLS + code, speculators=speculators, **variables)
    return answer_of(done.returncode, done.stdout)


ORDERS = {
    "plugin first": "import speculators_compat; importlib.import_module(GENERATOR)",
    "plugin after transformers": "import transformers, speculators_compat; importlib.import_module(GENERATOR)",
    "plugin after vllm": "import vllm.config, speculators_compat; importlib.import_module(GENERATOR)",
    "plugin after speculators": "import speculators, speculators_compat; importlib.import_module(GENERATOR)",
    "plugin last": "importlib.import_module(GENERATOR); import speculators_compat",
    "plugin last, class taken before": (
        f"from {GENERATOR_MODULE} import VllmHiddenStatesGenerator; import speculators_compat"
    ),
    "activated twice": "import speculators_compat; importlib.import_module(GENERATOR); speculators_compat.activate()",
    "activated by hand": (
        "os.environ['SPECULATORS_COMPAT'] = '0'; import speculators_compat; del os.environ['SPECULATORS_COMPAT'];"
        "speculators_compat.activate(); importlib.import_module(GENERATOR)"
    ),
    "undone and done again": (
        "import speculators_compat; importlib.import_module(GENERATOR); speculators_compat.deactivate();"
        "assert not names(); speculators_compat.activate()"
    ),
    "undone before, done after": (
        "import speculators_compat; speculators_compat.deactivate(); importlib.import_module(GENERATOR);"
        "assert not names(); speculators_compat.activate()"
    ),
    "in a thread": (
        "import threading, speculators_compat; t = threading.Thread(target=importlib.import_module, args=(GENERATOR,));"
        "t.start(); t.join()"
    ),
    "in many threads": (
        "import threading, speculators_compat\n"
        "ts = [threading.Thread(target=importlib.import_module, args=(GENERATOR,)) for _ in range(8)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]"
    ),
}
STATE = """
status = speculators_compat.status()
show(names=names(), active=status.active, way=status.way, changes=list(status.changes),
     states={a.id: str(a.state) for a in status.adapters})
"""


@pytest.fixture(scope="module")
def usual(site: Path) -> dict:
    return on_stubs(site, ORDERS["plugin first"] + "\n" + STATE)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_ends_in_the_same_state(site: Path, usual: dict, order: str) -> None:
    found = on_stubs(site, ORDERS[order] + "\n" + STATE)
    assert set(PATCHED) <= set(found["names"])
    assert found["active"]
    assert len(set(found["changes"])) == len(found["changes"]), "something was changed twice"
    assert found["names"] == usual["names"]
    assert sorted(found["changes"]) == sorted(usual["changes"])
    # Whatever waits for a module that was not imported waits in both.
    assert found["states"] == usual["states"]


@pytest.mark.parametrize("way", ["in-process", "engine"])
def test_undone_to_the_very_same_objects(site: Path, way: str) -> None:
    code = """
importlib.import_module(GENERATOR)
environment, before, meta = dict(os.environ), snapshot(), list(sys.meta_path)
import speculators_compat
during = differences(before, snapshot())
marked = dict(os.environ) != environment
speculators_compat.deactivate()
status = speculators_compat.status()
speculators_compat.deactivate()
after = differences(before, snapshot())
show(during=during, after=after, marked=marked, environment=dict(os.environ) == environment,
     refusers=[str(f) for f in sys.meta_path if "Refuser" in str(f)],
     changes=list(status.changes), active=status.active,
     states=sorted({str(a.state) for a in status.adapters}))
"""
    found = on_stubs(site, code, SPECULATORS_COMPAT_WAY=way)
    assert any("VllmHiddenStatesGenerator.generate" in place for place in found["during"])
    assert found["marked"]
    assert found["after"] == []
    assert found["environment"]
    assert (found["refusers"], found["changes"], found["active"]) == ([], [], False)
    assert "undone" in found["states"]
    assert "applied" not in found["states"]


def test_undone_when_activated_first(site: Path) -> None:
    code = """
import speculators_compat
module = importlib.import_module(GENERATOR)
speculators_compat.deactivate()
import vllm.config, vllm.v1.core.sched.scheduler, transformers
show(names=names(), same=[module.SchedulerConfig is vllm.config.SchedulerConfig,
     module.Scheduler is vllm.v1.core.sched.scheduler.Scheduler, module.AutoConfig is transformers.AutoConfig])
"""
    assert on_stubs(site, code) == {"names": [], "same": [True, True, True]}


def test_off_switch(site: Path) -> None:
    code = """
environment, hooks = dict(os.environ), list(sys.meta_path)
import speculators_compat
importlib.import_module(GENERATOR)
show(names=names(), active=speculators_compat.status().active, environment=dict(os.environ) == environment)
"""
    found = on_stubs(site, code, SPECULATORS_COMPAT="0")
    assert found == {"names": [], "active": False, "environment": True}


def test_strict_refuses_what_the_matrix_does_not_list(vllm_env: VllmEnv, tmp_path: Path) -> None:
    release = environments.install_speculators("0.4.0.1", python=interpreter())
    site = stubs.site(vllm_env.site, release, tmp_path, "9.9.0", "0.4.0.1")
    code = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import speculators_compat, transformers, vllm
    errors = []
    for _ in range(2):
        try:
            importlib.import_module(GENERATOR)
        except speculators_compat.CompatError as error:
            errors.append(error.id)
show(errors=errors, warned=[str(w.message) for w in caught if w.category is speculators_compat.CompatWarning],
     left=[c for c in speculators_compat.status().changes if "activation" not in c])
"""
    strict = on_stubs(site, code, SPECULATORS_COMPAT_STRICT="1", SPECULATORS_COMPAT_WAY="engine")
    assert strict == {"errors": ["SC303", "SC303"], "warned": [], "left": []}
    lenient = on_stubs(site, code, SPECULATORS_COMPAT_WAY="engine")
    assert lenient["errors"] == []
    assert len(lenient["warned"]) == 1
    assert "9.9.0" in lenient["warned"][0]


def test_unsupported_combination_is_refused_where_it_matters_only(vllm_env: VllmEnv, tmp_path: Path) -> None:
    """Importing vLLM or transformers alone must go on working."""
    release = environments.install_speculators("0.4.0.1", python=interpreter())
    site = stubs.site(vllm_env.site, release, tmp_path, "0.8.0", "0.4.0.1")
    code = """
import speculators_compat, transformers, vllm, speculators
try:
    importlib.import_module(GENERATOR)
    error = None
except speculators_compat.CompatError as refused:
    error = refused.id
speculators_compat.deactivate()
importlib.import_module(GENERATOR)
show(error=error, names=names())
"""
    assert on_stubs(site, code) == {"error": "SC203", "names": []}


@pytest.mark.parametrize(
    ("given", "during"),
    [
        (None, None),
        ("", "speculators_compat"),
        ("theirs", "theirs,speculators_compat"),
        ("a,speculators_compat,b", "a,speculators_compat,b"),
    ],
)
def test_vllm_plugins_set_by_the_user(site: Path, given: str | None, during: str | None) -> None:
    code = """
import speculators_compat
during = os.environ.get("VLLM_PLUGINS")
speculators_compat.deactivate()
show(during=during, after=os.environ.get("VLLM_PLUGINS"))
"""
    variables = {} if given is None else {"VLLM_PLUGINS": given}
    assert on_stubs(site, code, **variables) == {"during": during, "after": given}


WORKER = """
def work(connection):
    import os, sys
    before = "speculators_compat.activation" in sys.modules and sys.modules["speculators_compat"].status().active
    # What vLLM does in each process that it starts.
    from importlib.metadata import entry_points
    (point,) = entry_points(group="vllm.general_plugins", name="speculators_compat")
    point.load()()
    import importlib
    importlib.import_module("speculators.data_generation.vllm_hidden_states_generator")
    import tools
    plugin = sys.modules.get("speculators_compat")  # not even imported where nobody asked for it
    connection.send([before, plugin is not None and plugin.status().active, tools.names()])
"""
PARENT = """
import multiprocessing
import workers
if __name__ == "__main__":
    {before}
    context = multiprocessing.get_context({method!r})
    here, there = context.Pipe()
    process = context.Process(target=workers.work, args=(there,))
    process.start()
    before, active, found = here.recv()
    process.join(30)
    tools.show(before=before, active=active, names=found, exit=process.exitcode)
"""


@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children(site: Path, tmp_path: Path, method: str, activated: bool) -> None:
    """vLLM calls the plugin's entry point in its workers: it acts where the parent activated, else it is inert."""
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "workers.py").write_text(WORKER)
    # The plugin is installed and its entry point called in both cases; only one parent wanted it.
    before = "import speculators_compat" if activated else "pass"
    (tmp_path / "parent.py").write_text(
        "import tools\n" + PARENT.format(before=before, method=method)
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPECULATORS_COMPAT", "VLLM_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "parent.py")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env={**kept, "PYTHONPATH": os.pathsep.join([str(site), str(tmp_path)])},
    )
    found = answer_of(done.returncode, done.stdout)
    assert found["exit"] == 0
    assert found["active"] is activated
    assert bool(found["names"]) is activated
    # A forked child has what its parent had; others come to it by the entry point.
    assert found["before"] is (activated and method == "fork")


def test_a_child_of_a_parent_that_undid_is_inert(site: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "workers.py").write_text(WORKER)
    (tmp_path / "parent.py").write_text(
        "import tools\n"
        + PARENT.format(before="import speculators_compat; speculators_compat.deactivate()", method="spawn")
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPECULATORS_COMPAT", "VLLM_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "parent.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        # The spawned child imports the parent's module again: only the entry point may decide there.
        env={**kept, "PYTHONPATH": os.pathsep.join([str(site), str(tmp_path)])},
    )
    found = answer_of(done.returncode, done.stdout)
    assert (found["active"], found["names"]) == (False, [])


@pytest.mark.real
@pytest.mark.parametrize("speculators", SPECULATORS)
@pytest.mark.parametrize("way", ["in-process", "engine"])
def test_real_packages_are_put_back(vllm_env: VllmEnv, speculators: str, way: str) -> None:
    """The whole of vLLM, speculators, transformers and torch, class by class, after undoing."""
    code = """
os.environ["SPECULATORS_COMPAT"] = "0"
import speculators_compat, speculators_compat.worker, speculators_compat.registry
speculators_compat.registry.registry()
module = importlib.import_module(GENERATOR)
import vllm.entrypoints.llm, vllm.engine.arg_utils, vllm.config.speculative, transformers.configuration_utils, torch
from vllm.v1.engine.llm_engine import LLMEngine
before = snapshot()
kept = module.VllmHiddenStatesGenerator
old = kept.__new__(kept)  # as one that was made before activation: its constructor was the released one
del os.environ["SPECULATORS_COMPAT"]
speculators_compat.activate()
first = list(speculators_compat.status().changes)
states = {a.id: str(a.state) for a in speculators_compat.status().adapters}
speculators_compat.activate()
twice = list(speculators_compat.status().changes) == first
during = differences(before, snapshot())
try:
    old.generate([[1]])
    refused = None
except speculators_compat.CompatError as error:
    refused = error.id
same_class = kept is module.VllmHiddenStatesGenerator
patched_class = ours(vars(kept)["generate"])
speculators_compat.deactivate()
after = differences(before, snapshot())
speculators_compat.activate()
again = sorted(speculators_compat.status().changes) == sorted(first)
speculators_compat.deactivate()
show(during=during, after=after, twice=twice, again=again, refused=refused, same_class=same_class,
     patched_class=patched_class, end=differences(before, snapshot()), states=states, compared=len(before))
"""
    found = on_real(vllm_env, code, speculators, SPECULATORS_COMPAT_WAY=way)
    assert found["compared"] > 3000  # modules and classes
    assert any(place.endswith("VllmHiddenStatesGenerator.generate") for place in found["during"])
    assert found["after"] == []
    assert found["end"] == []
    assert found["twice"]
    assert found["again"]
    # The class that the script imported before activation is the one that works after it ...
    assert found["same_class"]
    assert found["patched_class"]
    # ... and an object that the released constructor made is refused rather than half served.
    assert found["refused"] == "SC509"
    assert set(found["states"].values()) <= {"applied", "not-needed", "not-applicable", "waiting"}


@pytest.mark.real
def test_a_real_vllm_loads_the_plugin_whatever_vllm_plugins_says(vllm_env: VllmEnv) -> None:
    code = """
import speculators_compat
import subprocess
child = "import sys; from vllm.plugins import load_general_plugins; load_general_plugins(); " \\
    "m = sys.modules.get('speculators_compat'); print('CHILD', bool(m) and m.status().active)"
def active():
    out = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    return out.stdout.rpartition("CHILD ")[2].strip() or out.stderr[-2000:]
first = active()
speculators_compat.deactivate()
show(activated=first, undone=active())
"""
    assert on_real(vllm_env, code, VLLM_PLUGINS="something_else") == {"activated": "True", "undone": "False"}
