"""The sample of compat-check's output in docs/compat-check.txt is what the command prints.

``UPDATE_SAMPLE=1`` writes it anew.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from doctor_support import KIMI, lines, tensors
from vllm_env import ROOT, VllmEnv

SAMPLE = ROOT / "docs" / "compat-check.txt"
COMMAND = "compat-check --model Kimi-K2.5 --layer-ids 2 30 58 --data train.jsonl --output-dir states"


def output(env: VllmEnv, folder: Path) -> str:
    """What the command prints for a download of Kimi-K2.5 that was cut short."""
    shutil.copytree(KIMI, folder / "Kimi-K2.5")
    whole, cut = (
        tensors({"language_model.model.norm.weight": [7168]}),
        tensors({"lm_head.weight": [64, 7168]})[:-4096],
    )
    (folder / "Kimi-K2.5" / "model-00001-of-00002.safetensors").write_bytes(whole)
    (folder / "Kimi-K2.5" / "model-00002-of-00002.safetensors").write_bytes(cut)
    (folder / "Kimi-K2.5" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"language_model.model.norm.weight": "model-00001-of-00002.safetensors",'
        ' "lm_head.weight": "model-00002-of-00002.safetensors"}}'
    )
    prompts = [{"input_ids": list(range(k, k + 40)), "loss_mask": [0] * 20 + [1] * 20} for k in range(100)]
    lines(folder / "train.jsonl", [*prompts, {"input_ids": [5, 6, 7], "loss_mask": [0, 1]}])
    script = (
        "import os, sys\n"
        "os.chdir(sys.argv.pop(1))\n"
        "for name in list(os.environ):\n"
        "    name.startswith(('VLLM_', 'NCCL_')) and os.environ.pop(name)\n"
        "from speculators_compat.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    done = env.run("-c", script, folder, *COMMAND.split()[1:], timeout=120, COLUMNS="80")
    assert "Traceback" not in done.stdout, done.stdout
    return f"$ {COMMAND}\n{done.stdout}"


def settled(text: str) -> str:
    """Without what differs from host to host: times, free memory, the line breaks that follow from them."""
    text = re.sub(r" +\d+\.\d\d s$", "", text, flags=re.MULTILINE)
    text = re.sub(r"[\d.]+ (bytes|KiB|MiB|GiB|TiB)", "N", text)
    text = re.sub(r"(open files: limit) \w+", r"\1 N", text)
    text = re.sub(
        r"; \d+ folders? of killed\s+runs, which the next\s+run removes", "", re.sub(r"\s+", " ", text)
    )
    text = re.sub(r"(will be made, on) \w+", r"\1 DISK", text)
    text = text.replace(" (a limit of N for this container)", "")
    return re.sub(r"\s+", " ", text).strip()


def test_sample(vllm_env: VllmEnv, tmp_path: Path) -> None:
    printed = output(vllm_env, tmp_path)
    if os.environ.get("UPDATE_SAMPLE") == "1":
        SAMPLE.parent.mkdir(exist_ok=True)
        SAMPLE.write_text(printed)
    kept = SAMPLE.read_text()
    assert settled(kept) == settled(printed)
    assert all(len(line) <= 80 for line in kept.splitlines()[1:])


def test_readme_quotes_the_sample() -> None:
    """README shows parts of docs/compat-check.txt, in their order."""
    readme = (ROOT / "README.md").read_text()
    quoted = readme.partition("<!-- compat-check-sample -->")[2].partition("<!-- /compat-check-sample -->")[0]
    shown = [line for line in quoted.strip().splitlines()[1:-1] if line != "..."]
    sample = iter(SAMPLE.read_text().splitlines())
    assert len(shown) > 30
    assert [line for line in shown if line not in sample] == []
