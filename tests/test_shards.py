"""Shards: division, what is refused, merging. The engine is a fake; tools/ray_test.py has the real one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from speculators_compat import claims, dataio, shards
from speculators_compat.dataio import Sample
from speculators_compat.errors import CompatError
from speculators_compat.shards import Shard

torch = pytest.importorskip("torch", reason="samples are torch files; these tests run where vLLM is installed")

from test_example_cli import generator, job, main, samples  # noqa: E402, F401


@pytest.mark.parametrize("text", ["0/1", "0/8", "7/8", " 3/8 "])
def test_shards(text: str) -> None:
    assert str(shards.parse(text, {})) == text.strip()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("8/8", r"sbatch --array=0-7, or --shard \$\(\(SLURM_ARRAY_TASK_ID - 1\)\)/8"),
        ("9/8", "a shard from 0/8 to 7/8"),
        ("/8", "is SLURM_ARRAY_TASK_ID set"),
        ("0/0", "number of shards"),
        *((text, "SC850") for text in ("-1/8", "1", "1/8/2", "a/b", "", "1/-8", "0/1e3")),
    ],
)
def test_what_is_no_shard(text: str, told: str) -> None:
    with pytest.raises(CompatError, match=told) as caught:
        shards.parse(text, {})
    assert caught.value.id == "SC850"


def test_a_job_array_that_counts_from_1_is_refused_in_each_job() -> None:
    for task in range(1, 9):
        slurm = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "8"}
        with pytest.raises(CompatError, match=r"array=0-7"):
            shards.parse(f"{task}/8", slurm)
        assert shards.parse(f"{task - 1}/8", slurm) == Shard(task - 1, 8)


@pytest.mark.parametrize("total", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_each_sample_is_in_one_shard(total: int, count: int) -> None:
    parts = [Shard(index, count) for index in range(count)]
    found = [[n for n in range(total) if part.holds(Sample(n + 5, [1], None, 1, n))] for part in parts]
    assert sorted(n for part in found for n in part) == list(range(total))
    assert [len(part) for part in found] == [part.share(total) for part in parts]
    assert max(map(len, found)) - min(map(len, found)) <= 1


def merged(out: Path) -> int:
    return shards.main([str(out)])


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_shards_and_merge_are_one_run(main: Any, generator: Any, job: list[Any], tmp_path: Path, form: str) -> None:  # noqa: F811
    if form == "safetensors":
        pytest.importorskip("datasets", reason="comes with vLLM and speculators")
        job += ["--format", "safetensors", "--layer-ids", 1, 2, "--layer-convention", "after-layer"]
    for index in (2, 0, 1):
        assert main(*job, "--shard", f"{index}/3") == 0
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == [*(f"shard-{n}-of-3" for n in range(3)), "shards.json"]
    assert [sum(map(len, made.calls)) for made in generator.made] == [3, 3, 3]
    assert merged(out) == 0
    assert main(*job) == 0  # resumes what is merged, with nothing to do
    assert len(generator.made) == 3
    manifest = json.loads((out / "manifest.json").read_text())
    job[job.index("--output-dir") + 1] = tmp_path / "whole"
    assert main(*job) == 0
    whole = tmp_path / "whole"
    if form == "pt":
        assert samples(out) == samples(whole)
    else:
        from datasets import load_from_disk

        assert samples(out / "hidden_states") == samples(whole / "hidden_states")
        assert (out / "checksums.sha256").read_bytes() == (whole / "checksums.sha256").read_bytes()
        assert load_from_disk(str(out)).to_dict() == load_from_disk(str(whole)).to_dict()
    other = json.loads((whole / "manifest.json").read_text())
    assert manifest["complete"]
    for same in ("samples", "tokens", "settings", "format"):
        assert manifest[same] == other[same]
    for same in ("layer_ids", "layers", "form", "checksums", "lines_read", "way", "adapters"):
        assert manifest["recorded"][same] == other["recorded"][same]
    assert [(one["shard"], one["samples"]) for one in manifest["recorded"]["shards"]] == [(f"{n}/3", 3) for n in range(3)]


def test_what_is_missing_is_told_and_made_with_another_division(
    main: Any, generator: Any, job: list[Any], tmp_path: Path, capsys: Any  # noqa: F811
) -> None:
    out = tmp_path / "out"
    assert main(*job, "--shard", "0/3") == 0
    generator.fail_at = (2, KeyboardInterrupt())
    assert main(*job, "--shard", "2/3") == 130
    generator.fail_at = None
    capsys.readouterr()
    assert merged(out) == 1
    said = capsys.readouterr()
    assert "5 samples moved" in said.out
    assert "now:     5 of 9 samples" in said.out
    assert "SC856" in said.err
    # Line 4 is bad; of the usable lines 1 2 3 5 6 7 8 9 10 the second part has the 2nd, 5th and 8th.
    assert "4 of 9 samples: lines 2, 6, 9, 10 (shard 1/3 lacks 3; shard 2/3 lacks 1)" in said.err
    assert not json.loads((out / "manifest.json").read_text())["complete"]
    assert not list(out.glob("shard*"))
    made = len(generator.made)
    assert main(*job, "--shard", "0/2") == 0
    assert main(*job, "--shard", "1/2") == 0
    assert sum(len(call) for one in generator.made[made:] for call in one.calls) == 4
    assert merged(out) == 0
    job[job.index("--output-dir") + 1] = tmp_path / "whole"
    assert main(*job) == 0
    assert samples(out) == samples(tmp_path / "whole")


def test_a_failing_proof_of_one_shard_is_in_the_sum(tmp_path: Path) -> None:
    one = {"proved": 3, "not_proved": {"no logits": 1}, "failed": {}}
    assert shards._added(None, one) == one
    assert shards._added(one, {"proved": 2, "not_proved": {"no logits": 1, "x": 1}, "failed": {"y": 1}}) == {
        "proved": 5,
        "not_proved": {"no logits": 2, "x": 1},
        "failed": {"y": 1},
    }


def test_shards_in_folders_of_their_own_are_copied(main: Any, generator: Any, job: list[Any], tmp_path: Path) -> None:  # noqa: F811
    place = job.index("--output-dir") + 1
    for index in range(2):
        job[place] = tmp_path / f"node{index}"
        assert main(*job, "--shard", f"{index}/2") == 0
    before = [samples(tmp_path / f"node{n}" / f"shard-{n}-of-2") for n in range(2)]
    out = tmp_path / "all"
    for moved, twice in ((9, 0), (0, 9)):  # a second time nothing is done
        result = shards.merge(out, [tmp_path / "node0", tmp_path / "node1"])
        assert (result.complete, result.samples, result.moved, result.twice) == (True, 9, moved, twice)
    assert [samples(tmp_path / f"node{n}" / f"shard-{n}-of-2") for n in range(2)] == before
    job[place] = tmp_path / "whole"
    assert main(*job) == 0
    assert samples(out) == samples(tmp_path / "whole")
    assert len(json.loads((out / "manifest.json").read_text())["recorded"]["shards"]) == 2


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--shard", "0/2"], "SC851"),
        (["--shard", "3/3"], "SC850"),
        ([], "SC851"),
        (["--shard", "1/3", "--layer-ids", "1"], "SC852"),
        (["--shard", "1/3", "--vllm-args", '{"dtype": "float32"}'], "SC852"),
        (["--shard", "0/3", "--max-seq-len", "4"], "SC852"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_overwritten(
    main: Any, generator: Any, job: list[Any], tmp_path: Path, capsys: Any, arguments: list[str], told: str  # noqa: F811
) -> None:
    assert main(*job, "--shard", "0/3") == 0
    before = content(tmp_path / "out")
    assert main(*job, *arguments) == 1
    assert f"[{told}]" in capsys.readouterr().err
    assert len(generator.made) == 1
    assert content(tmp_path / "out") == before


def test_the_same_shard_twice_and_a_run_beside_shards(
    main: Any, generator: Any, job: list[Any], tmp_path: Path, capsys: Any  # noqa: F811
) -> None:
    out = tmp_path / "out"
    assert main(*job, "--shard", "0/2") == 0
    claim = claims.take(out / "shard-0-of-2")
    assert main(*job, "--shard", "0/2") == 1
    assert "[SC607]" in capsys.readouterr().err
    assert merged(out) == 1
    assert "[SC607]" in capsys.readouterr().err
    claim.release()
    claim = claims.take(out)  # as a merge, or a run without --shard, has it
    assert main(*job, "--shard", "1/2") == 1
    assert "[SC607]" in capsys.readouterr().err
    claim.release()
    assert main(*job, "--shard", "1/2") == 0
    assert merged(out) == 0


def test_a_merge_refuses_what_is_not_alike(main: Any, generator: Any, job: list[Any], tmp_path: Path, capsys: Any) -> None:  # noqa: F811
    place = job.index("--output-dir") + 1
    assert main(*job, "--shard", "0/2") == 0
    job[place] = other = tmp_path / "other"
    for extra, told in (
        (["--shard", "1/2", "--final-norm"], "norm_state"),
        (["--shard", "1/2", "--layer-ids", 0], "layer_ids"),
        (["--shard", "1/3"], "shards of 2 and of 3"),
    ):
        assert main(*job, *extra) == 0
        before = content(tmp_path / "out")
        capsys.readouterr()
        assert shards.main([str(tmp_path / "out"), str(other)]) == 1
        assert told in capsys.readouterr().err
        assert content(tmp_path / "out") == before
        shutil.rmtree(other)


@pytest.mark.parametrize("what", ["foreign", "content", "engine", "no manifest", "manifest", "data", "nothing"])
def test_a_merge_refuses_what_something_else_has_put_there(
    main: Any, generator: Any, job: list[Any], tmp_path: Path, capsys: Any, what: str  # noqa: F811
) -> None:
    out = tmp_path / "out"
    one, two = out / "shard-0-of-2", out / "shard-1-of-2"
    for index in range(2):
        assert main(*job, "--shard", f"{index}/2") == 0
    manifest = json.loads((two / "manifest.json").read_text())
    told = "SC852"
    if what == "foreign":
        shutil.copy(one / "data_0.pt", two / "data_0.pt")
        told = "SC853"
    elif what == "content":
        data = torch.load(one / "data_0.pt", weights_only=True)
        job[job.index("--output-dir") + 1] = tmp_path / "more"
        assert main(*job, "--shard", "0/2") == 0
        data["hidden_states"][0] += 1
        torch.save(data, tmp_path / "more" / "shard-0-of-2" / "data_0.pt")
        (tmp_path / "more" / "shard-0-of-2" / "checksums.sha256").unlink()
        told = "SC853"
    elif what == "engine":
        manifest["recorded"]["engine"] = {"dtype": "float16"}
        (two / "manifest.json").write_text(json.dumps(manifest))
        other = json.loads((one / "manifest.json").read_text())
        other["recorded"]["engine"] = {"dtype": "bfloat16"}
        (one / "manifest.json").write_text(json.dumps(other))
    elif what == "no manifest":
        (two / "manifest.json").unlink()
    elif what == "manifest":
        (two / "manifest.json").write_text("{")
    elif what == "data":
        (tmp_path / "p.jsonl").write_text('{"input_ids": [1]}\n')
        told = "SC855"
    elif what == "nothing":
        shutil.rmtree(one)
        shutil.rmtree(two)
        told = "SC854"
    before = content(out)
    capsys.readouterr()
    assert shards.main([str(out), *([str(tmp_path / "more")] if what == "content" else [])]) == 1
    assert f"[{told}]" in capsys.readouterr().err
    after = content(out)
    after.pop("manifest.json", None)  # the output folder's own, of no samples
    after.pop("checksums.sha256", None)
    after.pop("sample_lengths.json", None)
    after.pop(".lock", None)
    assert after == before


@pytest.mark.parametrize("at", [0, 1, 5, 8])
def test_an_interrupted_merge_is_repeated(
    main: Any, generator: Any, job: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int  # noqa: F811
) -> None:
    out = tmp_path / "out"
    for index in range(2):
        assert main(*job, "--shard", f"{index}/2") == 0
    adopt, calls = shards._Target.adopt, []

    def stop(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(calls) == at:
            raise KeyboardInterrupt
        calls.append(args)
        adopt(self, *args, **kwargs)

    monkeypatch.setattr(shards._Target, "adopt", stop)
    with pytest.raises(KeyboardInterrupt):
        shards.merge(out)
    everything = [p.name for p in out.rglob("data_*.pt")]
    assert len(everything) == len(set(everything)) == 9
    monkeypatch.setattr(shards._Target, "adopt", adopt)
    result = shards.merge(out)
    assert (result.complete, result.samples, result.moved) == (True, 9, 9 - at)
    again = shards.merge(out)
    assert (again.complete, again.samples, again.expected, again.moved) == (True, 9, 9, 0)
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == []
    assert len(json.loads((out / "manifest.json").read_text())["recorded"]["shards"]) == 2
    job[job.index("--output-dir") + 1] = tmp_path / "whole"
    assert main(*job) == 0
    assert samples(out) == samples(tmp_path / "whole")


def test_a_damaged_sample_is_missing(main: Any, generator: Any, job: list[Any], tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    for index in range(2):
        assert main(*job, "--shard", f"{index}/2") == 0
    os.truncate(out / "shard-1-of-2" / "data_1.pt", 100)
    result = shards.merge(out)
    assert result.missing == {"1/2": [2]}
    assert not list(out.glob("shard*"))
    assert main(*job) == 0
    assert json.loads((out / "manifest.json").read_text())["complete"]


def test_more_shards_than_samples(main: Any, generator: Any, job: list[Any], tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    for index in (10, *range(10), 11):
        assert main(*job, "--shard", f"{index}/12") == 0
    assert len(generator.made) == 9  # no engine for nothing
    assert shards.merge(out).samples == 9
    job[job.index("--output-dir") + 1] = tmp_path / "whole"
    assert main(*job) == 0
    assert samples(out) == samples(tmp_path / "whole")


def test_a_limit_and_the_prompts_elsewhere(main: Any, generator: Any, job: list[Any], tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    for index in range(2):
        assert main(*job, "--limit", 5, "--shard", f"{index}/2") == 0
    (tmp_path / "p.jsonl").rename(tmp_path / "q.jsonl")
    with pytest.raises(CompatError, match="SC855"):
        shards.merge(out)
    result = shards.merge(out, prepared_data=tmp_path / "q.jsonl")
    assert (result.complete, result.samples, result.expected) == (True, 5, 5)
    assert sorted(dataio.find_finished(out)) == [0, 1, 2, 4, 5]
