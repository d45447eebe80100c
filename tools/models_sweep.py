"""Every decoder architecture in vLLM's registry, as a tiny model: extracted with the plugin, and checked.

    python tools/models_sweep.py                                  # what evidence/models.json does not have yet
    python tools/models_sweep.py --vllm 0.32.0 --arch JambaForCausalLM --again
    python tools/models_sweep.py --summary                        # the figures and the documents, nothing is run

``tools/models_cell.py`` says what is checked. Results are kept after every architecture, so an interrupted sweep goes
on where it stopped; one that hangs or takes its process down costs that one only.

Statuses: *passed*; *differs* (the plugin's states are those that the engine computed, bit for bit, and the engine's
differ from transformers'); *unproved* (extracted, but no final norm shows what the model's residual stream is);
*refused* (the plugin says which and why); *failed*; *vllm cannot* (plain vLLM, without the plugin, does not run the
model on this machine either); *not built* (no tiny config for it); *no decoder* (encoder-decoder, or no text
decoder).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "evidence" / "models.json"
VLLM = ("0.32.0", "0.16.0")
SPECULATORS = "0.4.0.1"
GOOD = ("passed", "differs", "unproved")
#: The families that every release of this package is to work with, and their architectures.
NAMED = {
    "Kimi-K2.5": ["KimiK25ForConditionalGeneration"],
    "DeepSeek-V3": ["DeepseekV3ForCausalLM"],
    "Qwen2.5-VL": ["Qwen2_5_VLForConditionalGeneration"],
    "Qwen3-VL": ["Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"],
    "Qwen3.5": [
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ],
    "Qwen3-Next": ["Qwen3NextForCausalLM"],
    "Gemma 3": ["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
    "Gemma 4": ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
    "GPT-OSS": ["GptOssForCausalLM"],
    "Llama 4": ["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
    "Mistral 3": ["Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"],
    "GLM-4.x": ["Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm4vForConditionalGeneration"],
    "MiniMax-M2": ["MiniMaxM2ForCausalLM"],
    "Nemotron-H": ["NemotronHForCausalLM"],
    "Granite 4 hybrid": ["GraniteMoeHybridForCausalLM"],
    "Phi-3": ["Phi3ForCausalLM"],
    "OLMo 2": ["Olmo2ForCausalLM"],
    "InternLM": ["InternLM2ForCausalLM", "InternLM3ForCausalLM"],
    "Step": ["Step3TextForCausalLM", "Step3p5ForCausalLM", "StepVLForConditionalGeneration"],
    "Hunyuan": ["HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "HYV3ForCausalLM"],
}
#: Not what an EAGLE-3 head is trained for; they have no decoder-only text model.
NO_DECODER = {
    **dict.fromkeys(
        (
            "WhisperForConditionalGeneration",
            "CohereASRForConditionalGeneration",
            "CohereAsrForConditionalGeneration",
            "NemotronParseForConditionalGeneration",
            "FireRedASR2ForConditionalGeneration",
            "T5ForConditionalGeneration",
            "BartForConditionalGeneration",
        ),
        "encoder-decoder: the decoder's states depend on an encoder's input",
    ),
    "Terratorch": "no language model",
    "PrithviGeoSpatialMAE": "no language model",
}


def interpreter(version: str, given: dict[str, str]) -> Path:
    """The Python of the environment with this vLLM: one that was given, or ours, made where it is not there yet."""
    spec = importlib.util.spec_from_file_location("environments", ROOT / "tools" / "environments.py")
    assert spec is not None
    assert spec.loader is not None
    environments = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environments)
    os.environ.setdefault("MODELS_SPECULATORS", str(environments.install_speculators(SPECULATORS)))
    return Path(given[version] if version in given else environments.make_vllm_env(version))


def cell(python: Path, request: dict[str, Any]) -> Iterator[str]:
    """Run ``models_cell.py`` with a request; yields its lines as they come."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "SPECULATORS_COMPAT"))}
    environment = {**kept, "PYTHONPATH": os.environ["MODELS_SPECULATORS"], "HF_HUB_OFFLINE": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(request, file)
        file.flush()
        command = [str(python), str(ROOT / "tools" / "models_cell.py"), file.name]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            try:
                yield from process.stdout
            finally:
                process.terminate()


def registered(python: Path, scratch: Path) -> dict[str, str]:
    """Architecture to ``text`` or ``multimodal``."""
    answer = scratch / "registry.json"
    for _ in cell(python, {"list": True, "scratch": str(scratch), "answer": str(answer)}):
        pass
    found = json.loads(answer.read_text())
    return {name: group for group, names in found.items() for name in names}


def load() -> dict[str, Any]:
    """The evidence so far."""
    with contextlib.suppress(FileNotFoundError):
        return dict(json.loads(EVIDENCE.read_text()))
    return {}


def save(evidence: dict[str, Any]) -> None:
    """Write the evidence, one architecture a line."""
    for block in evidence.values():
        for found in block["architectures"].values():
            for name in ("reason", "no_transformers", "without_tower"):
                if name in found:  # paths of this machine are nobody's business
                    found[name] = re.sub(r"(?<![\w:/])/[^\s'\"]*/", "", found[name])
    blocks = []
    for version, block in evidence.items():
        head = json.dumps({k: v for k, v in block.items() if k != "architectures"}, indent=1)[:-2]
        lines = ",\n".join(
            f"   {json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(block["architectures"].items())
        )
        blocks.append(f'{json.dumps(version)}: {head},\n "architectures": {{\n{lines}\n }}\n}}')
    EVIDENCE.parent.mkdir(exist_ok=True)
    partial = EVIDENCE.with_suffix(".part")
    partial.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    partial.rename(EVIDENCE)


def compared(found: dict[str, Any]) -> bool:
    """Whether an architecture ran with transformers' weights and agreed with its states."""
    return bool(found["status"] == "passed" and "error" in found)


def coverage(block: dict[str, Any]) -> dict[str, Any]:
    """How many of the architectures that this vLLM can load here are extracted."""
    found = block["architectures"].values()
    counts = Counter(one["status"] for one in found)
    loadable = sum(n for status, n in counts.items() if status in (*GOOD, "refused", "failed"))
    good = sum(counts[status] for status in GOOD)
    families = Counter(family for one in found if compared(one) for family in one["family"])
    return {
        "registered": block["registered"],
        "looked_at": len(block["architectures"]),
        "loadable": loadable,
        "extracted": good,
        "share": round(good / loadable, 3) if loadable else None,
        "share_if_the_not_built_count": round(good / (loadable + counts["not built"]), 3) if loadable else None,
        "agree_with_transformers": sum(map(compared, found)),
        "with_an_aid": sum("aid" in one for one in found),
        "statuses": dict(sorted(counts.items())),
        "families_that_agree_with_transformers": dict(sorted(families.items())),
        "named_that_agree_with_transformers": f"{sum(bool(k) for k in named(block).values())} of {len(NAMED)}",
    }


def named(block: dict[str, Any]) -> dict[str, list[str]]:
    """For each of :data:`NAMED`, the architectures that ran with real weights and agreed with transformers."""
    done = block["architectures"]
    return {
        family: [name for name in names if name in done and compared(done[name])] for family, names in NAMED.items()
    }


# --------------------------------------------------------------------------- docs/models.md

BEGIN, END = "<!-- models -->", "<!-- /models -->"


def document() -> str:
    """The part of ``docs/models.md`` that comes from the evidence."""
    evidence = load()
    lines = [
        "| vLLM | registered | can load here | extracted | agree with transformers | refused | no tiny config |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for version, block in evidence.items():
        n = coverage(block)
        statuses = n["statuses"]
        lines.append(
            f"| {version} | {n['registered']} | {n['loadable']} | {n['extracted']} ({n['share']:.1%}) | "
            f"{n['agree_with_transformers']} | {statuses.get('refused', 0)} | {statuses.get('not built', 0)} |"
        )
    newest = next(iter(evidence))
    block = evidence[newest]
    lines += ["", f"Families on vLLM {newest}, with transformers' weights and the largest relative error:", ""]
    lines += ["| family | architecture | decoder layers | EAGLE-3 | error |", "| --- | --- | --- | --- | --- |"]
    for family, names in named(block).items():
        others = [name for name in NAMED[family] if name in block["architectures"]]
        for name in names or others[:1]:
            found = block["architectures"][name]
            error = f"{found['error']:.1e}" if name in names else found.get("reason", found["status"])
            if name in names and found.get("dtype") == "bfloat16":
                error += " (bfloat16)"
            native = {True: "native", False: "shimmed"}.get(found.get("native"), "-")
            lines.append(f"| {family} | {name} | {found.get('path', '-')} | {native} | {error} |")
            family = ""
    for version, block in evidence.items():
        differs = [(name, found) for name, found in sorted(block["architectures"].items()) if found["status"] == "differs"]
        if differs:
            lines += ["", f"Extracted on vLLM {version}, while what the engine computes differs from transformers:", ""]
            lines += [f"- {name}: {_brief(found['reason'])}" for name, found in differs]
    for version, block in evidence.items():
        lines += ["", "<details>", f"<summary>Not extracted on vLLM {version}, each with its reason</summary>", ""]
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, found in sorted(block["architectures"].items()):
            if found["status"] not in GOOD:
                reasons.setdefault((found["status"], _brief(found["reason"])), []).append(name)
        for (status, reason), names in sorted(reasons.items()):
            lines.append(f"- *{status}*: {', '.join(names)}: {reason}")
        lines += ["", "</details>"]
    return "\n".join(lines)


def _brief(reason: str) -> str:
    """The start of a reason; of an error of this package, its id and what was found."""
    if reason.startswith("[SC"):
        head, _, rest = reason.partition(" found: ")
        return f"{head}: {rest.partition(' expected: ')[0]}"[:200]
    return " ".join(reason.split())[:200].replace("|", "/").replace("<", "(").replace(">", ")")


#: Begins the line of ``README.md`` that :func:`line` makes.
LINE = "Models: "


def line() -> str:
    """How many architectures work on the newest vLLM, in one line."""
    version, block = next(iter(load().items()))
    n = coverage(block)
    return (
        f"{n['extracted']} of the {n['loadable']} decoder architectures that vLLM {version} runs on a CPU are extracted; "
        f"of {n['agree_with_transformers']} the states agree with transformers' ([docs/models.md](docs/models.md))"
    )


def write_documents() -> None:
    """Put :func:`document` into ``docs/models.md`` and :func:`line` into ``README.md``."""
    path = ROOT / "docs" / "models.md"
    head, begin, rest = path.read_text().partition(BEGIN)
    if begin:
        path.write_text(f"{head}{BEGIN}\n{document()}\n{END}{rest.partition(END)[2]}")
    readme = ROOT / "README.md"
    lines = [f"{LINE}{line()}" if text.startswith(LINE) else text for text in readme.read_text().split("\n")]
    readme.write_text("\n".join(lines))


def sweep(version: str, python: Path, wanted: list[str], again: list[str] | None, limit: float) -> None:
    """All architectures of one vLLM that have no result yet, or one of the statuses ``again``; any if that is empty."""
    scratch = ROOT / ".envs" / "models" / version
    scratch.mkdir(parents=True, exist_ok=True)
    groups = registered(python, scratch)
    evidence = load()
    block = evidence.setdefault(version, {"architectures": {}})
    block.update(
        registered=len(groups),
        platform=f"{platform.system()} {platform.machine()}, Python {sys.version.split()[0]}",
        made_by="python tools/models_sweep.py",
    )
    done = block["architectures"]
    for name in groups:
        if name in NO_DECODER:
            done[name] = {"status": "no decoder", "reason": NO_DECODER[name]}
    redo = {n for n in done if again is not None and (not again or done[n]["status"] in again)}
    todo = [n for n in groups if n not in NO_DECODER and (not wanted or n in wanted) and (n in redo or n not in done)]
    todo.sort(key=lambda name: groups[name] != "text")
    request = {
        "architectures": todo,
        "scratch": str(scratch),
        "answer": str(scratch / "answer.json"),
        "limit": limit,
    }
    for line in cell(python, request):
        name, _, text = line.partition(" ")
        try:
            found = json.loads(text)
        except ValueError:
            continue  # something that an import printed
        done[name] = {"group": groups[name], **found}
        evidence = {**load(), version: block}
        block["coverage"] = coverage(block)
        save(evidence)
        print(version, name, found["status"], found.get("reason", ""), flush=True)
    block["coverage"] = coverage(block)
    save({**load(), version: block})


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", nargs="+", default=list(VLLM))
    parser.add_argument("--arch", nargs="+", default=[], help="these architectures only")
    parser.add_argument("--again", nargs="*", metavar="STATUS", help="also those that have such a result, or any")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one architecture")
    parser.add_argument("--python", nargs="+", default=[], metavar="VERSION=PATH", help="environments that exist")
    parser.add_argument("--summary", action="store_true", help="print the figures, write the documents, run nothing")
    options = parser.parse_args()
    if not options.summary:
        for version in options.vllm:
            python = interpreter(version, dict(pair.split("=", 1) for pair in options.python))
            sweep(version, python, options.arch, options.again, options.limit)
    save(load())
    write_documents()
    for version, block in load().items():
        print(version, json.dumps(coverage(block)))


if __name__ == "__main__":
    main()
