"""Which all-reduce is chosen, from tables that are small enough to be looked through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_parallel import launch, train
from torch_parallel.analysis.choice import fastest_table
from torch_parallel.collectives.choice import TABLE, fastest_all_reduce
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import WorkerFailure
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.training.config import ConfigError, RunConfig
from torch_parallel.workloads import Dataset

RESULTS = Path(__file__).parents[2] / "results"
MiB = 1 << 20


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "table.csv"
    file.write_text(
        "device,n,size_bytes,algorithm\n"
        f"cpu,2,{MiB},tree\ncpu,2,{16 * MiB},two_shot\ncpu,8,{MiB},halving_doubling\ncuda,2,{MiB},one_shot\n"
        "cpu,2,4096,one_that_has_been_removed\n"
    )
    return file


@pytest.mark.parametrize(
    "device, n, nbytes, algorithm",
    [
        ("cpu", 2, MiB, "tree"),
        ("cpu", 2, 1, "tree"),  # what it knows no more is not chosen
        ("cpu", 2, 3.9 * MiB, "tree"),  # 4 MiB lies in the middle of 1 and 16, by factors
        ("cpu", 2, 4.1 * MiB, "two_shot"),
        ("cpu", 8, 100 * MiB, "halving_doubling"),
        ("cpu", 3, MiB, "ring"),  # what is good for two or eight may be bad for three
        ("cuda", 2, 4096, "one_shot"),
        ("cpu", 1, MiB, "ring"),
        ("xpu", 2, MiB, "ring"),
    ],
)
def test_the_nearest_that_was_measured(table: Path, device: str, n: int, nbytes: float, algorithm: str) -> None:
    assert fastest_all_reduce(device, n, int(nbytes), table) == algorithm


def test_without_a_table_it_is_the_ring(tmp_path: Path) -> None:
    assert fastest_all_reduce("cpu", 2, MiB, tmp_path / "none.csv") == "ring"


def test_the_committed_table_is_what_the_benches_measured() -> None:
    assert TABLE.read_text() == fastest_table(RESULTS)


def test_the_table_takes_the_fastest_of_each_size_and_on_gpus_of_calls_back_to_back(tmp_path: Path) -> None:
    cpu, gpus = tmp_path / "bench_collectives" / "one", tmp_path / "bench_all_reduce_gpu" / "one"
    for folder in (cpu, gpus):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"status": "completed", "started": "2026-01-01"}')
    (cpu / "bench.csv").write_text(
        "collective,way,n,size_bytes,time_us\nall_reduce,gloo,2,64,1\nall_reduce,ring,2,64,9\nall_reduce,tree,2,64,8\n"
        "broadcast,tree,2,64,1\nall_reduce,ring,4,64,5\n"
    )
    (gpus / "bench.csv").write_text(
        "collective,way,n,size_bytes,time_us,back_to_back_us\n"
        'all_reduce,nccl,2,64,1,1\nall_reduce,"ring, auto",2,64,9,2\nall_reduce,"tree, auto",2,64,8,3\n'
        'all_reduce,"one_shot, plain",2,64,1,1\n'
        'all_reduce,"two_shot_in_place, auto",2,64,1,1\n'
    )
    assert fastest_table(tmp_path).splitlines() == [
        "device,n,size_bytes,algorithm",
        "cpu,2,64,tree",
        "cpu,4,64,ring",
        "cuda,2,64,ring",
    ]


def chosen(communicator: Communicator, algorithms: list[str]) -> list[str]:
    """A small bucket and one of 4 MiB."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(1024, 1024, bias=False))
    strategy = FROM_SCRATCH["all_reduce"](
        model,
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        communicator,
        bucket_bytes=4 * MiB,
        algorithm=algorithms[communicator.rank],
    )
    return [strategy.collective(bucket.shared.local).name for bucket in strategy.buckets]


def test_each_bucket_has_its_own() -> None:
    expected = [fastest_all_reduce("cpu", 2, nbytes) for nbytes in (4 * MiB, 40)]
    assert launch(chosen, 2, ["auto", "auto"], deadline_s=30) == [expected, expected]
    assert launch(chosen, 2, ["tree", "tree"], deadline_s=30) == [["tree", "tree"]] * 2


def test_what_was_chosen_is_said_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of 4 MiB and one of 4 weights and 4 biases, in float32."""
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1024 * 256, bias=False))
    inputs, targets = torch.zeros(4, 1, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    data = Dataset("made_up", inputs, targets, inputs, targets, 2, (0.5,), (0.25,), "the test")
    config = RunConfig(
        strategy="all_reduce", device="cpu", n_gpus=2, epochs=1, bucket_mb=4.0, results_dir=str(tmp_path)
    )
    folder = train(config, make_model=lambda: model, dataset=data).folder
    large, small = (fastest_all_reduce("cpu", 2, nbytes) for nbytes in (4 * MiB, 32))
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
    assert manifest["buckets"] == [{"bytes": 4 * MiB, "algorithm": large}, {"bytes": 32, "algorithm": small}]
    assert f"gradients are summed in buckets: 4 MiB by {large}, 32 B by {small}\n" in capsys.readouterr().out


def test_ranks_that_would_choose_unlike_are_told_so() -> None:
    told = r"sum gradients by (tree, tree, but .* by ring, ring|ring, ring, but .* by tree, tree)"
    with pytest.raises(WorkerFailure, match=told):
        launch(chosen, 2, ["tree", "ring"], deadline_s=30)


def test_only_all_reduce_takes_an_algorithm() -> None:
    assert RunConfig(strategy="all_reduce", algorithm="tree").own_options["algorithm"] == "tree"
    with pytest.raises(ConfigError, match=r"--algorithm tree: ring_all_reduce does not take it; give .* all_reduce"):
        RunConfig(algorithm="tree")
    with pytest.raises(ConfigError, match="--algorithm best: choose from auto, ring"):
        RunConfig(strategy="all_reduce", algorithm="best")
