#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Extract hidden states for EAGLE-3 training from tokenized prompts.

    python extract_hidden_states.py --model-path MODEL --prepared-data prompts.jsonl --output-dir states

Each line of the prepared data is one object, {"input_ids": [int, ...], "loss_mask": [0 or 1, ...]}. Line N,
counted from 0, becomes data_N.pt, which the trainer of speculators 0.3 and 0.4 reads, or, with --format safetensors,
what the trainer of 0.5 and later reads; without --format, what the installed speculators reads. A run that was
stopped, in whatever way, goes on where it stopped when the same command is given again. Lines that can't be used are
skipped, counted and reported; so are samples whose states are proved not to be their own.

On more than one machine each job takes a part, counted from 0, and the parts are merged when all are done:

    python extract_hidden_states.py ... --output-dir states --shard $SLURM_ARRAY_TASK_ID/8      # sbatch --array=0-7
    python -m speculators_compat.shards states

Exit status: 0 done, 1 error, 2 usage, 130 ended by Ctrl-C.
"""

import speculators_compat  # before speculators  # isort: skip

import argparse
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

from speculators_compat import cli, dataio, layer_ids, manifest, settings, shards
from speculators_compat.detect import detect
from speculators_compat.errors import CompatError
from speculators_compat.extraction import UnprovedError
from speculators_compat.write_behind import WriteBehind


def parse(argv: list[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
        return value

    def fraction(text: str) -> float:
        if not 0 < (value := float(text)) <= 1:
            raise argparse.ArgumentTypeError(f"{value} is not above 0 and at most 1")
        return value

    def json_object(text: str) -> dict[str, Any]:
        if not isinstance(value := json.loads(text), dict):
            raise argparse.ArgumentTypeError("not a JSON object")
        return value

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model-path", required=True, help="model folder, or a name on the Hugging Face hub")
    add("--prepared-data", required=True, metavar="FILE.jsonl", help="tokenized prompts")
    add("--output-dir", required=True, help="where the samples go; made where it is missing")
    add("--batch-size", type=positive, default=32, help="prompts given to the engine at once (default: 32)")
    # A prompt of the model's full length leaves no room for the token that is sampled after it.
    add("--max-seq-len", type=positive, default=2048, help="cut longer prompts (default: 2048 tokens)")
    add("--tp-size", type=positive, default=1, help="tensor parallel size (default: 1)")
    add("--gpu-memory-utilization", type=fraction, default=0.8, help="part of the memory (default: 0.8)")
    add("--layer-ids", type=int, nargs="+", metavar="ID", help="layers to take; the last one is the target's")
    add("--layer-convention", choices=layer_ids.CONVENTIONS, help="what the layer ids count (pt: after-layer)")
    trainer = layer_ids.trainer_format(detect("speculators").version)
    add("--format", choices=dataio.FORMATS, default=trainer, help=f"pt: 0.3, 0.4; safetensors: 0.5+ (here: {trainer})")
    add("--final-norm", action="store_true", help="last layer after the final norm (for speculators 0.3)")
    add("--no-checksums", action="store_true", help="don't keep checksums.sha256")
    add("--limit", type=positive, help="stop after this many usable prompts")
    add("--shard", metavar="I/N", help="only part I (0 to N-1) of N, in a folder of its own in --output-dir")
    add("--vllm-args", type=json_object, metavar="JSON", help='more vLLM arguments: \'{"dtype": "float32"}\'')
    add("--strict", action="store_true", help="end at the first line that can't be used")
    add("--skip-check", action="store_true", help="start although a check of compat-check fails")
    return parser.parse_args(argv)


def start_generator(args: argparse.Namespace) -> Any:
    print(f"loading {args.model_path} ...", file=sys.stderr)
    # Imported only now: this takes long, and needs all of torch and vLLM.
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    return VllmHiddenStatesGenerator(
        model_path=args.model_path,
        layer_ids=args.after_layer,
        # The generator cuts prompts to max_model_len - 1 tokens, to leave room for the one token it samples.
        max_model_len=args.max_seq_len + 1,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tp_size,
    )


def extract(args: argparse.Namespace) -> int:
    # Everything that can be found wrong in seconds is looked at before the model is loaded.
    shard = None if args.shard is None else shards.parse(args.shard)
    configured = settings.current()
    speculators_compat.configure(
        vllm_args=configured.vllm_args if args.vllm_args is None else args.vllm_args,
        final_norm=args.final_norm or configured.final_norm,
        # Whatever --layer-convention says: the ids are translated before the generator sees them.
        layer_convention=layer_ids.AFTER_LAYER,
        watchdog=configured.watchdog,
    )
    model = dataio.check_model_folder(args.model_path)
    reading: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "max_seq_len": args.max_seq_len,
        "strict": args.strict,
        "placeholders": model.placeholders,
    }
    data = dataio.check_data_file(args.prepared_data, **reading)
    args.after_layer = layer_ids.resolve(
        args.layer_ids, model.num_layers, convention=args.layer_convention, output=args.format
    )
    checked = {**vars(args), "output_dir": str(shards.where(args.output_dir, shard))}
    if not args.skip_check and not cli.check_first(checked, layer_ids=args.after_layer):
        print("not started: a check failed (--skip-check starts all the same)", file=sys.stderr)
        return 1
    decisive = dataio.make_settings(
        model,
        data,
        layer_ids=args.after_layer,
        max_seq_len=args.max_seq_len,
        vllm_args=settings.current().vllm_args,
        final_norm=settings.current().final_norm,
        output=args.format,
    )
    tally = dataio.Tally()
    generator = progress = None
    unproved: list[str] = []
    source = {"path": data.path, **reading, "limit": args.limit}
    with (
        shards.open_writer(args.output_dir, decisive, shard, data=source, checksums=not args.no_checksums) as writer,
        WriteBehind(writer) as behind,
    ):
        if writer.finished or writer.damaged:
            print(f"resuming: {writer.resumed} finished, {len(writer.damaged)} damaged", file=sys.stderr)
        try:
            samples = tally.samples(dataio.read_samples(args.prepared_data, limit=args.limit, **reading))
            own = samples if shard is None else (sample for sample in samples if shard.holds(sample))
            missing = (sample for sample in own if not writer.is_finished(sample))
            for batch in dataio.batches(missing, args.batch_size):
                if generator is None:
                    generator = start_generator(args)
                    writer.record(**manifest.describe_run(generator, **run_facts(args)))
                    lines = min(data.lines, args.limit or data.lines)
                    progress = dataio.Progress(shard.share(lines) if shard else lines, writer.resumed)
                behind.make_room()
                try:
                    # Files are written while the engine computes.
                    generator.generate(
                        [sample.input_ids for sample in batch],
                        on_result=lambda i, result, batch=batch: behind.put(batch[i], result),
                    )
                except UnprovedError as error:
                    if error.id != "SC515":
                        raise
                    print(error, file=sys.stderr)
                    unproved += [f"line {batch[i].line}: {why}" for i, why in error.failed.items()]
                if progress is not None:
                    progress.advance(len(batch), sum(len(sample.input_ids) for sample in batch))
            behind.flush()
        finally:
            behind.wait()  # whatever ended the run, what was computed is kept
            if progress is not None:
                progress.close()
            proved = manifest.alignment_report(generator, writer.noted("alignment"))
            writer.note(alignment=proved, **tally.facts())
            # The plugin gives the generator a shutdown() that ends its worker processes.
            if (shutdown := getattr(generator, "shutdown", None)) is not None:
                shutdown()
            summarize(args, tally, writer, progress, unproved)
        if args.format == "safetensors" and shard is None:  # of shards the merge writes it
            again = dataio.read_samples(args.prepared_data, limit=args.limit, **reading)
            rows = writer.write_dataset(sample for sample in again if isinstance(sample, dataio.Sample))
            print(f"data set:  {rows} rows, train with --data-path {writer.folder}")
    return 1 if unproved else 0


def run_facts(args: argparse.Namespace) -> dict[str, Any]:
    """What the manifest should tell about this run, beside what decides the values."""
    names = ("prepared_data", "batch_size", "tp_size", "gpu_memory_utilization", "layer_ids", "layer_convention")
    return {"arguments": {name: getattr(args, name) for name in names}}


def summarize(
    args: argparse.Namespace,
    tally: dataio.Tally,
    writer: dataio.SampleWriter,
    progress: dataio.Progress | None,
    unproved: list[str],
) -> None:
    rate = f", {progress.rate:,.0f} tokens/s" if progress is not None else ""
    size = f"{writer.written_tokens:,} tokens{rate}, {writer.written_bytes:,} bytes"
    print(f"written:   {writer.written} samples, {size}")
    print(f"resumed:   {writer.resumed} samples finished earlier")
    if merged := getattr(writer, "merged", None):
        print(f"merged:    {len(merged)} samples, of all shards, are in the output folder already")
    print(f"truncated: {tally.truncated} samples cut to {args.max_seq_len} tokens")
    if tally.without_mask:
        print(f"no mask:   {tally.without_mask} samples without loss_mask, written as all ones")
    if unproved:
        print(f"unproved:  {len(unproved)} samples not written, their states are not their own")
    print(f"skipped:   {tally.skipped} lines")
    for line in unproved + tally.reason_lines():
        print(f"           {line}")
    print(f"output:    {writer.folder}")


def main(argv: list[str] | None = None, run: Callable[[list[str] | None], int] | None = None) -> int:
    try:
        return run(argv) if run is not None else extract(parse(argv))  # ray_extract.py ends alike
    except CompatError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; resume with the same command", file=sys.stderr)
        return 130


# vLLM starts its workers by importing this file again: without this line they would run it again, too.
if __name__ == "__main__":
    # A job that a batch system ends with SIGTERM still has to shut its workers down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
