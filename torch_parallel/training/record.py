"""What is recorded of an epoch: losses and accuracy of the whole run, and what each rank spent its time on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_parallel.communicator import Communicator
from torch_parallel.steps import StepTimes
from torch_parallel.strategies.tally import Tally


@dataclass
class RankEpoch:
    """What one rank spent on the training part of one epoch; evaluation and checkpoints are not in it.

    NaN is what cannot be told from the part before it, and is in that: an exchange that only torch times, on GPUs what
    a stream waits for, and updates that are made while others are exchanged.
    """

    compute_s: float = 0.0
    exchange_s: float = 0.0  # without the waiting
    wait_s: float = 0.0
    update_s: float = 0.0
    waited_for_s: list[float] = field(default_factory=list)  # by peer
    received_bytes: list[int] = field(default_factory=list)  # by peer
    nic_bytes: list[int] = field(default_factory=list)  # of the node's cards, sent and received; on its lowest rank
    peak_process_bytes: int = 0  # of memory, in the run so far
    peak_gpu_bytes: int = 0  # likewise, of what torch has taken of the GPU
    exchanged_part: float = math.nan  # of the epoch's seconds; the run's first step, which warms up, is left out
    waited_part: float = math.nan  # likewise

    def numbers(self) -> list[float]:
        """All figures in a row, for an exchange between ranks; `from_numbers` is the reverse."""
        parts = [self.compute_s, self.exchange_s, self.wait_s, self.update_s]
        parts += [self.exchanged_part, self.waited_part, self.peak_process_bytes, self.peak_gpu_bytes]
        return [*parts, len(self.nic_bytes), *self.nic_bytes, *self.waited_for_s, *self.received_bytes]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> RankEpoch:
        seconds, parts, peaks, of_nics, rest = numbers[:4], numbers[4:6], numbers[6:8], int(numbers[8]), numbers[9:]
        by_peer = rest[of_nics:]
        per_peer = len(by_peer) // 2
        spent = cls(seconds[0], seconds[1], seconds[2], seconds[3])
        spent.exchanged_part, spent.waited_part = parts
        spent.peak_process_bytes, spent.peak_gpu_bytes = map(int, peaks)
        spent.nic_bytes = [int(number) for number in rest[:of_nics]]
        spent.waited_for_s = by_peer[:per_peer]
        spent.received_bytes = [int(number) for number in by_peer[per_peer:]]
        return spent

    def set_parts(self, train_s: float, first: RankEpoch | None, first_s: float) -> None:
        """`train_s` are the seconds of the epoch, `first_s` those of a first step that is left out."""
        first = first or RankEpoch()
        rest_s = train_s - first_s
        if rest_s > 0:
            self.exchanged_part = (self.exchange_s - first.exchange_s) / rest_s
            self.waited_part = (self.wait_s - first.wait_s) / rest_s


@dataclass
class Served:
    """What a server that may go on without some workers did in one epoch: see `strategies/tally.py`."""

    updates: int
    dropped: int  # workers' shares of a step that were not waited for
    samples_lost: int  # in these shares
    staleness_counts: list[int]  # gradients by their staleness, from 0 on

    @classmethod
    def of(cls, tally: Tally | None, communicator: Communicator) -> Served | None:
        """The server's tally, on all ranks, which all call it; None for a strategy whose server waits for everybody."""
        if tally is None:
            return None
        numbers = [tally.updates, tally.dropped, tally.samples_lost, len(tally.staleness_counts)]
        updates, dropped, samples_lost, length = communicator.broadcast(torch.tensor(numbers, device="cpu")).tolist()
        counts = torch.zeros(length, dtype=torch.int64, device="cpu")
        if communicator.is_server:
            counts += torch.tensor(tally.staleness_counts, dtype=torch.int64, device="cpu")
        return cls(updates, dropped, samples_lost, communicator.broadcast(counts).tolist())

    @property
    def staleness_mean(self) -> float:
        """Over all gradients that were applied; 0 where there are none."""
        weighted = sum(staleness * count for staleness, count in enumerate(self.staleness_counts))
        return weighted / max(1, sum(self.staleness_counts))

    @property
    def staleness_max(self) -> int:
        return max(0, len(self.staleness_counts) - 1)


@dataclass
class Epoch:
    """One line of a run's history. Losses are means over all targets of all workers, and so is accuracy of the test's.

    `metrics` holds what else the task makes of the test samples, by name; `test_accuracy` is NaN where it has none.
    """

    epoch: int
    steps: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    train_s: float  # the training part, on the first worker
    samples_per_s: float  # of all workers; the run's first step, which warms up, is left out
    skipped_steps: int  # so far in the run, because a gradient was not finite
    ranks: list[RankEpoch]
    served: Served | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    test_s: float = math.nan  # the evaluation, on the first worker

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Epoch:
        """The reverse of `dataclasses.asdict`."""
        served = fields.get("served")
        ranks = [RankEpoch(**rank) for rank in fields["ranks"]]
        return cls(**{**fields, "ranks": ranks, "served": Served(**served) if served else None})


@dataclass
class Started:
    """The first worker is about to train: processes, models and buffers are there."""

    epochs_done: int  # by the run that is resumed
    buckets: list[dict[str, Any]]  # see Strategy.describe_buckets
    in_training_mode: bool = True  # the model, as make_model left it
    flops_of_sample: float | None = None  # floating-point operations of forward and backward; asked for on GPUs alone
    arithmetic: str = "full"  # what a GPU does most of them in: see `flops.arithmetic`


@dataclass
class Steps:
    """What one rank recorded of the steps of an epoch."""

    steps: list[StepTimes]


@dataclass
class Saved:
    """A checkpoint that is on disk, whole."""

    step: int
    path: str
