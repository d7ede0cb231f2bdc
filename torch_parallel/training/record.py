"""What is recorded of an epoch: losses and accuracy of the whole run, and what each rank spent its time on."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_parallel.steps import StepTimes


@dataclass
class RankEpoch:
    """What one rank spent on the training part of one epoch; evaluation and checkpoints are not in it."""

    compute_s: float = 0.0
    exchange_s: float = 0.0  # without the waiting
    wait_s: float = 0.0
    update_s: float = 0.0
    waited_for_s: list[float] = field(default_factory=list)  # by peer
    received_bytes: list[int] = field(default_factory=list)  # by peer

    def numbers(self) -> list[float]:
        """All figures in a row, for an exchange between ranks; `from_numbers` is the reverse."""
        parts = [self.compute_s, self.exchange_s, self.wait_s, self.update_s]
        return [*parts, *self.waited_for_s, *self.received_bytes]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> RankEpoch:
        per_peer = (len(numbers) - 4) // 2
        compute_s, exchange_s, wait_s, update_s = numbers[:4]
        received_bytes = [int(number) for number in numbers[4 + per_peer :]]
        return cls(compute_s, exchange_s, wait_s, update_s, numbers[4 : 4 + per_peer], received_bytes)


@dataclass
class Epoch:
    """One line of a run's history. Losses are means over all samples of all workers, accuracy over all test samples."""

    epoch: int
    steps: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    train_s: float  # the training part, on the first worker
    samples_per_s: float  # of all workers; the run's first step, which warms up, is left out
    skipped_steps: int  # so far in the run, because a gradient was not finite
    ranks: list[RankEpoch]


@dataclass
class Started:
    """The first worker is about to train: processes, models and buffers are there."""

    epochs_done: int  # by the run that is resumed


@dataclass
class Steps:
    """What one rank recorded of the steps of an epoch."""

    steps: list[StepTimes]


@dataclass
class Saved:
    """A checkpoint that is on disk, whole."""

    step: int
    path: str
