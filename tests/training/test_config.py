"""The command line of a run: its flags are the fields of RunConfig; what cannot be is one line and exit code 2."""

from __future__ import annotations

import dataclasses
import gzip
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from torch_parallel.command_line import run_command
from torch_parallel.strategies import STRATEGIES
from torch_parallel.training import emulation
from torch_parallel.training.config import CONTROL_FLAGS, ConfigError, RunConfig, command_line_parser
from torch_parallel.training.optimizers import OPTIMIZERS
from torch_parallel.training.schedule import SCHEDULES
from torch_parallel.workloads import MODELS
from torch_parallel.workloads.mnist import FILES

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, no data in the environment, and a mirror that refuses every download."""
    from torchvision.datasets import MNIST

    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("TORCH_PARALLEL_DATA", raising=False)
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:1/"])


def parse(*arguments: str) -> RunConfig:
    return RunConfig.from_command_line(arguments)


def the_one_line(capsys: pytest.CaptureFixture[str]) -> str:
    output, errors = capsys.readouterr()
    assert output == ""
    (line,) = errors.splitlines()
    return line


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line with which the command line is refused, while it is read."""
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)
    assert ended.value.code == 2
    return the_one_line(capsys)


def command_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The line with which `train.py` refuses what only the machine can tell."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_command("train.py", train.main)
    assert ended.value.code == 2
    line = the_one_line(capsys)
    assert line.startswith("train.py: error: ")
    return line


# What the flags are.


def test_every_field_is_a_flag_of_its_name_and_there_are_no_others() -> None:
    flags = re.findall(r"^  (--\w+)", command_line_parser().format_help(), flags=re.MULTILINE)
    assert flags == [f"--{field.name}" for field in dataclasses.fields(RunConfig)]
    assert all(field.metadata["help"] for field in dataclasses.fields(RunConfig))


@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("strategy", STRATEGIES),
        ("optimizer", OPTIMIZERS),
        ("model", MODELS),
        ("lr_schedule", SCHEDULES),
    ],
)
def test_choices_are_the_registries(name: str, registry: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    for choice in registry:
        assert getattr(parse(f"--{name}", choice), name) == choice
    line = refused(capsys, f"--{name}", "bogus")
    assert f"--{name}" in line and "bogus" in line
    assert re.findall(r"\w+", line.split("choose from")[1]) == list(registry)


def test_defaults() -> None:
    config = parse()
    assert config == RunConfig()
    assert (config.strategy, config.n_gpus, config.batch_size, config.dataset) == ("ring_all_reduce", None, None, None)
    assert (config.batch_size_on("mnist"), config.batch_size_on("digits")) == (64, 16)
    assert parse("--batch_size", "64").batch_size_on("digits") == 64
    assert (config.epochs_on("mnist"), config.epochs_on("digits")) == (3, 10)
    assert parse("--epochs", "2").epochs_on("digits") == 2
    for dataset, rates in (("mnist", [0.02, 0.001, 0.001]), ("digits", [0.004, 0.001, 0.001])):
        by_default = [parse("--optimizer", name) for name in ("sgd", "adam", "adamw")]
        assert [config.learning_rate_on(dataset) for config in by_default] == rates
    assert parse("--optimizer", "adam", "--lr", "0").learning_rate_on("digits") == 0
    given = config.resolved("digits", 100, 50)
    assert (given.epochs, given.batch_size, given.lr, given.train_size, given.test_size) == (10, 16, 0.004, 100, 50)
    assert given.resolved("mnist", 100, 50) == given


def test_values_arrive_with_their_types() -> None:
    config = parse("--n_gpus", "4", "--lr", "1e-3", "--batch_size=7", "--data_dir", "x", "--seed", str(2**63 - 1))
    assert (config.n_gpus, config.lr, config.batch_size, config.data_dir, config.seed) == (4, 0.001, 7, "x", 2**63 - 1)
    assert type(config.n_gpus) is int and type(parse("--lr", "1").lr) is float


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().epochs = 5  # type: ignore[misc]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    output, errors = capsys.readouterr()
    assert (ended.value.code, errors) == (0, "")
    for word in (*(f"--{field.name}" for field in dataclasses.fields(RunConfig)), *STRATEGIES, *OPTIMIZERS, *MODELS):
        assert word in output


# What cannot be, whatever the machine.

BAD = [
    ("--n_gpus", "0", "at least 1"),
    ("--n_gpus", "-1", "at least 1"),
    ("--n_gpus", "abc", "int"),
    ("--n_gpus", "2.0", "int"),
    ("--batch_size", "0", "at least 1"),
    ("--epochs", "0", "at least 1"),
    ("--lr", "-1", "not < 0"),
    ("--lr", "nan", "finite"),
    ("--lr", "inf", "finite"),
    ("--momentum", "1.5", "[0, 1)"),
    ("--momentum", "1", "[0, 1)"),
    ("--momentum", "nan", "[0, 1)"),
    ("--weight_decay", "-0.1", "not < 0"),
    ("--weight_decay", "inf", "finite"),
    ("--train_size", "0", "at least 1"),
    ("--seed", "-1", "[0, 2^63)"),
    ("--seed", str(2**63), "[0, 2^63)"),
    ("--bucket_mb", "0", "> 0"),
    ("--bucket_mb", "nan", "> 0"),
    ("--bucket_mb", "1e+305", "a TiB"),
    ("--deadline_s", "0", "> 0"),
    ("--deadline_s", "inf", "at most 2,000,000 s"),
    ("--deadline_s", "10000000000.0", "at most 2,000,000 s"),
    ("--device", "tpu", "choose from"),
    ("--dtype", "int8", "choose from"),
]


@pytest.mark.parametrize(("name", "value", "why"), BAD)
def test_a_bad_value_is_one_line_that_names_flag_and_value(
    name: str, value: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, name, value)
    said = f"{float(value)}" if "not < 0" in why else value  # -1 is told as -1.0
    assert name in line and said in line and why in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--bogus", "1"], "--bogus"),
        (["stray"], "stray"),
        (["--strat", "param_server"], "--strat"),
        (["--n", "2"], "--n"),
        (["--n-gpus", "2"], "--n-gpus"),
        (["--n_gpus"], "--n_gpus"),
    ],
)
def test_flags_are_written_out_and_spelled_right(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refused(capsys, *arguments)


def test_the_server_of_param_server_needs_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert "at least 2" in refused(capsys, "--strategy", "param_server", "--n_gpus", "1")
    assert parse("--strategy", "param_server", "--n_gpus", "2").n_gpus == 2
    assert parse("--strategy", "ring_all_reduce", "--n_gpus", "1").n_gpus == 1


def test_in_python_the_same_values_raise() -> None:
    with pytest.raises(ConfigError, match=r"--n_gpus 0: .*at least 1"):
        RunConfig(n_gpus=0)
    with pytest.raises(ConfigError, match=r"choose from ring_all_reduce, .*, param_server"):
        RunConfig(strategy="bogus")


@pytest.mark.parametrize(
    ("name", "value"), [("n_gpus", "4"), ("n_gpus", 2.0), ("epochs", 2.5), ("lr", "0.1"), ("accumulate", None)]
)
def test_in_python_a_value_of_another_type_raises_too(name: str, value: object) -> None:
    """Else it would fail in the workers, or be written to the manifest in a form that nobody expects."""
    with pytest.raises(ConfigError, match=f"--{name} .*{re.escape(str(value))}"):
        RunConfig(**{name: value})  # type: ignore[arg-type]


def test_in_python_a_whole_number_does_for_a_float() -> None:
    assert RunConfig(lr=1, weight_decay=0, bucket_mb=2).learning_rate_on("digits") == 1


# What this machine cannot do.


@pytest.mark.parametrize(("gpus", "n"), [(1, "2"), (2, "3")])
def test_more_gpus_than_there_are_on_the_command_line(
    gpus: int, n: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    line = command_refused(capsys, monkeypatch, "--n_gpus", n, "--dataset", "digits")
    assert f"--n_gpus {n}" in line and f"this machine has {gpus} GPU" in line


def test_no_gpu_and_no_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    assert "this machine has 0 GPUs" in command_refused(capsys, monkeypatch, "--device", "cuda")
    line = command_refused(capsys, monkeypatch, "--data_dir", "nowhere")
    assert "--data_dir nowhere" in line and "no such folder" in line
    for performer in ("triton", "plain"):
        line = command_refused(capsys, monkeypatch, "--device", "cpu", "--performer", performer)
        assert f"--performer {performer}: this run uses no GPU; take --performer auto" in line


def damage_nothing(place: Path) -> None:
    for name in FILES:
        (place / name).write_bytes(b"")


def damage_packed(place: Path) -> None:
    for name in FILES:
        (place / f"{name}.gz").write_bytes(gzip.compress(bytes(1000))[:-10])


@pytest.mark.parametrize("damage", [damage_nothing, damage_packed])
@pytest.mark.parametrize("dataset", [[], ["--dataset", "mnist"]], ids=["default", "mnist"])
def test_damaged_data_are_never_passed_over_for_others(
    damage: object,
    dataset: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    handlers: None,
) -> None:
    (tmp_path / "mnist").mkdir()
    damage(tmp_path / "mnist")  # type: ignore[operator]
    line = command_refused(capsys, monkeypatch, "--data_dir", str(tmp_path), *dataset)
    assert str(tmp_path / "mnist" / FILES[0]) in line and "delete it" in line


def test_data_that_cannot_be_had(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    line = command_refused(capsys, monkeypatch, "--dataset", "mnist")
    assert "neither found in data nor downloadable" in line and "--dataset digits" in line
    assert not list(Path().iterdir())


def test_a_subset_larger_than_the_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    line = command_refused(capsys, monkeypatch, "--dataset", "digits", "--train_size", "1438")
    assert "1438" in line and "1437" in line


@pytest.mark.parametrize("folder", ["file", "file/below", "dangling"])
def test_results_that_cannot_be_written(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    Path("file").write_text("")
    os.symlink("nowhere/at/all", "dangling")
    line = command_refused(capsys, monkeypatch, "--dataset", "digits", "--device", "cpu", "--results_dir", folder)
    assert f"--results_dir {folder}" in line
    assert sorted(path.name for path in Path().iterdir()) == ["dangling", "file"]


def test_a_refusal_of_the_real_command() -> None:
    """Exit code and streams of the process itself."""
    command = [sys.executable, ROOT / "train.py", "--n_gpus", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "train.py: error: --n_gpus 0: at least 1 process is needed\n"
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "device, flags, overlap",
    [
        ("cpu", {}, False),
        ("cuda", {}, True),
        ("cuda", {"overlap": False}, False),
        ("cpu", {"overlap": True}, True),
        ("cuda", {"steps_csv": "steps.csv"}, False),
        ("cuda", {"straggler": "1:4x"}, False),
        ("cuda", {"straggler": "1:5ms"}, False),
        ("cuda", {"compute_ms": 10.0}, False),
        ("cuda", {"link": "1gbit"}, False),
        ("cuda", {"trace": "trace.json"}, False),
    ],
)
def test_gpus_exchange_during_backward_unless_it_hides_what_is_asked_for(
    device: str, flags: dict[str, Any], overlap: bool
) -> None:
    assert RunConfig(**flags).strategy_options_on(device)["overlap"] == overlap
    assert RunConfig(strategy="sharded_param_server", overlap=False).strategy_options_on(device) == {}


def test_emulated_compute_is_not_to_hide_an_exchange() -> None:
    with pytest.raises(ConfigError, match=r"--compute_ms 10: with --overlap"):
        RunConfig(compute_ms=10, overlap=True)


def test_a_control_takes_what_its_help_lists_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_line_parser("", CONTROL_FLAGS)
    listed = set(re.findall(r"^  --(\w+)", parser.format_help(), re.MULTILINE))
    assert listed == set(CONTROL_FLAGS)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--staleness", "3"])
    assert capsys.readouterr().err.endswith(
        "error: unrecognized arguments: --staleness 3; --help lists what there is\n"
    )


def test_a_flag_that_is_on_or_off_is_told_as_it_was_given() -> None:
    with pytest.raises(ConfigError, match=r"^--overlap: ddp does not take it"):
        RunConfig(strategy="ddp", overlap=True)


def test_a_batch_for_each_worker_makes_the_whole_batch_and_the_rate_grow_with_them() -> None:
    two, three = (parse("--per_gpu_batch", "4", "--n_gpus", n).resolved("mnist", 100, 10) for n in ("2", "3"))
    assert (two.batch_size, three.batch_size, two.lr, three.lr) == (8, 12, 0.02, 0.02)
    served = parse("--per_gpu_batch", "4", "--n_gpus", "3", "--strategy", "param_server", "--scale_lr", "--lr", "0.1")
    assert (served.resolved("mnist", 100, 10).batch_size, served.resolved("mnist", 100, 10).lr) == (8, 0.2)
    assert served.resolved("mnist", 100, 10).resolved("mnist", 100, 10) == served.resolved("mnist", 100, 10)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["--max_steps", "7"], [100, 90]),
        (["--max_steps", "8"], [100, 100]),
        (["--max_steps", "1"], [30]),
        (["--max_steps", "9"], [100, 100, 30]),
        (["--max_steps", "7", "--epochs", "1"], [100]),
        (["--max_steps", "2", "--epochs", "9"], [60]),
        (["--epochs", "2"], [100, 100]),
    ],
)
def test_a_run_ends_after_so_many_steps_or_epochs(arguments: list[str], sizes: list[int]) -> None:
    """Steps of 30, 30, 30 and 10 samples an epoch."""
    config = parse("--batch_size", "30", *arguments).resolved("mnist", 100, 10)
    assert config.epoch_sizes(100) == sizes and config.epochs == len(sizes)


@pytest.mark.parametrize(
    ("setup", "strategy", "meant"),
    [
        ("2_3", "ring_all_reduce", (6, 2, 3, "10gbit", "50us")),
        ("2_3", "param_server", (7, 2, 3, "10gbit", "50us")),
        ("1_4", "ring_all_reduce", (4, None, None, None, None)),
        ("2_1", "ring_all_reduce", (2, 2, 1, "10gbit", "50us")),
    ],
)
def test_a_set_up_is_short_for_nodes_workers_and_links(setup: str, strategy: str, meant: tuple[object, ...]) -> None:
    config = parse("--setup", setup, "--strategy", strategy)
    assert (config.n_gpus, config.nodes, config.workers_per_node, config.link, config.latency) == meant
    assert dataclasses.replace(config) == config


def test_links_of_one_node_lie_between_no_workers() -> None:
    topology = emulation.topology(parse("--setup", "1_3", "--link", "1gbit"))
    assert topology is not None and topology.node_of == (0, 0, 0)
    served = emulation.topology(parse("--setup", "1_3", "--latency", "1ms", "--strategy", "param_server"))
    assert served is not None and served.node_of == (0, 1, 1, 1)


def test_a_set_up_takes_links_that_are_given() -> None:
    config = parse("--setup", "2_1", "--latency", "5ms")
    assert (config.link, config.latency) == (None, "5ms")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--setup", "2x2"], "--setup 2x2: it must be nodes and workers of each"),
        (["--setup", "0_2"], "--setup 0_2: it must be nodes and workers of each"),
        (["--setup", "2_2", "--n_gpus", "3"], "--n_gpus 3: --setup 2_2 says how many there are"),
        (["--setup", "1_2", "--nodes", "2", "--link", "1gbit"], "--nodes 2: --setup 1_2 says how many there are"),
        (["--per_gpu_batch", "4", "--batch_size", "8"], "--per_gpu_batch 4: it is what each worker gets"),
        (["--per_gpu_batch", "0"], "--per_gpu_batch 0: at least 1"),
        (["--scale_lr"], "--scale_lr: the batch, and so the rate that it takes"),
        (["--max_steps", "0"], "--max_steps 0: at least 1 step"),
        (
            ["--setup", "2_1", "--strategy", "all_reduce"],
            "--setup 2_1: between its nodes are emulated links",
        ),
        (
            ["--setup", "2_2", "--strategy", "ddp"],
            "--setup 2_2: between its nodes are emulated links",
        ),
        (["--setup", "99999999_1"], "--setup 99999999_1: these are 99999999 processes; at most 10000"),
        (["--model", "cnn", "--length", "32"], "--length 32: cnn takes images"),
        (
            ["--model", "bert", "--pretrained", "x", "--model_size", "tiny"],
            "--model_size tiny: the trained weights",
        ),
    ],
)
def test_what_a_set_up_or_a_batch_cannot_be_is_told(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert said in capsys.readouterr().err
