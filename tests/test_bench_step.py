"""Steps beside DistributedDataParallel's: who is timed when, on what, and what is made of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from figures import figures

from torch_parallel import bench, launch
from torch_parallel.bench import sides, step, step_options, turns
from torch_parallel.bench.setting import Setting
from torch_parallel.bench.sides import PlainSide
from torch_parallel.communicator import Communicator
from torch_parallel.training.config import ConfigError
from torch_parallel.workloads.task import target_counts
from torch_parallel.workloads.tree import count

KINDS = ("ring_all_reduce", "two_shot_in_place", "param_server", "sharded_param_server")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.exhaustive
def test_steps_beside_ddp(optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server too, which is one process more. The sides train the same: their parameters differ by rounding."""
    bench.main(
        ["step", "--strategy", *KINDS, "--parameters_m", "0.1", "--steps", "2", "--repeats", "3"]
        + ["--device", "cpu", "--n_gpus", "2"]
        + ["--optimizer", optimizer, "--batch_size", "5", "--results_dir", str(tmp_path)]
    )
    (alone, *rows), manifest = figures(tmp_path)
    assert (alone["side"], float(alone["efficiency"])) == ("one process", 1)
    assert alone["times_faster_than_ddp"] == alone["memory_bytes"] == alone["difference_of_parameters"] == ""
    times_alone = json.loads(alone["all_s"])
    assert len(times_alone) == 3 * len(KINDS) and min(times_alone) > 0
    assert [(row["side"], row["beside"]) for row in rows] == [
        pair for name in KINDS for pair in ((name, "ddp"), ("ddp", name))
    ]
    assert 95_000 < manifest["parameters"] < 105_000
    assert (manifest["status"], manifest["n"]) == ("completed", 2)
    output = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in output[1:-1]] == [row["side"] for row in (alone, *rows)]
    for ours, theirs, lines in zip(rows[::2], rows[1::2], zip(output[2::2], output[3::2], strict=False), strict=True):
        for row, line in zip((ours, theirs), lines, strict=True):
            times = json.loads(row["all_s"])
            assert len(times) == 3 and min(times) > 0
            assert float(row["median_s"]) == pytest.approx(sorted(times)[1], abs=1e-6)
            assert float(row["steps_per_s"]) == pytest.approx(1 / sorted(times)[1], rel=1e-3)
            assert float(row["difference_of_parameters"]) < 1e-4
            efficiency = float(alone["median_s"]) / float(row["median_s"])
            assert float(row["efficiency"]) == pytest.approx(efficiency, abs=2e-3)
            assert f"{float(row['times_faster_than_ddp']):.2f} x ddp" in line
            if sys.platform == "linux":
                assert 2**20 < int(row["memory_bytes"]) < 2**34
        ratio = float(theirs["median_s"]) / float(ours["median_s"])
        assert float(ours["times_faster_than_ddp"]) == pytest.approx(ratio, rel=1e-2)
        assert float(theirs["times_faster_than_ddp"]) == float(theirs["part_of_ddps_memory"] or 1) == 1


def test_one_process_alone_is_the_fullest_worker_with_its_samples() -> None:
    """Of 5 samples 3; the server and the second worker wait."""
    setting = Setting(parameters=1000, batch_size=5, optimizer="sgd")

    def samples_of_a_step(communicator: Communicator) -> int:
        side = PlainSide(communicator, setting)
        side.step()
        return 0 if side.idle else count(side.batch)

    assert launch(samples_of_a_step, 3, server_count=1, deadline_s=20) == [0, 3, 0]


def test_each_side_follows_the_other_one_as_often_as_itself(tmp_path: Path) -> None:
    """And nobody follows the one process alone, during whose steps the other workers' processors cool down."""
    setting = Setting(parameters=1000, batch_size=5, optimizer="sgd")

    def turns_of(communicator: Communicator) -> list[str]:
        log: list[str] = []
        for side, name in ((sides.OurSide, "ours"), (PlainSide, "alone"), (sides.DdpSide, "ddp")):
            side.step = lambda self, name=name: log.append(name)  # type: ignore[method-assign,misc]
        turns.time_steps(communicator, setting, "ring_all_reduce", 1, 3, str(tmp_path / "store"))
        return log[::2]  # each turn is a step to warm up and the one that is timed

    mirrored = ["ours", "ddp", "ddp", "ours"]
    assert launch(turns_of, 1, deadline_s=60) == [["alone"] * 3 + 2 * mirrored + ["alone"] * 2]


@pytest.mark.exhaustive
def test_what_can_exchange_during_backward_does_so_too_if_there_are_several_buckets(tmp_path: Path) -> None:
    bench.main(
        ["step", "--strategy", "ring_all_reduce", "sharded_param_server", "--parameters_m", "0.1", "--steps", "1"]
        + ["--repeats", "1", "--device", "cpu", "--n_gpus", "2", "--bucket_mb", "0.1", "--results_dir", str(tmp_path)]
    )
    ours = [row["side"] for row in figures(tmp_path)[0] if row["beside"] == "ddp"]
    assert ours == ["ring_all_reduce", "ring_all_reduce, overlapping", "sharded_param_server"]


@pytest.mark.exhaustive
def test_both_sides_drop_the_same_out(tmp_path: Path) -> None:
    """So parameters of mobilenet_v2, which drops a fifth of its features, may differ by rounding alone."""
    bench.main(
        ["step", "--strategy", "ring_all_reduce", "--model", "mobilenet_v2", "--image_side", "32", "--steps", "1"]
        + ["--repeats", "1", "--device", "cpu", "--n_gpus", "2", "--batch_size", "4", "--results_dir", str(tmp_path)]
    )
    assert all(float(row["difference_of_parameters"]) < 1e-6 for row in figures(tmp_path)[0][1:])


def test_sides_with_processes_of_their_own(tmp_path: Path) -> None:
    """Of mlp with 99,710 parameters, which are 784 + 100 + 100 + 100 + 10 neurons; 4 samples a step, 2 a worker."""
    bench.main(
        ["step", "--strategy", "param_server", "--parameters_m", "0.0997", "--apart", "--steps", "1", "--repeats", "1"]
        + ["--device", "cpu", "--n_gpus", "2", "--batch_size", "4", "--results_dir", str(tmp_path)]
    )
    (alone, *rows), manifest = figures(tmp_path)
    assert [row["side"] for row in rows] == ["param_server", "ddp"]
    assert manifest["parameters"] == 784 * 100 + 2 * 100**2 + 100 * 10 + 310
    assert manifest["flops_of_step"] == 2 * 4 * (2 * 784 * 100 + 3 * (2 * 100**2 + 100 * 10))
    assert manifest["way"] == "apart"
    for row, samples in ((alone, 2), *((row, 4) for row in rows)):
        assert row["way"] == "apart" and len(json.loads(row["all_s"])) == 1
        assert row["tokens_per_s"] == row["model_flops_utilisation"] == ""  # no texts, and no GPU
        assert float(row["samples_per_s"]) == pytest.approx(samples / float(row["median_s"]), rel=2e-3)
    assert all(float(row["difference_of_parameters"]) < 1e-6 for row in rows)
    assert [row["verdict"] in ("faster", "level", "slower") for row in rows] == [True, False]


@pytest.mark.exhaustive
def test_a_model_of_texts_beside_ddp(tmp_path: Path) -> None:
    """It drops out a tenth of what it computes, and samples have unlike numbers of targets."""
    setting = Setting(0, 4, "sgd", model="distilbert", model_size="tiny", length=8, vocabulary_size=50)
    given = (setting, "ring_all_reduce", 1, 1, str(tmp_path / "store"))
    seconds, difference, _ = launch(turns.time_steps, 2, *given, deadline_s=100)[0]
    assert {side: len(times) for side, times in seconds.items()} == {"ring_all_reduce": 1, "ddp": 1, "one process": 1}
    assert difference < 1e-6


def test_throughput_is_of_what_a_side_is_fed_with() -> None:
    """5 texts of 8 tokens for two workers, one of which has 3. Two A100 do 624e12 operations in bf16 in a second."""
    setting = Setting(0, 5, "sgd", model="bert", length=8)
    cards = 2 * ["NVIDIA A100-SXM4-80GB"]
    both = step.throughput(setting, 2, "ddp", 0.5, 156 * 10**12, cards, "bf16")
    assert both == {"samples_per_s": 10, "tokens_per_s": 80, "model_flops_utilisation": 0.5}
    alone = step.throughput(setting, 2, "one process", 0.5, 130 * 10**12, cards, "bf16")
    assert alone == {"samples_per_s": 6, "tokens_per_s": 48, "model_flops_utilisation": 0.5}  # 78e12 of 312e12 x 0.5 s
    images = step.throughput(Setting(0, 5, "sgd"), 2, "ddp", 0.5, None, [], "full")
    assert images == {"samples_per_s": 10, "tokens_per_s": None, "model_flops_utilisation": None}


@pytest.mark.parametrize(
    ("task", "leaves"),
    [
        ("masked", {"tokens": (3, 8), "mask": (3, 8), "targets": (3, 8)}),
        ("classification", {"tokens": (3, 8), "mask": (3, 8), "targets": (3,)}),
        ("next_token", {"tokens": (3, 9), "count": (3,)}),
    ],
)
def test_texts_are_made_on_the_spot(task: str, leaves: dict[str, tuple[int, ...]]) -> None:
    model = "gpt2" if task == "next_token" else "bert"
    workload = Setting(0, 3, "sgd", model=model, task=task, length=8, vocabulary_size=5).workload(3)
    made = workload.samples.train
    assert {name: tuple(leaf.shape) for name, leaf in made.items()} == leaves
    assert made["tokens"].min() >= 0 and made["tokens"].max() < 5
    counts = target_counts(workload.task, "made up", made)
    if task == "masked":
        assert counts is not None and counts.min() >= 1 and counts.max() < 8
    else:
        assert (None if counts is None else counts.tolist()) == ([8, 8, 8] if task == "next_token" else None)


@pytest.mark.parametrize(
    ("ours", "ddps", "word"),
    [
        ([8.0, 8.1, 8.2], [9.0, 9.1, 9.2], "faster"),
        ([9.0, 9.1, 9.2], [8.0, 8.1, 8.2], "slower"),
        ([8.0, 8.1, 9.1], [9.0, 9.1, 9.2], "level"),  # some of ours are as slow as theirs
        ([8.000, 8.001, 8.002], [8.010, 8.011, 8.012], "level"),  # a thousandth apart
        ([8.0], [9.0], "faster"),
    ],
)
def test_the_verdict_is_of_medians_and_of_quartiles(ours: list[float], ddps: list[float], word: str) -> None:
    assert step.verdict(ours, ddps) == word


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("mlp --model_size tiny", "--model mlp --model_size tiny: size is 'tiny', but mlp comes in one size only"),
        ("distilbert --model_size large", "there is no such distilbert; choose from tiny, small, base"),
        ("bert --task next_token", "--model bert: bert cannot take texts with the task next_token; choose from gpt2"),
        ("bert --image_side 32", "--image_side 32: bert is fed with no images; leave it out"),
        ("cnn --length 3", "--length 3: cnn is fed with no texts; leave it out"),
        ("gpt2 --length 0", "--length 0: it must be at least 1"),
        ("gpt2 --vocabulary_size 0", "--vocabulary_size 0: it must be at least 1"),
        ("vit --image_side 33", "--image_side 33: vit cannot take such images"),
    ],
)
def test_what_a_model_cannot_be_fed_with(arguments: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        step_options.parse(["--device", "cpu", "--n_gpus", "2", "--model", *arguments.split()])
    assert len(str(caught.value).splitlines()) == 1


def test_images_are_of_the_side_that_a_size_is_for() -> None:
    """And of the usual one, which was so before there were sizes, where no size is asked for."""
    for asked, side, channels in (("cnn", 28, 1), ("vgg16 --model_size small", 64, 3), ("mobilenet_v2", 224, 3)):
        options = step_options.parse(["--device", "cpu", "--n_gpus", "2", "--model", *asked.split()])
        made = step_options.setting_of(options).workload(1).samples.train["inputs"]
        assert tuple(made.shape) == (1, channels, side, side)


def test_ddp_gets_the_bucket_that_it_is_fastest_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(
        ["step", "--strategy", "ring_all_reduce", "--parameters_m", "0.1", "--steps", "1", "--repeats", "2"]
        + ["--device", "cpu", "--n_gpus", "2", "--ddp_bucket_mb", "25", "0.05", "--results_dir", str(tmp_path)]
    )
    rows, manifest = figures(tmp_path)
    times = {float(mb): seconds for mb, seconds in manifest["ddp_step_s_by_bucket_mb"].items()}
    assert times.keys() == {25, 0.05}
    fastest = min(times, key=lambda mb: times[mb])
    assert manifest["ddp_bucket_mb"] == fastest and {float(row["ddp_bucket_mb"]) for row in rows} == {fastest}
    assert f"in a bucket; beside ours it has {fastest:g}" in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "chosen"), [(0, (2, "cpu")), (1, (2, "cpu")), (4, (4, "cuda"))])
def test_without_arguments_it_takes_what_train_py_takes(
    gpus: int, chosen: tuple[int, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    options = step_options.parse([])
    assert (options.n_gpus, options.device) == chosen
    assert ("training on the CPU with 2 processes" in capsys.readouterr().out) == (chosen[1] == "cpu")


def test_how_far_two_models_are_apart() -> None:
    """Parameters (3, 4 | 0) and (3, 4 | 1): 1 apart, of a norm of sqrt(26)."""
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    for model, bias in zip(models, (0.0, 1.0), strict=True):
        torch.nn.init.constant_(model.bias, bias)
        model.weight.data = torch.tensor([[3.0, 4.0]])
    assert sides.difference_of(*models) == pytest.approx(1 / 26**0.5)
    assert sides.difference_of(models[0], models[0]) == 0
    for parameter in models[0].parameters():
        torch.nn.init.zeros_(parameter)
    assert sides.difference_of(models[0], models[0]) == 0


@pytest.mark.parametrize("parameters", [1_000, 100_000, 25_000_000])
def test_the_model_has_about_the_size_asked_for(parameters: int) -> None:
    """To half a neuron of each hidden layer, which is 784 + 2 h parameters more or less."""
    with torch.device("meta"):
        model = Setting(parameters, 8, "sgd").make_model()
    sizes = [each.numel() for each in model.parameters()]
    width = sizes[1]
    assert abs(sum(sizes) - parameters) <= 784 + 4 * width + 20
