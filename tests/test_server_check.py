"""compat-check --serve and --url against a vLLM's source that is a stub, and a server that is a fake."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from speculators_compat import cli
from speculators_compat.detect import Installed
from speculators_compat.doctor import Options
from speculators_compat.doctor.context import Context
from speculators_compat.doctor.serve import Probe, ServePlan, plan, run_server_checks
from speculators_compat.errors import CompatError

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector"


class Server:
    """What a vLLM server answers; change :attr:`params` and the rest before asking."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.params: Any = {"hidden_states_path": str(folder / "p.safetensors")}
        self.version: str | None = "0.32.0"
        self.models: Any = {"data": [{"id": "tiny"}]}
        self.echo: Any = list(Probe.tokens)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _say(self, answer: Any) -> None:
                body = json.dumps(answer).encode()
                self.send_response(200 if answer is not None else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                version = None if outer.version is None else {"version": outer.version}
                self._say({"/v1/models": outer.models, "/version": version}.get(self.path))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                choices = [{"prompt_token_ids": outer.echo}]
                self._say({"choices": choices, "kv_transfer_params": outer.params})

            def log_message(self, *args: Any) -> None: ...

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = Server(tmp_path)
    yield found
    found.http.shutdown()
    found.http.server_close()


def whole(path: Path, tokens: tuple[int, ...] = Probe.tokens) -> None:
    data = struct.pack(f"<{len(tokens)}q", *tokens)
    entry = {"dtype": "I64", "shape": [len(tokens)], "data_offsets": [0, len(data)]}
    header = json.dumps({"token_ids": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def outcome(url: str, id: str) -> Any:
    results, _ = run_server_checks(Context(Options(), {}), url=url)
    return next(r for r in results if r.id == id)


def test_a_server_that_works(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    file = server.folder / "p.safetensors"
    whole(file)
    (server.folder / "p.safetensors.lock").touch()
    other = server.folder / "q.safetensors"
    whole(other)
    results, _ = run_server_checks(Context(Options(), {}), url=server.url)
    status = {r.id: r.status for r in results}
    assert [status[f"SC{n}"] for n in (811, 812, 813)] == ["ok"] * 3
    assert not file.exists()  # the probe's own files
    assert sorted(p.name for p in server.folder.iterdir()) == ["q.safetensors"]


def test_a_file_that_is_not_the_probes_is_kept(server: Server) -> None:
    file = server.folder / "p.safetensors"
    whole(file, (1, 2, 3))
    assert outcome(server.url, "SC813").status == "ok"
    assert file.exists()


def test_an_address_without_a_scheme() -> None:
    found = outcome("127.0.0.1:9", "SC811").outcome
    assert found.mend == "give the address as http://HOST:PORT"


@pytest.mark.parametrize("params", [["x"], {"hidden_states_path": 7}])
def test_an_answer_that_is_none_of_vllms(server: Server, params: Any) -> None:
    server.params = params
    found = outcome(server.url, "SC812")
    assert found.status == "failed"
    assert "none of vLLM's" in found.outcome.found


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--json", "--url", "http://127.0.0.1:9"])
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code == report["exit_code"] == 1
    first = report["checks"][0]
    assert (first["id"], first["status"]) == ("SC811", "failed")
    assert "refused" in first["found"]
    assert {c["status"] for c in report["checks"][1:]} == {"skipped"}


def test_something_else_than_vllm(server: Server) -> None:
    server.models = None
    assert "HTTP status 404" in outcome(server.url, "SC811").outcome.found
    server.models = ["?"]
    assert "lists no model" in outcome(server.url, "SC811").outcome.found


def test_a_server_without_the_method(server: Server) -> None:
    for nothing in (None, {}):
        server.params = nothing
        found = outcome(server.url, "SC812")
        assert (found.status, found.outcome.mend) == (
            "failed",
            "start it with the command that compat-check --serve --model DIR prints",
        )


def test_a_connector_that_writes_no_files(server: Server) -> None:
    server.params = {"handle": "x"}
    assert outcome(server.url, "SC812").status == "skipped"


def test_a_server_that_computes_another_prompt(server: Server) -> None:
    server.echo = [1]
    assert outcome(server.url, "SC812").status == "failed"


def test_a_folder_that_this_host_cannot_see(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.params = {"hidden_states_path": "/no/such/folder/p.safetensors"}
    assert "there is no /no/such/folder here" in outcome(server.url, "SC813").outcome.found
    monkeypatch.setattr(Probe, "__init__", _quick(Probe.__init__))
    server.params = {"hidden_states_path": str(server.folder / "p.safetensors")}
    found = outcome(server.url, "SC813")  # a folder of the same name
    assert "without the server's file" in found.outcome.found


def _quick(init: Any) -> Any:
    def shorter(self: Probe, url: str) -> None:
        init(self, url, 0.5)

    return shorter


def test_half_a_file(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "__init__", _quick(Probe.__init__))
    (server.folder / "p.safetensors").write_bytes(b"\0\0\0")
    assert outcome(server.url, "SC813").status == "failed"
    assert (server.folder / "p.safetensors").exists()  # not ours to delete before it is whole


def test_the_servers_version(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "__init__", _quick(Probe.__init__))
    server.version = None
    assert outcome(server.url, "SC815").status == "skipped"
    server.version = "0.99.0"
    assert outcome(server.url, "SC815").status == "warning"


# --------------------------------------------------------------------------- --serve


@pytest.fixture
def vllm(tmp_path: Path) -> Any:
    """The source of a vLLM that has the method; change its files before planning."""
    root = tmp_path / "site" / "vllm"
    for name, text in {
        "__init__": "",
        "model_executor/__init__": "",
        "model_executor/models/__init__": "",
        "model_executor/models/registry": "_TEXT_GENERATION_MODELS = {'LlamaForCausalLM': ('llama', 'LlamaForCausalLM')}",
        "model_executor/models/llama": "class LlamaForCausalLM(SupportsEagle3): ...",
        "model_executor/models/extract_hidden_states": "class ExtractHiddenStatesModel: ...",
        CONNECTOR: "class ExampleHiddenStatesConnector: ...",
    }.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def model(tmp_path: Path, **more: Any) -> Path:
    folder = tmp_path / "a model"
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "hidden_size": 64, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(
    tmp_path: Path, vllm: Path, version: str = "0.32.0", speculators: str | None = None, **options: Any
) -> ServePlan:
    installed = {
        "vllm": Installed("vllm", "vllm", Version(version), version, str(vllm), None),
        "speculators": Installed("speculators", "speculators", Version(speculators), speculators, "x", None)
        if speculators
        else Installed("speculators", None, None, None, None, None),
    }
    return plan(Context(Options(model=str(tmp_path / "a model"), **options), installed))


def flags(found: ServePlan) -> dict[str, str]:
    words = found.arguments
    return {w: (words[i + 1] if i + 1 < len(words) else "") for i, w in enumerate(words) if w.startswith("--")}


def test_the_command(tmp_path: Path, vllm: Path) -> None:
    model(tmp_path)
    found = planned(tmp_path, vllm, tp=2, max_seq_len=100)
    assert found.layers == (2, 4, 5, 8)
    given = flags(found)
    assert json.loads(given["--speculative-config"])["draft_model_config"] == {
        "hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]}
    }
    assert json.loads(given["--kv-transfer-config"])["kv_role"] == "kv_producer"
    assert given["--max-model-len"] == "101"
    assert given["--tensor-parallel-size"] == "2"
    assert {"--no-enable-prefix-caching", "--enforce-eager"} <= set(given)
    assert "--no-enable-chunked-prefill" not in given
    assert found.command.startswith("SPECULATORS_COMPAT_SERVE=1 vllm serve '")
    import shlex

    assert shlex.split(found.command.replace("\\\n", " "))[1:] == found.arguments


def test_a_connector_that_writes_from_the_forward_pass(tmp_path: Path, vllm: Path) -> None:
    model(tmp_path)
    path = vllm / f"{CONNECTOR}.py"
    path.write_text(path.read_text() + "\nclass ReqMeta: ...\n")
    assert {"--no-enable-chunked-prefill", "--max-num-batched-tokens"} <= set(flags(planned(tmp_path, vllm, "0.18.0")))


def test_layer_ids_in_the_speculators_convention(tmp_path: Path, vllm: Path) -> None:
    model(tmp_path)
    assert planned(tmp_path, vllm, layer_ids=(3, 1, 8)).layers == (1, 3, 8)
    assert planned(tmp_path, vllm, speculators="0.9.0", layer_ids=(1, 8)).layers == (1, 8)
    assert planned(tmp_path, vllm, speculators="0.4.0", layer_ids=(1, 7)).layers == (2, 8)
    with pytest.raises(CompatError, match="SC411"):
        planned(tmp_path, vllm, layer_ids=(9,))


def test_a_model_without_the_interface(tmp_path: Path, vllm: Path) -> None:
    model(tmp_path)
    (vllm / "model_executor/models/llama.py").write_text("class LlamaForCausalLM: ...")
    assert any("does not declare SupportsEagle3" in note for note in planned(tmp_path, vllm).notes)


def test_own_code_and_further_arguments(tmp_path: Path, vllm: Path) -> None:
    model(tmp_path, auto_map={"AutoConfig": "x.Y"})
    more = {"dtype": "bfloat16", "enable_expert_parallel": True, "max_num_seqs": 4, "enable_prefix_caching": True}
    given = flags(planned(tmp_path, vllm, vllm_args=more))
    assert "--trust-remote-code" in given
    assert (given["--dtype"], given["--max-num-seqs"]) == ("bfloat16", "4")
    assert "--enable-expert-parallel" in given
    assert "--enable-prefix-caching" not in given


def test_a_vllm_without_the_method(tmp_path: Path, vllm: Path) -> None:
    model(tmp_path)
    with pytest.raises(CompatError, match="SC800"):
        planned(tmp_path, vllm, "0.16.0")
    (vllm / "model_executor/models/extract_hidden_states.py").unlink()
    with pytest.raises(CompatError, match="SC800"):
        planned(tmp_path, vllm, "0.32.0")


def test_pipeline_parallelism(tmp_path: Path, vllm: Path) -> None:
    model(tmp_path)
    with pytest.raises(CompatError, match="SC404"):
        planned(tmp_path, vllm, tp=4, pp=2)


def test_serve_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--serve"])
    assert ended.value.code == 2
    assert "--model" in capsys.readouterr().err


def test_vllm_in_another_environment(tmp_path: Path) -> None:
    model(tmp_path)
    nothing = {name: Installed(name, None, None, None, None, None) for name in ("vllm", "speculators")}
    results, found = run_server_checks(Context(Options(model=str(tmp_path / "a model")), nothing), serve=True)
    assert found is None
    assert results[0].status == "failed"
    assert "the server's environment" in results[0].outcome.mend
