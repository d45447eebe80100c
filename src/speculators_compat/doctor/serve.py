"""The command that starts `vllm serve` for hidden states, and the check of a server that runs.

Read from source text and ``config.json``: neither torch nor vLLM is imported. The probe of a running server reads a file of
states, for which torch is imported where it is installed.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CompatError
from ..layer_ids import AFTER_LAYER, BOUNDARY, check, convention_of, to_boundary
from ..prompts import check_parallelism
from ..serving import SERVE
from ..statefile import token_ids_of
from ..surface import SourceSurface
from .base import Check, Outcome, Result, Unavailable, failed, ok, perform, skipped, warning

if TYPE_CHECKING:
    from .context import Context

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
METHOD = "extract_hidden_states"
DRAFT = "vllm.model_executor.models.extract_hidden_states:ExtractHiddenStatesModel"
PORT = 8000
STATES = "/dev/shm/hidden_states"


@dataclass(frozen=True)
class ServePlan:
    """A server for one model: what :attr:`command` starts.

    Attributes:
        layers: boundaries, ascending; the order of the layers in the states.
        native: whether the model's class declares ``SupportsEagle3``; ``None`` where that is not known.
        writes_in_forward: whether this vLLM's connector writes from the forward pass, and a prompt may not be split.
        on_cpu: whether the installed vLLM is a build for CPUs.
        more: further vLLM arguments, names with underscores.
        notes: what a reader should know, in sentences.
    """

    model: str
    layers: tuple[int, ...]
    folder: str = STATES
    max_model_len: int = 2049
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.8
    port: int = PORT
    native: bool | None = True
    writes_in_forward: bool = False
    trust_remote_code: bool = False
    on_cpu: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the server needs."""
        return {SERVE: "1", **({"VLLM_CPU_KVCACHE_SPACE": "4"} if self.on_cpu else {})}

    @property
    def speculative_config(self) -> dict[str, Any]:
        draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers)}}
        return {"method": METHOD, "num_speculative_tokens": 1, "draft_model_config": draft}

    @property
    def kv_transfer_config(self) -> dict[str, Any]:
        extra = {"shared_storage_path": self.folder}
        return {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": extra,
        }

    @property
    def arguments(self) -> list[str]:
        """The command, word by word."""

        def text(value: Any) -> str:
            return json.dumps(value, separators=(",", ":"))

        words = ["vllm", "serve", self.model]
        if self.on_cpu:  # there the command looks for a distribution named vllm, and ends
            words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        words += ["--port", str(self.port)]
        words += ["--speculative-config", text(self.speculative_config)]
        words += ["--kv-transfer-config", text(self.kv_transfer_config)]
        # A token that is found in the prefix cache is not computed, and has no state.
        words += ["--no-enable-prefix-caching", "--max-model-len", str(self.max_model_len)]
        budget = self.more.get("max_num_batched_tokens")
        if self.writes_in_forward:
            words += ["--no-enable-chunked-prefill"]
            if budget is None:
                words += ["--max-num-batched-tokens", str(max(8192, self.max_model_len))]
        # Forward hooks do not run in a compiled model, and a prefill gains little from being compiled.
        words += ["--enforce-eager"]
        if self.tensor_parallel > 1:
            words += ["--tensor-parallel-size", str(self.tensor_parallel)]
        if not self.on_cpu:
            words += ["--gpu-memory-utilization", f"{self.gpu_memory_utilization:g}"]
        if self.trust_remote_code:
            words += ["--trust-remote-code"]
        for name, value in self.more.items():
            option = f"--{name.replace('_', '-')}"
            if option in words:
                continue
            if isinstance(value, bool):
                words += [option if value else f"--no-{name.replace('_', '-')}"]
            else:
                words += [option, value if isinstance(value, str) else text(value)]
        return words

    @property
    def command(self) -> str:
        """What to type, over several lines."""
        lines = [" ".join(f"{name}={value}" for name, value in self.environment.items())]
        rest = self.arguments
        first = rest.index("--port")
        lines[0] += " " + shlex.join(rest[:first])
        rest = rest[first:]
        while rest:
            taken = [rest.pop(0)]
            if rest and not rest[0].startswith("--"):
                taken.append(rest.pop(0))
            lines.append("    " + shlex.join(taken))
        return " \\\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "arguments": self.arguments,
            "command": self.command,
            "layers": list(self.layers),
            "folder": self.folder,
            "notes": list(self.notes),
        }


def plan(context: Context, *, folder: str | None = None, port: int = PORT) -> ServePlan:
    """The server for the model and the vLLM of ``context``.

    Raises:
        CompatError: SC800 for a vLLM without the method, SC404 for pipeline parallelism, SC411 for a layer that the model
            does not have.
        Unavailable: without vLLM or a readable ``config.json``.
    """
    from ..matrix import load_matrix

    installed = context.installed("vllm")
    source = context.vllm  # raises where there is none
    if installed.version is not None:
        load_matrix().select_server(installed.version)
    surface = SourceSurface({"vllm": source.folder.parent})
    if not surface.has(DRAFT) or not surface.has(f"{CONNECTOR}:ExampleHiddenStatesConnector"):
        raise CompatError(
            "SC800",
            found=f"vLLM {installed.version}, whose source has no {METHOD}",
            expected="the method and its connector ExampleHiddenStatesConnector",
            why="speculators' client talks to nothing else",
            mend="extract in-process (docs/ways.md), or install a vLLM that has it",
        )
    check_parallelism({"pipeline_parallel_size": context.options.pp})
    layers, _ = context.shape
    notes = []
    speculators = context.installed("speculators").version
    convention = BOUNDARY if speculators is None else convention_of(str(speculators))
    given = context.options.layer_ids
    if given is None:
        wanted = [2, layers // 2, layers - 3, layers]
        wanted = [k for k in wanted if k > 0]
        notes.append("layers: speculators' default, and the last one, which its trainer takes for the verifier's")
    elif convention == AFTER_LAYER:
        wanted = to_boundary(given, layers)
        notes.append(
            f"layers: {list(given)} counts the layers that states leave (speculators {speculators}); the server counts "
            f"boundaries: {wanted}"
        )
    else:
        wanted = check(given, layers, BOUNDARY)
    chosen = tuple(sorted(set(wanted)))
    if list(chosen) != list(wanted):
        notes.append(f"layers: the server returns each once, ascending: {list(chosen)}")
    if layers not in chosen:
        notes.append(f"layers: speculators' trainer takes the last one for boundary {layers}, before the final norm")
    found = source.model_class(context.facts.architecture)
    native = None if found is None else found.native
    if native is not True:
        why = "does not declare SupportsEagle3" if native is False else "may not declare SupportsEagle3"
        notes.append(f"{context.facts.architecture} {why}: {SERVE} gives it the interface")
    listed = os.environ.get("VLLM_PLUGINS")
    if listed is not None and "speculators_compat" not in listed.split(","):
        notes.append(f"VLLM_PLUGINS={listed} leaves speculators_compat out: add it, or unset the variable")
    forced = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0")
    if forced and not surface.has_module("vllm.v1.worker.gpu.spec_decode.extract_hidden_states"):
        notes.append("VLLM_USE_V2_MODEL_RUNNER is set, and this vLLM's runner V2 does not have the method: unset it")
    more = dict(context.options.vllm_args)
    trust = bool(context.config.get("auto_map")) or bool(more.pop("trust_remote_code", False))
    more.pop("enable_prefix_caching", None)
    return ServePlan(
        model=str(context.options.model),
        layers=chosen,
        folder=str(folder or STATES),
        max_model_len=context.max_model_len,
        tensor_parallel=context.options.tp,
        gpu_memory_utilization=context.options.gpu_memory_utilization,
        port=port,
        native=native,
        writes_in_forward=surface.has(f"{CONNECTOR}:ReqMeta"),
        trust_remote_code=trust,
        on_cpu=context.on_cpu,
        more=more,
        notes=tuple(notes),
    )


# --------------------------------------------------------------------------- checks


def run_server_checks(
    context: Context, *, serve: bool = False, url: str | None = None, folder: str | None = None, port: int = PORT
) -> tuple[tuple[Result, ...], ServePlan | None]:
    """Plan a server, check a running one, or both.

    Returns:
        The results, and the plan where one was asked for and could be made.
    """
    made: list[ServePlan] = []
    results = []
    if serve:

        def command(context: Context) -> Outcome:
            try:
                made.append(plan(context, folder=folder, port=port))
            except Unavailable as error:
                if context.installed("vllm").version is not None:
                    return failed(
                        f"{context.options.model}: {error}",
                        expected="a model's folder with a readable config.json, or a name in the hub's local cache",
                        why="layers and flags depend on it",
                        mend="give the right --model DIR; compat-check --model DIR says more about the folder",
                    )
                return failed(
                    str(error),
                    expected="the vLLM that is to serve",
                    why="flags and connector differ from one vLLM to the next: they are read from the one installed here",
                    mend="run this in the server's environment; speculators is not needed there",
                )
            version = context.installed("vllm").version
            return ok(f"for vLLM {version}, boundaries {', '.join(map(str, made[0].layers))}")

        results.append(perform(Check("SC810", "server", "command", command, ("SC810",)), context))
    if url is not None:
        probe = Probe(url)
        for id, name, function in (
            ("SC811", "answers", probe.answers),
            ("SC815", "versions", probe.versions),
            ("SC812", "method", probe.method),
            ("SC813", "folder", probe.folder),
            ("SC814", "states", probe.states),
        ):
            results.append(perform(Check(id, "server", name, function, (id,)), context))
        probe.tidy()
    return tuple(results), made[0] if made else None


class Probe:
    """One prompt sent to a running server. The checks are made in order: each needs what the ones before found.

    Args:
        url: ``http://HOST:PORT``, with or without ``/v1``.
        seconds: how long the server may take to answer.
    """

    tokens = tuple(range(20, 52))

    def __init__(self, url: str, seconds: float = 60.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.seconds = seconds
        self.model = ""
        self.version: str | None = None
        self.path: Path | None = None
        self.whole = False

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        import urllib.request

        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.seconds) as answer:
            return json.loads(answer.read())

    def answers(self, context: Context) -> Outcome:
        import urllib.error

        def fault(found: str, mend: str) -> Outcome:
            expected = "a vLLM server that lists its model at /v1/models"
            return failed(found, expected=expected, why="no state can come from there", mend=mend)

        start = "start it (compat-check --serve --model DIR prints the command), and wait until it has loaded the model"
        try:
            listed = self._ask("/v1/models")
            self.model = str(listed["data"][0]["id"])
        except urllib.error.HTTPError as error:
            return fault(f"{self.url}/v1/models: HTTP status {error.code}", "give the address as http://HOST:PORT")
        except (urllib.error.URLError, OSError) as error:
            mend = start if self.url.startswith(("http://", "https://")) else "give the address as http://HOST:PORT"
            return fault(f"{self.url}: {getattr(error, 'reason', error)}", mend)
        except (ValueError, KeyError, IndexError, TypeError):
            return fault(f"{self.url}/v1/models: an answer that lists no model", "give the address as http://HOST:PORT")
        try:
            self.version = str(self._ask("/version")["version"])
        except (OSError, ValueError, KeyError, TypeError):
            self.version = None
        return ok(f"{self.url} serves {self.model}" + (f", vLLM {self.version}" if self.version else ""))

    def versions(self, context: Context) -> Outcome:
        from packaging.version import InvalidVersion, Version

        from ..matrix import load_matrix

        self._needs(self.model, "the server does not answer (SC811)")
        self._needs(self.version, "the server does not tell its version")
        client = context.installed("speculators").version
        own = context.installed("vllm").version
        try:
            row, exact, reason = load_matrix().select_server(Version(str(self.version)))
        except (InvalidVersion, CompatError):
            return skipped(f"the server says vLLM {self.version}, which the matrix does not list")
        here = f"speculators {client} here" if client else "no speculators here"
        here += "" if own is None else f", vLLM {own} here"
        if not exact or row.status == "untested":
            return warning(
                f"{reason}; {here}",
                expected="a vLLM whose server path was run (compat-check --list)",
                why="it is expected to work, and not proved: the probe below decides",
                mend="nothing, where the probe passes",
            )
        return ok(f"vLLM {self.version}: {row.status}; {here}")

    def method(self, context: Context) -> Outcome:
        import urllib.error

        self._needs(self.model, "the server does not answer (SC811)")
        body = {
            "model": self.model,
            "prompt": list(self.tokens),
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        }
        expected = "an answer that names the file of states (kv_transfer_params.hidden_states_path)"
        mend = "start it with the command that compat-check --serve --model DIR prints"
        try:
            answer = self._ask("/v1/completions", body)
        except urllib.error.HTTPError as error:
            text = error.read(300).decode(errors="replace")
            return failed(
                f"HTTP status {error.code}: {text}", expected=expected, why="requests of the client fail so too", mend=mend
            )
        except (OSError, ValueError) as error:
            return failed(
                f"{error}; asked for {self.seconds:g} s",
                expected=expected,
                why="a server that ends at its first request writes no states",
                mend="look at its log; without CUDA set SPECULATORS_COMPAT_SERVE=1; " + mend,
            )
        try:
            params = answer.get("kv_transfer_params") or {}
            named = params.get("hidden_states_path")
            echoed = (answer.get("choices") or [{}])[0].get("prompt_token_ids")
            count = None if echoed is None else len(echoed)
            path = Path(named or "")
        except (AttributeError, IndexError, KeyError, TypeError):
            return failed(
                f"an answer that is none of vLLM's: {json.dumps(answer)[:100]}",
                expected=expected,
                why="something between here and the server answers in its place, or it is no vLLM",
                mend="give the address of the server itself; " + mend,
            )
        if not named and params.get("handle"):
            return skipped(f"the connector hands over by {sorted(params)}, not by files")
        if not named:
            return failed(
                "the answer names no states (kv_transfer_params is empty)",
                expected=expected,
                why="the server runs without the method extract_hidden_states or without its connector",
                mend=mend,
            )
        if count is not None and echoed != list(self.tokens):
            return failed(
                f"the server computed {count} other tokens",
                expected=f"the {len(self.tokens)} token ids that were sent",
                why="states would belong to another prompt",
                mend="leave out what changes prompts on the way (a proxy, a chat template)",
            )
        self.path = path
        return ok(f"states in {named}")

    def folder(self, context: Context) -> Outcome:
        from ..statefile import wait_until_whole

        path = self._file()
        mend = "mount the server's folder here under the same path, or start it with another shared_storage_path"
        why = "speculators' client opens the path that the server names, on its own host"
        if not path.parent.is_dir():
            return failed(f"there is no {path.parent} here", expected="the server's folder", why=why, mend=mend)
        try:
            wait_until_whole(path, seconds=min(self.seconds, 20.0))
        except CompatError as error:
            if path.exists():
                return failed(error.found, expected=error.expected, why=error.why, mend=error.mend)
            return failed(
                f"{path.parent} is here, without the server's file {path.name}",
                expected="the very folder that the server writes to",
                why="a folder of the same name on this host, or another mount; " + why,
                mend=mend,
            )
        self.whole = True
        if not os.access(path.parent, os.W_OK):
            return warning(
                f"{path.parent} may not be written to by this user",
                expected="a folder in which the client may delete files that it has read",
                why="states pile up until the file system is full",
                mend=f"let the client's user write there (chmod), for example chmod 1777 {path.parent}",
            )
        return ok(f"{path.parent} is here, {path.stat().st_size:,} bytes, whole")

    def states(self, context: Context) -> Outcome:
        path = self._file()
        self._needs(self.whole, "the file is not here (SC813)")
        try:
            import torch  # noqa: F401
        except ImportError:
            return skipped("torch is not installed here: the file is whole, its numbers were not looked at")
        from ..statefile import checked_states

        layers = hidden = None
        if context.options.model is not None:
            hidden = context.shape[1]
        if context.options.layer_ids is not None:
            layers = len(set(context.options.layer_ids))
        found = checked_states(path, self.tokens, layers=layers, hidden_size=hidden, seconds=1, keep_lock=True)
        rows, count, size = found.shape
        return ok(f"{rows} tokens x {count} layers x {size}, {str(found.dtype).removeprefix('torch.')}, finite")

    def tidy(self) -> None:
        """Delete the probe's own file, whatever the server named: only a file of the probe's tokens is that."""
        if self.path is not None and self.whole and token_ids_of(self.path) == self.tokens:
            for one in (self.path, Path(f"{self.path}.lock")):
                try:
                    one.unlink(missing_ok=True)
                except OSError:  # said by SC813
                    return

    def _needs(self, what: object, reason: str) -> None:
        if not what:
            raise Unavailable(reason)

    def _file(self) -> Path:
        if self.path is None:
            raise Unavailable("the server named no file (SC812)")
        return self.path
