"""The one loop: forward, loss, backward, `strategy.step()`, for every strategy and every rank, server or worker."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel.communicator import Communicator
from torch_parallel.status import COMPUTING, EVALUATING
from torch_parallel.strategies import STRATEGIES, NotFinite
from torch_parallel.strategies.replicas import broadcast_all
from torch_parallel.training.config import RunConfig
from torch_parallel.training.evaluate import count_correct
from torch_parallel.training.optimizers import make_optimizer
from torch_parallel.training.sampler import batches, shard
from torch_parallel.workloads import Dataset

TENSORS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


@dataclass(frozen=True)
class Job:
    """What every rank of a run is given. The four tensors of `dataset` travel apart, in memory that all ranks map."""

    config: RunConfig
    dataset: Dataset
    make_model: Callable[[], nn.Module]


def make_job(config: RunConfig, dataset: Dataset, make_model: Callable[[], nn.Module]) -> tuple[Job, dict[str, Tensor]]:
    """The job, and the tensors to `launch(..., shared=...)` beside it."""
    tensors = {name: getattr(dataset, name) for name in TENSORS}
    nothing = torch.empty(0)
    without = replace(dataset, train_inputs=nothing, train_targets=nothing, test_inputs=nothing, test_targets=nothing)
    return Job(config, without, make_model), tensors


@dataclass
class RankEpoch:
    """What one rank spent on the training part of one epoch; evaluation is not in it."""

    compute_s: float = 0.0
    exchange_s: float = 0.0  # without the waiting
    wait_s: float = 0.0
    update_s: float = 0.0
    waited_for_s: list[float] = field(default_factory=list)  # by peer
    received_bytes: list[int] = field(default_factory=list)  # by peer


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
    ranks: list[RankEpoch]


def train_worker(communicator: Communicator, job: Job) -> dict[str, Any]:
    """The worker function of `train`: trains one rank; the first worker returns history and weights, the others {}."""
    return Trainer(communicator, job).run()


class Trainer:
    """One rank of a run."""

    def __init__(self, communicator: Communicator, job: Job) -> None:
        self.communicator = communicator
        self.config = config = job.config
        self.dataset = job.dataset
        self.data = {name: communicator.shared[name] for name in TENSORS}
        self.dtype = getattr(torch, config.dtype)
        torch.manual_seed(config.seed)
        self.model = job.make_model().to(communicator.device, self.dtype)
        self.strategy = STRATEGIES[config.strategy](
            self.model,
            partial(
                make_optimizer,
                name=config.optimizer,
                lr=config.learning_rate,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            ),
            communicator,
            bucket_bytes=int(config.bucket_mb * 2**20),
        )
        _seed_draws(config.seed, communicator.rank)
        self.history: list[Epoch] = []

    def run(self) -> dict[str, Any]:
        self.model.train()
        for epoch in range(1, self.config.epochs_on(self.dataset.name) + 1):
            loss_sum, spent, train_s, samples_per_s = self._train_epoch(epoch)
            self._finish_epoch(epoch, loss_sum, spent, train_s, samples_per_s)
        if self.communicator.worker_index != 0:
            return {}
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        return {"history": [asdict(epoch) for epoch in self.history], "weights": weights}

    def _train_epoch(self, epoch: int) -> tuple[float, RankEpoch, float, float]:
        communicator, status = self.communicator, self.communicator.status
        before = self._spent()
        loss_sum = torch.zeros((), dtype=torch.float64, device=communicator.device)
        samples, warm_up = 0, (0.0, 0)
        start_s = time.perf_counter()
        for step, (indices, global_count) in enumerate(self._batches(epoch), start=1):
            status.step(epoch, step, samples)
            status.phase(COMPUTING)
            loss_sum += self._step(indices, global_count, step, epoch)
            samples += global_count
            if (epoch, step) == (1, 1):
                warm_up = (time.perf_counter() - start_s, samples)
        train_s = time.perf_counter() - start_s
        status.step(epoch, step, samples)
        steady = samples > warm_up[1]
        rate = (samples - warm_up[1]) / (train_s - warm_up[0]) if steady else samples / train_s
        return loss_sum.item(), self._spent_since(before, train_s), train_s, rate

    def _step(self, indices: Tensor, global_count: int, step: int, epoch: int) -> Tensor:
        """One optimizer step; returns the sum of this rank's losses."""
        self.strategy.begin_step()
        loss_sum = torch.zeros((), device=self.communicator.device)
        if len(indices):
            logits = self.model(self._prepare(self.data["train_inputs"][indices].to(self.communicator.device)))
            targets = self.data["train_targets"][indices].to(self.communicator.device)
            loss = cross_entropy(logits, targets, reduction="sum") / global_count
            loss.backward()
            loss_sum = loss.detach() * global_count
        try:
            self.strategy.step()
        except NotFinite as error:
            raise NotFinite(f"{error} in step {step} of epoch {epoch} on rank {self.communicator.rank}") from None
        return loss_sum

    def _finish_epoch(self, epoch: int, loss_sum: float, spent: RankEpoch, train_s: float, rate: float) -> None:
        """Evaluates, adds up what all ranks have seen and spent, and tells the launcher."""
        test_loss, correct = self._evaluate()
        table = self._all_ranks([loss_sum, test_loss, correct, *_numbers(spent)])
        record = Epoch(
            epoch=epoch,
            steps=-(-len(self.data["train_targets"]) // self.config.batch_size),
            train_loss=table[:, 0].sum().item() / len(self.data["train_targets"]),
            test_loss=table[:, 1].sum().item() / len(self.data["test_targets"]),
            test_accuracy=table[:, 2].sum().item() / len(self.data["test_targets"]),
            train_s=train_s,
            samples_per_s=rate,
            ranks=[_rank_epoch(row[3:].tolist()) for row in table],
        )
        self.history.append(record)
        if self.communicator.worker_index == 0:
            self.communicator.report(record)

    def _evaluate(self) -> tuple[float, int]:
        """This rank's share of the test samples: sum of losses, correct predictions.

        BatchNorm's statistics are each worker's own while it trains; all evaluate with those of the first worker.
        """
        self.communicator.status.phase(EVALUATING)
        broadcast_all(list(self.model.buffers()), self.communicator, root=self.communicator.first_worker)
        targets = self.data["test_targets"]
        part = shard(len(targets), self.communicator.worker_index, self.communicator.worker_count)
        loss_sum, correct, _ = count_correct(
            self.model, self.data["test_inputs"][part], targets[part], self._prepare, self.communicator.device
        )
        return loss_sum, correct

    def _batches(self, epoch: int) -> Any:
        return batches(
            len(self.data["train_targets"]),
            self.config.batch_size,
            self.config.seed,
            epoch,
            self.communicator.worker_index,
            self.communicator.worker_count,
        )

    def _prepare(self, inputs: Tensor) -> Tensor:
        return self.dataset.normalize(inputs, self.dtype)

    def _all_ranks(self, numbers: list[float]) -> Tensor:
        """Everybody's `numbers`, float64 [world_size, len(numbers)]."""
        table = torch.zeros(self.communicator.world_size, len(numbers), dtype=torch.float64)
        table[self.communicator.rank] = torch.tensor(numbers, dtype=torch.float64)
        return self.communicator.all_reduce(table)

    def _spent(self) -> RankEpoch:
        transport = self.communicator.transport
        return RankEpoch(
            exchange_s=self.strategy.exchange_s,
            update_s=self.strategy.update_s,
            waited_for_s=list(transport.waited_s),
            received_bytes=list(transport.received_bytes),
        )

    def _spent_since(self, before: RankEpoch, train_s: float) -> RankEpoch:
        now = self._spent()
        waited_for_s = [late - early for late, early in zip(now.waited_for_s, before.waited_for_s, strict=True)]
        exchange_s, update_s = now.exchange_s - before.exchange_s, now.update_s - before.update_s
        return RankEpoch(
            compute_s=train_s - exchange_s - update_s,
            exchange_s=exchange_s - sum(waited_for_s),
            wait_s=sum(waited_for_s),
            update_s=update_s,
            waited_for_s=waited_for_s,
            received_bytes=[now_ - then for now_, then in zip(now.received_bytes, before.received_bytes, strict=True)],
        )


def _numbers(spent: RankEpoch) -> list[float]:
    return [
        spent.compute_s,
        spent.exchange_s,
        spent.wait_s,
        spent.update_s,
        *spent.waited_for_s,
        *spent.received_bytes,
    ]


def _rank_epoch(numbers: list[float]) -> RankEpoch:
    per_peer = (len(numbers) - 4) // 2
    compute_s, exchange_s, wait_s, update_s = numbers[:4]
    received_bytes = [int(number) for number in numbers[4 + per_peer :]]
    return RankEpoch(compute_s, exchange_s, wait_s, update_s, numbers[4 : 4 + per_peer], received_bytes)


def _seed_draws(seed: int, rank: int) -> None:
    """Dropout and augmentation draw differently on every rank, and the same again in the next run."""
    mixed = (seed * 1_000_003 + 7919 * (rank + 1)) % 2**32
    torch.manual_seed(mixed)
    random.seed(mixed)
    numpy.random.seed(mixed)
