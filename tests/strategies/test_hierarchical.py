"""Layouts of the all-reduce over nodes: each trains as one process does, and its cards carry what theory says."""

from __future__ import annotations

import csv
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel import Dataset, RunConfig, TrainingRun, launch, train
from torch_parallel.communicator import Communicator
from torch_parallel.strategies.all_reduce import balanced
from torch_parallel.topology import Topology
from torch_parallel.training.sampler import epoch_order

LAYOUTS = (
    *("flat_all_reduce", "hierarchical_leaders", "hierarchical_multi_nic"),
    *("hierarchical_grouped", "hierarchical_sharded"),
)
every_layout = pytest.mark.parametrize("strategy", LAYOUTS)
STEPS, BATCH = 3, 8


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 61), nn.Tanh(), nn.Linear(61, 47), nn.Tanh(), nn.Linear(47, 3))


def data() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS * BATCH - 3, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (len(inputs),), generator=generator)
    return Dataset("made", inputs, targets, inputs, targets, 3)


def run(folder: Path, strategy: str, **options: Any) -> TrainingRun:
    given: dict[str, Any] = {"dtype": "float64", "lr": 0.1, "batch_size": BATCH, "epochs": 1, "deadline_s": 30}
    given |= {"device": "cpu", "results_dir": str(folder), "optimizer": "adam"}
    return train(RunConfig(strategy=strategy, **given | options), make_model=model, dataset=data(), verbose=False)


def one_process() -> dict[str, Tensor]:
    torch.manual_seed(0)
    plain, samples = model().double(), data()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for batch in epoch_order(len(samples.train_inputs), 0, 1).split(BATCH):
        optimizer.zero_grad()
        cross_entropy(plain(samples.train_inputs[batch]), samples.train_targets[batch]).backward()
        optimizer.step()
    return plain.state_dict()


@every_layout
@pytest.mark.parametrize("nodes", [(2, 4), (3, 2), (1, 4), (4, 1)], ids=lambda nodes: f"{nodes[0]}x{nodes[1]}")
@pytest.mark.exhaustive
def test_training_on_nodes_is_that_of_one_process(tmp_path: Path, strategy: str, nodes: tuple[int, int]) -> None:
    trained = run(tmp_path, strategy, nodes=nodes[0], workers_per_node=nodes[1], check_replicas=1)
    for name, value in one_process().items():
        assert (trained.weights[name] - value).norm() <= 1e-12 * max(value.norm(), 1e-3), name


@every_layout
@pytest.mark.parametrize("nics", [1, 4])
@pytest.mark.exhaustive
def test_bytes_on_the_busiest_card(tmp_path: Path, strategy: str, nics: int) -> None:
    """In units of the buffer: 1.75; 1; 1, or 4 on one card; the largest group, or all; a quarter, or all."""
    trained = run(tmp_path, strategy, nodes=2, workers_per_node=4, nics=nics, bucket_mb=1.0)
    with open(Path(trained.folder) / "runs.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["rank"] != ""]
    received = [json.loads(row["received_bytes"]) for row in sorted(rows, key=lambda row: int(row["rank"]))]
    busiest = max(max(both) for both in Topology.of(8, nodes=2, nics=nics).carried_bytes(received))
    manifest = json.loads((Path(trained.folder) / "manifest.json").read_text())
    (bucket,) = manifest["buckets"]
    whole = bucket["bytes"]
    largest = max(bucket.get("group_bytes", [0])) / whole
    theory = {
        "flat_all_reduce": (1.75, 1.75),
        "hierarchical_leaders": (1, 1),
        "hierarchical_multi_nic": (4, 1),
        "hierarchical_grouped": (1, largest),
        "hierarchical_sharded": (1, 0.25),
    }[strategy][nics == 4]
    steps = math.ceil(len(data().train_inputs) / BATCH)
    assert busiest / (steps * whole) == pytest.approx(theory, rel=0.02)


@every_layout
def test_any_tensor_is_summed_with_the_same_bits_everywhere(strategy: str) -> None:
    algorithm = strategy.removesuffix("_all_reduce")

    def work(communicator: Communicator) -> list[list[float]]:
        sums = []
        for numel in (0, 1, 5, 97):
            own = torch.arange(numel, dtype=torch.float32) / 3 + communicator.rank
            sums.append(communicator.all_reduce(own, algorithm=algorithm).tolist())
        return sums

    uneven = Topology(node_of=(0, 0, 1), nic_of=(0, 0, 1), bytes_per_s=(math.inf, math.inf), latency_s=0.0)
    for links in (uneven, None):
        by_rank = launch(work, 3, links=links, deadline_s=30)
        assert by_rank[0] == by_rank[1] == by_rank[2]
        for numel, total in zip((0, 1, 5, 97), by_rank[0], strict=True):
            assert total == pytest.approx([k + 3.0 for k in range(numel)], rel=1e-6)


def test_parameters_are_balanced_over_the_cards() -> None:
    assert balanced([8, 7, 6, 5, 4], 2) == [[0, 3, 4], [1, 2]]  # 17 and 13: the largest first
    assert balanced([5], 3) == [[0], [], []]
    assert balanced([1, 1, 1, 1], 4) == [[0], [1], [2], [3]]
    sizes = [int(each) for each in torch.randint(1, 1000, (50,), generator=torch.Generator().manual_seed(1))]
    groups = balanced(sizes, 4)
    assert sorted(place for group in groups for place in group) == list(range(50))
    assert all(one < other for group in groups for one, other in pairwise(group))
    sums = [sum(sizes[place] for place in group) for group in groups]
    assert max(sums) <= 4 / 3 * sum(sizes) / 4 + max(sizes)
