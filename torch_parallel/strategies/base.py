"""What a strategy is: the way by which workers come to hold the next parameters.

The training loop is the same for all: `begin_step()`, forward, loss, backward, `step()`. Ours are `FromScratch`
(`from_scratch.py`); torch's own stand in `builtin.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from torch_parallel.communicator import Communicator
from torch_parallel.gradients.layout import NamedParameters, take_out_of_common
from torch_parallel.status import UPDATING
from torch_parallel.strategies import optimizer_state
from torch_parallel.strategies.model_check import check_model, make_dense
from torch_parallel.strategies.replicas import give_everyone_the_same
from torch_parallel.strategies.shares import Share, synchronous_shares
from torch_parallel.strategies.stopwatch import Stopwatch
from torch_parallel.strategies.tally import Tally
from torch_parallel.strategies.watch import Watch
from torch_parallel.workloads.whole_model import ForwardState

OptimizerFactory = Callable[[NamedParameters], Optimizer]


class Strategy(ABC):
    """One rank's part in keeping the replicas equal: what the training loop calls.

    Set-up gives all ranks rank 0's parameters and buffers. Raises UnsupportedModel for a model that would not train as
    in one process, and TransportError naming the first parameter or buffer in which the ranks' models differ.
    """

    server_count: ClassVar[int] = 0
    options: ClassVar[tuple[str, ...]] = ()
    """Fields of the run's configuration that this strategy is made with, beside those that all have."""
    common_parameters: ClassVar[bool] = False
    """Whether the parameters of all ranks are one memory, where ranks have memory in common."""
    common_sums: ClassVar[bool] = False
    """Whether all ranks read the sums of the gradients in one memory, which nobody may write."""
    through_host: ClassVar[bool] = False
    """Whether it exchanges through the host's memory even where GPUs reach each other's: to look at who has come."""
    needs_network: ClassVar[bool] = False
    """Whether its processes connect to each other through a network, the loopback at least."""
    every_rank_computes: ClassVar[bool] = False
    """Whether a rank without samples takes part in forward and backward too, with a sample that counts nothing."""
    knows_next_share: ClassVar[bool] = True
    """Whether `shares` may be asked for the next step's share, or the end, before the present step is done."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_factory: OptimizerFactory,
        communicator: Communicator,
        bucket_bytes: int = 25 << 20,
        clip_norm: float | None = None,
        skip_not_finite: bool = False,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.clip_norm = clip_norm
        self.skip_not_finite = skip_not_finite
        self.last_norm: float | None = None
        """With clipping, the norm of the last step's whole mean gradient, on the ranks that update."""
        self.skipped_steps = 0
        self.step_was_skipped = False
        """Whether the last step was, as far as this rank knows; then its buffers are those of before."""
        self.tally: Tally | None = None
        """Of this epoch, where the server may go on without some workers; it counts on the server alone."""
        self.on_update: Callable[[int, float, float], None] | None = None
        """Called with bucket index, start and end (`time.perf_counter`) of each update made on this rank."""
        self.model = model
        self.forward: Callable[..., Any] = model
        """Maps a batch to logits: the model, or what a strategy put around it."""
        self.count_targets: Callable[[slice], int] = lambda places: int(places.stop - places.start)
        """How many targets the samples at these places of the epoch's order have; the training loop says it."""
        self.loss_factor = 1.0
        """By what the loss is multiplied before backward, for a strategy that takes means where ours take sums."""
        self.communicator = communicator
        self.transport = communicator.through_host if self.through_host else communicator.transport
        self.exchange_clock = Stopwatch(communicator.device)
        """Of exchanging, waiting included, as far as it does not overlap with backward."""
        self.exchange_samples: int | None = None
        """Steps whose exchange was timed, where torch does that now and then; None where all are."""
        self.update_clock = Stopwatch(communicator.device)
        self.optimizers: list[Optimizer] = []
        alone = communicator.world_size == 1
        take_out_of_common(model.parameters())
        check_model(model, alone=alone, in_process_group=self._in_process_group)
        make_dense(model)
        communicator.transport.agree(f"train by {type(self).__name__}, {self._settings}")
        give_everyone_the_same(model, communicator)
        self.watch = Watch(model, alone)
        self._before_step = ForwardState(model) if skip_not_finite else None

    @property
    def _settings(self) -> str:
        """What must be alike on all ranks, and is not the model's."""
        clip = f"clip_norm={self.clip_norm}, skip_not_finite={self.skip_not_finite}"
        return f"bucket_bytes={self.bucket_bytes}, {clip}"

    @property
    def _in_process_group(self) -> bool:
        """Whether layers that exchange by themselves, such as SyncBatchNorm, find a process group of torch."""
        return False

    @staticmethod
    def process_count(n: int) -> int:
        """How many processes drive `n` GPUs, or CPU workers."""
        return n

    @classmethod
    def in_step(cls, **options: Any) -> bool:
        """Whether, with these values of its `options`, all ranks hold the same parameters after every step."""
        return True

    @classmethod
    def adds_up_all(cls, **options: Any) -> bool:
        """Whether, with these values of its `options`, every update is of the sum of all workers' gradients."""
        return True

    @staticmethod
    def update_count(sample_count: int, batch_size: int, worker_count: int) -> int:
        """Updates of the parameters in one epoch."""
        return -(-sample_count // batch_size)

    def shares(self, sample_count: int, batch_size: int, first_sample: int = 0) -> Iterator[Share]:
        """What this rank trains on, step by step, in one epoch of which `first_sample` samples have been used before.

        A server's shares are empty, one for each of its updates. When it ends, all ranks hold the same parameters.
        """
        communicator = self.communicator
        return synchronous_shares(
            sample_count, batch_size, communicator.worker_index, communicator.worker_count, first_sample
        )

    @abstractmethod
    def optimized(self) -> Iterable[tuple[NamedParameters, Optimizer]]:
        """Each optimizer of this rank with its parameters, in its order; nothing on a rank that updates nothing."""

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """On rank 0, parameter name -> its whole state in the optimizer, on the CPU. All ranks call it."""
        return optimizer_state.read(self.optimized())

    def load_optimizer_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Gives this rank's optimizers the state of their own parameters, however and by whomever it was saved."""
        optimizer_state.restore(self.optimized(), state)

    def describe_buckets(self) -> list[dict[str, Any]]:
        """For each bucket of gradients its size in `bytes`, and what else was chosen for it; [] without buckets."""
        return []

    def set_learning_rate(self, lr: float) -> None:
        """For the steps to come; without effect on a rank that updates nothing."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    @property
    def updates_in_background(self) -> bool:
        """Whether a clock of the host or of the computing stream does not see updates."""
        return False

    def begin_step(self) -> None:
        """Clears the gradients. Raises UnsupportedModel for a parameter that was frozen and is not any more."""
        self.watch.begin_step()
        if self._before_step is not None:
            self._before_step.keep()

    def synchronising(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; `last` says whether it is the last one of its step."""
        return nullcontext()

    def compiling(self) -> AbstractContextManager[None]:
        """Around forward and backward where they may compile the model, which may take longer than the deadline."""
        return self.communicator.long_work("compiling the model")

    @abstractmethod
    def step(self) -> None:
        """Makes of the gradients on all ranks the next parameters on all ranks. Raises NotFinite."""

    def _end_step(self, skipped: bool) -> None:
        """A step that is skipped leaves buffers and extra state as they were before it."""
        self.step_was_skipped = skipped
        if skipped and self._before_step is not None:
            self._before_step.restore()

    def confirm(self) -> None:
        """Returns when all that the steps have enqueued is done. Raises NotFinite."""
        if self.communicator.device.type == "cuda":
            torch.cuda.current_stream(self.communicator.device).synchronize()

    @contextmanager
    def _updating(self, bucket_index: int) -> Iterator[None]:
        start_s = time.perf_counter()
        before = self.communicator.status.phase(UPDATING)
        with self._measured_by(self.update_clock):
            yield
        self.communicator.status.back_to(before)  # after an error it stays what it was
        if self.on_update is not None:
            self.communicator.transport.synchronize()
            self.on_update(bucket_index, start_s, time.perf_counter())

    def _measured_by(self, clock: Stopwatch) -> AbstractContextManager[None]:
        return clock.running()

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """After the last step, on all ranks."""
