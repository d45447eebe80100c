"""A script as users of speculators 0.3 and 0.4 have it, but for its first line. It must run unchanged on all later ones.

    python script_of_0_4.py MODEL PROMPTS.json OUTPUT_DIR [LAYER_ID ...]
"""

import speculators_compat  # noqa: F401  # isort: skip

import json
import sys
from pathlib import Path

import torch
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

BATCH = 14


def main(model, prompts_file, output, *layer_ids):
    prompts = json.loads(Path(prompts_file).read_text())
    Path(output).mkdir(parents=True, exist_ok=True)
    generator = VllmHiddenStatesGenerator(
        model_path=model,
        layer_ids=[int(k) for k in layer_ids] or None,
        max_model_len=256,
        gpu_memory_utilization=0.3,
        tensor_parallel_size=1,
    )
    number = 0
    for start in range(0, len(prompts), BATCH):
        for result in generator.generate(prompts[start : start + BATCH]):
            sample = {
                "input_ids": result["input_ids"],
                "hidden_states": [h.contiguous() for h in result["hidden_states"]],
                "loss_mask": torch.ones_like(result["input_ids"]),
            }
            torch.save(sample, Path(output) / f"data_{number}.pt")
            number += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
