"""The command that starts `vllm serve` for hidden states, and the check of a server that runs.

Read from source text and ``config.json``: neither torch nor vLLM is imported. The probe of a running server reads a file of
states, for which torch is imported where it is installed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import CompatError
from ..layer_ids import AFTER_LAYER, BOUNDARY, check, convention_of, to_boundary
from ..serving import SERVE
from ..surface import SourceSurface

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

        words = ["vllm", "serve", self.model, "--port", str(self.port)]
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
        words = iter(self.arguments)
        lines[0] += " " + shlex.join([next(words), next(words), next(words)])
        rest = list(words)
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
        CompatError: SC800 for a vLLM without the method, SC411 for a layer that the model does not have.
        Unavailable: without vLLM or a readable ``config.json``.
    """
    from ..matrix import load_matrix

    installed = context.installed("vllm")
    source = context.vllm  # raises where there is none
    if installed.version is not None:
        load_matrix().select_server(installed.version)
    surface = SourceSurface({"vllm": source.folder})
    if not surface.has(DRAFT) or not surface.has(f"{CONNECTOR}:ExampleHiddenStatesConnector"):
        raise CompatError(
            "SC800",
            found=f"vLLM {installed.version}, whose source has no {METHOD}",
            expected="the method and its connector ExampleHiddenStatesConnector",
            why="speculators' client talks to nothing else",
            mend="extract in-process (docs/ways.md), or install a vLLM that has it",
        )
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
