"""Runs beside a speculators release: loads an extraction's output as its trainer does, and trains a tiny EAGLE-3 head.

    python train.py OUTPUT_DIR MODEL ANSWER.json [only-read]

Everything is speculators' own: data set, collation, vocabulary mapping, draft model, trainer. Only the output's format
decides which data set class is used. The answer holds the loss of each step and what the data set gave; for an Arrow data
set also its error against the layers that this release's trainer asks for, by transformers.
"""

import copy
import inspect
import json
import logging
import sys
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoConfig

EPOCHS, MAX_LEN, DRAFT_VOCAB = 5, 128, 128


def old_loader(folder):
    """speculators 0.3 and 0.4: data_N.pt."""
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn

    data = Eagle3SampleFileDataset(max_len=MAX_LEN, datapath=str(folder))
    counts = Counter()
    for path in data.data:
        sample = torch.load(path, weights_only=True)
        counts.update(sample["input_ids"][sample["loss_mask"].bool()].tolist())
    return data, create_collate_fn(MAX_LEN), counts


def new_loader(folder, hidden_size):
    """speculators 0.5 and later: an Arrow data set and hs_N.safetensors."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import data as module
    from speculators.train.data import ArrowDataset
    from speculators.train.vocab_mapping import save_token_frequency_distribution

    # 0.5.0 sets the number of the first file only where the data set is split.
    whole = {"split_ratio": 0.999999} if "split_ratio" in inspect.signature(ArrowDataset).parameters else {}
    exact = {"hidden_states_dtype": torch.float32}
    data = ArrowDataset(max_len=MAX_LEN, datapath=folder, on_missing="raise", **whole, **exact)
    rows = list(data.data)
    frequencies = Path(folder) / "token_freq.pt"
    save_token_frequency_distribution(rows, str(frequencies))
    counts = torch.load(frequencies, weights_only=True)
    if hasattr(module, "CollateFn"):
        return data, module.CollateFn(MAX_LEN, hidden_size, dtype=torch.float32, preprocess=shift_batch), counts
    return data, module.create_collate_fn(MAX_LEN, hidden_size, preprocess=shift_batch), counts


def layers_error(data, model_path):
    """Largest error, relative to the layer's largest value, of all samples: the trainer's own target layers, and the last
    layer before the final norm, computed by transformers in float32."""
    from speculators.models.utils import resolve_target_layer_ids
    from transformers import AutoModelForCausalLM

    ids = resolve_target_layer_ids(None, model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    last = []
    model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    worst = 0.0
    for sample in (data[i] for i in range(len(data))):
        with torch.no_grad():
            states = model(sample["input_ids"][None], output_hidden_states=True).hidden_states
        wanted = [*(states[k][0] for k in ids), last.pop()[0]]
        got = [*sample["hidden_states"].float().chunk(len(ids), dim=1), sample["verifier_last_hidden_states"].float()]
        for a, b in zip(got, wanted, strict=True):
            worst = max(worst, ((a - b).abs().max() / b.abs().max()).item())
    return {"error": worst, "layers": ids}


def main(folder, model_path, answer_path, only_read=""):
    if only_read:
        data, collate, _ = new_loader(folder, AutoConfig.from_pretrained(model_path).hidden_size)
        batch = collate([data[i] for i in range(4)])
        shapes = {k: list(v.shape) for k, v in batch.items() if isinstance(v, torch.Tensor)}
        answer = {"samples": len(data), "trainer": layers_error(data, model_path), "batch": shapes}
        Path(answer_path).write_text(json.dumps(answer))
        return
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.trainer import Trainer, TrainerConfig
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    torch.manual_seed(0)
    verifier = AutoConfig.from_pretrained(model_path)
    if (Path(folder) / "hidden_states").is_dir():
        data, collate, counts = new_loader(folder, verifier.hidden_size)
    else:
        data, collate, counts = old_loader(folder)
    d2t, t2d = build_vocab_mappings_from_distribution(counts, DRAFT_VOCAB, verifier.vocab_size)
    draft = copy.deepcopy(verifier)
    draft.num_hidden_layers = 1
    draft._attn_implementation = "simple_flex_attention"  # as speculators' training script does
    arguments = {"use_off_policy_tokens": True, "ttt_steps": 2, "ttt_step_loss_decay": 1.0, "loss_fn": "kl_div"}
    arguments["loss_implementation"] = "eager"  # the other one needs a GPU
    model = Eagle3DraftModel.from_training_args(
        verifier_config=draft,
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=DRAFT_VOCAB,
        norm_before_residual=True,
        verifier_name_or_path=model_path,
        **arguments,
    )
    train_kwargs, val_kwargs = Eagle3DraftModel.get_trainer_kwargs(**arguments)

    losses = []

    class Keep(logging.Handler):
        def emit(self, record):
            if isinstance(record.msg, dict) and "train" in record.msg:
                losses.append(record.msg["train"]["loss"])

    logger = logging.getLogger("speculators.metrics")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    if "local_rank" not in (known := inspect.signature(TrainerConfig).parameters):
        from speculators.train import distributed

        distributed._local_rank = "cpu"
        torch.accelerator.synchronize = lambda *_: None  # asks for CUDA where torch is built with it
    config = {
        "lr": 3e-3,
        "num_epochs": EPOCHS,
        "save_path": str(Path(answer_path).with_suffix(".checkpoints")),
        "local_rank": "cpu",  # the trainer moves everything to this device
        "train_call_kwargs": train_kwargs,
        "val_call_kwargs": val_kwargs,
        "hidden_states_dtype": torch.float32,
    }
    loader = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate)
    trainer = Trainer(model, TrainerConfig(**{k: v for k, v in config.items() if k in known}), loader)
    trainer.run_training()
    first = data[0]
    Path(answer_path).write_text(
        json.dumps(
            {
                "samples": len(data),
                "lengths": sorted(int(length) for length in data.approx_lengths),
                "steps": len(losses),
                "first": sum(losses[: len(loader)]) / len(loader),
                "last": sum(losses[-len(loader) :]) / len(loader),
                "shapes": {k: list(v.shape) for k, v in first.items()},
                **({"trainer": layers_error(data, model_path)} if hasattr(data, "on_missing") else {}),
                "aux_layers": getattr(model.config, "eagle_aux_hidden_state_layer_ids", None),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
