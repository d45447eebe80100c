"""Compares written samples with an independent forward pass of the model by transformers.

    python -m speculators_compat.verify OUTPUT_DIR --samples 8 --model MODEL

The deeper check beside the proof that each sample gets while it is made: all tokens and all layers of some samples. Where
a layer does not fit, the layer that would is named, which tells a wrong layer convention from a wrong prompt. With
``--checksums-only`` files are compared with ``checksums.sha256`` and no model is loaded.

Exit status: 0 all fit, 1 some do not, 2 usage, 4 nothing could be verified.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dataio import CHECKSUMS, MANIFEST, file_checksum, samples_folder
from .errors import CompatError
from .manifest import AFTER_NORM, number_of_layers, weights_fingerprint

#: Largest relative error of a layer's states (Frobenius norm) by the type in which the engine computed.
TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 8e-2}
#: Memory beside the weights that a forward pass may need, as a share of them.
SLACK = 1.2


@dataclass(frozen=True)
class Comparison:
    """One sample: the relative error of each layer, and what does not fit."""

    name: str
    errors: tuple[float, ...]
    faults: tuple[str, ...]


def _cannot(found: str, mend: str) -> CompatError:
    return CompatError(
        "SC611",
        found=found,
        expected="a data set with its manifest, and the model that made it",
        why="there would be nothing to compare",
        mend=mend,
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an output folder.

    Raises:
        CompatError: SC611.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if not isinstance(manifest["settings"], dict) or not isinstance(manifest["recorded"], dict):
            raise ValueError("not a manifest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _cannot(f"{folder / MANIFEST}: {error}", "give the --output-dir of an extraction") from None
    return manifest  # type: ignore[no-any-return]


def sample_paths(folder: Path, output: str) -> list[Path]:
    """All samples of an output folder."""
    pattern = "data_*.pt" if output == "pt" else "hs_*.safetensors"
    return sorted(samples_folder(folder, output).glob(pattern), key=lambda path: (len(path.name), path.name))


def load_sample(path: Path) -> tuple[list[int], list[Any]]:
    """Token ids and one tensor (tokens, hidden size) for each layer. No code is run from the file."""
    if path.suffix == ".pt":
        import torch

        data = torch.load(path, map_location="cpu", weights_only=True)
        return data["input_ids"].tolist(), list(data["hidden_states"])
    from safetensors.torch import load_file

    data = load_file(path)
    return data["token_ids"].tolist(), list(data["hidden_states"].unbind(1))


def wrong_checksums(folder: Path, paths: Sequence[Path]) -> list[str]:
    """What is wrong with files of the data set, compared with ``checksums.sha256``."""
    known: dict[str, str] = {}
    try:
        for line in (folder / CHECKSUMS).read_text().splitlines():
            digest, _, name = line.partition("  ")
            known[name] = digest
    except OSError as error:
        raise _cannot(f"{folder / CHECKSUMS}: {error}", "it is kept unless --no-checksums was given") from None
    wrong = []
    for path in paths:
        name = str(path.relative_to(folder))
        if name not in known:
            wrong.append(f"{name} has no checksum")
        elif known[name] != file_checksum(path):
            wrong.append(f"{name} is not what was written")
    present = {str(path.relative_to(folder)) for path in sample_paths(folder, "pt")}
    present |= {str(path.relative_to(folder)) for path in sample_paths(folder, "safetensors")}
    return wrong + [f"{name} is missing" for name in known if name not in present]


class Reference:
    """The model in transformers, and the states that leave its decoder layers.

    Args:
        model: folder or name.
        trust_remote_code: run code that comes with the model.
    """

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        import torch

        from .patches.layer_navigation import find_decoder_layers

        self._check_memory(Path(model))
        try:
            self.model = _load(model, trust_remote_code)
        except CompatError:
            raise
        except Exception as error:
            raise _cannot(
                f"transformers can't load {model}: {type(error).__name__}: {str(error)[:300]}",
                "give --trust-remote-code if you trust the folder, or use --checksums-only",
            ) from error
        config = self.model.config.to_dict()
        count = number_of_layers(config)
        assert count is not None
        self.stack = find_decoder_layers(self.model, count)
        self._torch = torch

    @staticmethod
    def _check_memory(folder: Path) -> None:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0
        free = _memory_available()
        if free is not None and size * SLACK > free:
            raise _cannot(
                f"{size / 2**30:.1f} GiB of weights, {free / 2**30:.1f} GiB of memory free",
                "run it on a host with more memory, or use --checksums-only",
            )

    def states(self, tokens: list[int], *, final_norm: bool) -> list[Any]:
        """What leaves each decoder layer, in float32; the last one after the final norm if asked for."""
        from .alignment import final_norm_of, normed_output

        torch = self._torch
        kept: list[Any] = []

        def keep(module: Any, args: Any, output: Any) -> None:
            kept.append(normed_output(output)[0].float())

        modules = list(self.stack.layers)
        if final_norm:
            modules[-1] = final_norm_of(self.model, self.stack.path)
        handles = [module.register_forward_hook(keep) for module in modules]
        try:
            with torch.inference_mode():
                self.model(input_ids=torch.tensor([tokens]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return kept


def _load(model: str, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    folder = Path(model)
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    text = config.get("text_config")
    language = _language_weights(folder) if isinstance(text, dict) else {}
    if language:
        # A wrapper around a language model: its text part, under the names it has by itself.
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "config.json").write_text(json.dumps(text))
            save_file(language, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
            del language
            return _load(scratch, trust_remote_code)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        model, trust_remote_code=trust_remote_code, torch_dtype="auto", output_loading_info=True
    )
    missing = [key for key in info["missing_keys"] if "rotary" not in key]
    if missing:
        raise _cannot(f"{len(missing)} weights of {model} were not found, {missing[0]} first", "use --checksums-only")
    return loaded.eval()


def _language_weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    prefix = "language_model."
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update({k[len(prefix) :]: v for k, v in load_file(path).items() if k.startswith(prefix)})
    return found


def _memory_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def compare(
    reference: Reference, path: Path, layer_ids: Sequence[int], *, dtype: str, final_norm: bool
) -> Comparison:
    """Compare one sample with the reference."""
    tokens, layers = load_sample(path)
    wanted = reference.states(tokens, final_norm=final_norm)
    tolerance = TOLERANCE.get(dtype, max(TOLERANCE.values()))
    errors, faults = [], []
    if len(layers) != len(layer_ids):
        faults.append(f"{len(layers)} layers, not {len(layer_ids)}")
    for k, state in zip(layer_ids, layers, strict=False):
        got = state.float()
        if got.shape != wanted[k].shape:
            faults.append(f"after-layer {k}: shape {tuple(got.shape)}, not {tuple(wanted[k].shape)}")
            errors.append(float("inf"))
            continue
        distances = [_relative(got, other) for other in wanted]
        errors.append(distances[k])
        if not distances[k] <= tolerance:
            best = min(range(len(distances)), key=lambda index: distances[index])
            hint = f"; it is after-layer {best}" if distances[best] <= tolerance else ""
            faults.append(f"after-layer {k}: relative error {distances[k]:.2g}, {tolerance:g} allowed{hint}")
    return Comparison(path.name, tuple(errors), tuple(faults))


def _relative(got: Any, wanted: Any) -> float:
    return float(((got - wanted).norm() / wanted.norm().clamp_min(1e-30)).item())


def verify(folder: Path, *, samples: int, model: str | None, trust_remote_code: bool, seed: int = 0) -> list[Comparison]:
    """Compare ``samples`` samples, drawn at random, with an independent forward pass.

    Raises:
        CompatError: SC611 if that is not possible.
    """
    manifest = read_manifest(folder)
    made, recorded = manifest["settings"], manifest["recorded"]
    paths = sample_paths(folder, str(made.get("format", "pt")))
    ids = recorded.get("layer_ids")
    if not paths or not isinstance(ids, list):
        raise _cannot(f"{len(paths)} samples, layer ids {ids}", "run the extraction first")
    path = model or str(made["model"]["path"])
    recorded_weights = made["model"].get("weights")
    if recorded_weights and Path(path).is_dir() and weights_fingerprint(Path(path)) != recorded_weights:
        raise _cannot(f"{path} has other weights than the model that made the data", "give its own --model")
    reference = Reference(path, trust_remote_code=trust_remote_code)
    drawn = random.Random(seed).sample(paths, min(samples, len(paths)))
    form = recorded.get("form") or ["float32"]
    computed = str((recorded.get("engine") or {}).get("dtype") or form[0]).removeprefix("torch.")
    stored = str(form[0]).removeprefix("torch.")
    dtype = max((computed, stored), key=lambda name: TOLERANCE.get(name, 1.0))
    normed = made.get("norm_state") == AFTER_NORM
    return [compare(reference, path, ids, dtype=dtype, final_norm=normed) for path in drawn]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m speculators_compat.verify", description=__doc__.split("\n\n")[0])
    parser.add_argument("output_dir", type=Path, help="the extraction's --output-dir")
    parser.add_argument("--samples", type=int, default=8, help="how many samples to compute again (default: 8)")
    parser.add_argument("--model", help="the model, if it has moved")
    parser.add_argument("--seed", type=int, default=0, help="which samples are drawn")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model folder")
    parser.add_argument("--checksums-only", action="store_true", help="compare all files with checksums.sha256")
    args = parser.parse_args(argv)
    if args.samples < 1:
        parser.error("--samples must be 1 or more")
    try:
        if args.checksums_only:
            output = str(read_manifest(args.output_dir)["settings"].get("format", "pt"))
            paths = sample_paths(args.output_dir, output)
            faults = wrong_checksums(args.output_dir, paths)
            print(f"{len(paths)} files compared with {CHECKSUMS}")
        else:
            found = verify(
                args.output_dir,
                samples=args.samples,
                model=args.model,
                trust_remote_code=args.trust_remote_code,
                seed=args.seed,
            )
            width = max(shutil.get_terminal_size().columns, 60)
            for one in found:
                errors = " ".join(f"{error:.1e}" for error in one.errors)
                print(f"{'FAULT' if one.faults else 'ok':<6}{one.name:<22}{errors}"[:width])
            faults = [f"{one.name}: {fault}" for one in found for fault in one.faults]
        if faults:
            shown = "\n    ".join(faults[:20])
            raise CompatError(
                "SC612",
                found=f"{len(faults)} faults:\n    {shown}",
                expected="what the model computes, and files as they were written",
                why="a draft model trained on such states is poor",
                mend="don't train on this data; report the message with the output of compat-check",
            )
    except CompatError as error:
        print(error, file=sys.stderr)
        return 4 if error.id == "SC611" else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
