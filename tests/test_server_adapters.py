"""The server's adapters and their activation, on stand-ins for vLLM's modules."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from speculators_compat import serving
from speculators_compat.adapter import Context, State
from speculators_compat.errors import CompatError
from speculators_compat.matrix import load_matrix
from speculators_compat.patcher import Journal
from speculators_compat.patches.server_config import CONFIG, ServerConfig
from speculators_compat.patches.server_connector import (
    CONNECTOR,
    HostTorch,
    ServerConnectorBlocks,
    ServerConnectorStreams,
)
from speculators_compat.patches.server_sampler import CALLER, KERNELS, ServerSampler
from speculators_compat.registry import adapters
from speculators_compat.settings import Settings
from speculators_compat.surface import SourceSurface

STREAMS = """
class ExampleHiddenStatesConnector:
    def copy(self):
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(stream): pass
"""


def source(tmp_path: Path, **modules: str) -> SourceSurface:
    for name, text in modules.items():
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SourceSurface({"vllm": tmp_path})


def probe(adapter: Any, tmp_path: Path, **modules: str) -> State:
    return adapter.probe(source(tmp_path, **modules)).state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("", State.NOT_APPLICABLE),
        ("class ExampleHiddenStatesConnector: ...", State.NOT_NEEDED),
        (STREAMS, State.APPLIED),
        (STREAMS.replace("with torch.cuda.stream(stream): pass", ""), State.DRIFTED),
    ],
)
def test_connector(tmp_path: Path, text: str, state: State) -> None:
    assert probe(ServerConnectorStreams(), tmp_path, **{CONNECTOR: text}) is state


def test_streams_of_a_host_without_cuda() -> None:
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_available=lambda: False), empty_like=lambda *a, **k: (a, k), long="long"
    )
    host = HostTorch(torch)
    event, stream = host.cuda.Event(), host.cuda.Stream()
    event.record(stream)
    stream.wait_event(event)
    with host.cuda.stream(stream):
        event.synchronize()
    assert event.query()
    assert host.empty_like(1, device="cpu", pin_memory=True) == ((1,), {"device": "cpu"})
    assert host.long == "long"
    assert host.cuda.is_available() is False


BLOCKS = """
class ExampleHiddenStatesConnector:
    def register_kv_caches(self, kv_caches): ...
    def _submit_async_write(self, pending): ...
"""


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("", State.NOT_APPLICABLE),
        (BLOCKS, State.APPLIED),
        (BLOCKS.replace("_submit_async_write", "save_kv_layer"), State.NOT_NEEDED),
        (BLOCKS + "    def _get_cache_block_size(self): ...\n", State.NOT_NEEDED),
        (BLOCKS.replace("register_kv_caches", "register"), State.DRIFTED),
    ],
)
def test_blocks(tmp_path: Path, text: str, state: State) -> None:
    assert probe(ServerConnectorBlocks(), tmp_path, **{CONNECTOR: text}) is state


def test_blocks_have_the_length_of_the_connectors_own_group() -> None:
    class Connector:
        def __init__(self, own: int) -> None:
            groups = [
                types.SimpleNamespace(kv_cache_spec=types.SimpleNamespace(block_size=size)) for size in (128, own)
            ]
            self._kv_cache_config = types.SimpleNamespace(kv_cache_groups=groups)
            self._hs_group_idx, self._block_size = 1, 128

        def register_kv_caches(self, kv_caches: Any) -> str:
            self._kv_cache = kv_caches
            return "done"

    module: Any = types.SimpleNamespace(ExampleHiddenStatesConnector=Connector)
    original = Connector.register_kv_caches
    journal = Journal()
    ServerConnectorBlocks().apply(Context(module, journal, Settings(), {}))
    same, other, split, wrong = Connector(128), Connector(42), Connector(48), Connector(42)

    def cache(rows: int) -> Any:
        return types.SimpleNamespace(shape=(9, rows, 3, 64))

    assert same.register_kv_caches(cache(128)) == other.register_kv_caches(cache(42)) == "done"
    split.register_kv_caches(cache(16))
    assert (same._block_size, other._block_size, split._block_size) == (128, 42, 48)
    with pytest.raises(CompatError, match="SC805"):
        wrong.register_kv_caches(cache(128))
    journal.undo()
    assert Connector.register_kv_caches is original
    assert other._block_size == 42


KERNEL = "def _sample_recovered_tokens_kernel_impl(a, b, BLOCK_SIZE=None{}): ..."
CALL = "def sample_recovered_tokens_kernel(a, b, BLOCK_SIZE{}): ..."


@pytest.mark.parametrize(
    ("kernel", "caller", "state"),
    [
        (None, CALL.format(""), State.NOT_APPLICABLE),
        (KERNEL.format(""), CALL.format(""), State.NOT_NEEDED),
        (KERNEL.format(", USE_FP64_GUMBEL=False"), CALL.format(", USE_FP64_GUMBEL"), State.NOT_NEEDED),
        (KERNEL.format(""), CALL.format(", USE_FP64_GUMBEL"), State.APPLIED),
    ],
)
def test_sampler(tmp_path: Path, kernel: str | None, caller: str, state: State) -> None:
    modules = {CALLER: caller} | ({KERNELS: kernel} if kernel else {})
    assert probe(ServerSampler(), tmp_path, **modules) is state


def test_the_samplers_call() -> None:
    calls: list[Any] = []

    def impl(*args: Any, BLOCK_SIZE: int) -> None:
        calls.append((args, BLOCK_SIZE))

    kernel = types.SimpleNamespace(func=impl)
    journal = Journal()
    module: Any = types.SimpleNamespace(sample_recovered_tokens_kernel=kernel)
    ServerSampler().apply(Context(module, journal, Settings(), {}))
    noise = types.SimpleNamespace(float=lambda: "float32")
    kernel.func(0, 1, 2, 3, 4, noise, 6, BLOCK_SIZE=1, USE_FP64_GUMBEL=True)
    kernel.func(0, 1, 2, 3, 4, "as it is", 6, BLOCK_SIZE=1, USE_FP64_GUMBEL=False)
    assert calls == [((0, 1, 2, 3, 4, "float32", 6), 1), ((0, 1, 2, 3, 4, "as it is", 6), 1)]
    journal.undo()
    assert kernel.func is impl


DRAFT = """
class ExtractHiddenStatesConfig:
    def __init__(self, model=None, method="", **kwargs):
        {}
"""


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("", State.NOT_APPLICABLE),
        (DRAFT.format("self.text = model.get_text_config()"), State.NOT_NEEDED),
        (DRAFT.format("pass"), State.APPLIED),
        (DRAFT.format("pass").replace("model=None", "target=None"), State.DRIFTED),
    ],
)
def test_config(tmp_path: Path, text: str, state: State) -> None:
    assert probe(ServerConfig(), tmp_path, **{CONFIG: text}) is state


def test_the_text_config_is_put_back() -> None:
    class Config:
        def __init__(self, model: Any = None, **kwargs: Any) -> None:
            self.text_config = self.thinker = {"flat": 1}

    class Target:
        def __init__(self) -> None:
            self.thinker = object()

        def get_text_config(self) -> Any:
            return self.thinker

    module: Any = types.SimpleNamespace(ExtractHiddenStatesConfig=Config)
    journal = Journal()
    ServerConfig().apply(Context(module, journal, Settings(), {}))
    target = Target()
    assert Config(target).thinker is target.thinker
    assert Config(model=target).thinker is target.thinker
    assert Config({"a": 1}).text_config == {"flat": 1}
    journal.undo()
    assert Config(target).thinker == {"flat": 1}


# --------------------------------------------------------------------------- activation


def test_every_server_row_and_adapter_exists() -> None:
    matrix = load_matrix(known_adapters=adapters())
    assert set(matrix.server_adapters) >= {"server_connector_streams", "server_sampler", "server_config", "server_states"}
    assert matrix.client_adapters == ("server_client",)
    for row in matrix.server_rows:
        for release in row.releases:
            assert matrix.select_server(release)[1] is True
    assert matrix.select_server(Version("99.0"))[1] is False
    with pytest.raises(CompatError, match="SC800"):
        matrix.select_server(Version("0.16.0"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a vLLM that consists of the sampler's module, ahead of everything else."""
    root = tmp_path / "site"
    info = root / "vllm-0.24.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n")
    (info / "RECORD").write_text("vllm/__init__.py,,\n")
    for name in ("vllm", "vllm/utils", "vllm/v1", "vllm/v1/sample"):
        (root / name).mkdir()
        (root / name / "__init__.py").touch()
    (root / "vllm/v1/sample/rejection_sampler.py").write_text(CALL.format(", USE_FP64_GUMBEL"))
    (root / "vllm/utils/cpu_triton_utils.py").write_text(
        "import types\n" + KERNEL.format("").replace("...", "return 7")
        + "\nsample_recovered_tokens_kernel = types.SimpleNamespace(func=_sample_recovered_tokens_kernel_impl)\n"
    )
    return root


CODE = """
import sys
import speculators_compat_plugin as plugin
plugin.load(); plugin.load()
import vllm.utils.cpu_triton_utils as kernels
from importlib import import_module
try:
    print(kernels.sample_recovered_tokens_kernel.func(1, 2, USE_FP64_GUMBEL=False))
except TypeError as error:
    print("TypeError")
active = sys.modules.get("speculators_compat.activation")
print(bool(active and active.status().active), "speculators_compat" in sys.modules)
"""


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ["TypeError", "False False"]),
        ({"SPECULATORS_COMPAT_SERVE": "1"}, ["7", "False True"]),
        ({"SPECULATORS_COMPAT_SERVE": "0"}, ["TypeError", "False False"]),
        ({"SPECULATORS_COMPAT_SERVE": "1", "SPECULATORS_COMPAT": "0"}, ["TypeError", "False False"]),
        ({"SPECULATORS_COMPAT_SERVE": "1", "SPECULATORS_COMPAT_WITHOUT": "server_sampler"}, ["TypeError", "False True"]),
    ],
)
def test_the_entry_point(package: Path, variables: dict[str, str], said: list[str]) -> None:
    """In a process of vLLM, without speculators: nothing unless switched on, and the server's adapters only."""
    src = Path(__file__).resolve().parent.parent / "src"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPECULATORS_COMPAT", "VLLM"))}
    env |= {"PYTHONPATH": os.pathsep.join([str(package), str(src)]), **variables}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env)
    assert done.stdout.split("\n")[:2] == said, done.stderr


def test_a_vllm_without_the_method_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from speculators_compat import detect

    found = types.SimpleNamespace(version=Version("0.16.0"))
    monkeypatch.setattr(detect, "detect_all", lambda: {"vllm": found})
    serving.deactivate()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        serving.activate_server()
    assert "changes nothing" in str(said[0].message)
    assert serving.states() == {} or all(p.state is State.UNDONE for p in serving.states().values())
    serving.deactivate()


def test_the_clients_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``import speculators_compat`` the client module is mended when it is imported, and put back."""
    from test_server_client import NEW

    folder = tmp_path / "speculators" / "data_generation"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "vllm_client.py").write_text(NEW)
    for name in [n for n in sys.modules if n.partition(".")[0] == "speculators"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    serving.deactivate()
    serving.activate_client()
    try:
        module = importlib.import_module(serving.CLIENT_MODULE)
        assert serving.states()["server_client"].state is State.APPLIED
        assert any("generate_hidden_states_async" in change for change in serving.changes())
        for _ in range(2):
            serving.deactivate()
            assert serving.changes() == []
            assert type(module.generate_hidden_states) is types.FunctionType
            serving.activate_client()
            assert serving.states()["server_client"].state is State.APPLIED
        serving.deactivate()
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "speculators"]:
            del sys.modules[name]
