"""Records what a rank's time goes on, step by step, for `--steps_csv`."""

from __future__ import annotations

import time

import torch

from torch_parallel.communicator import Communicator
from torch_parallel.steps import StepTimes
from torch_parallel.strategies import Strategy
from torch_parallel.training.straggler import Slowdown
from torch_parallel.transport.base import Transfer


class StepRecorder:
    """The steps of one rank since they were last taken; hangs itself on the transport's observer, beside another."""

    def __init__(self, communicator: Communicator, strategy: Strategy) -> None:
        self._communicator = communicator
        self._strategy = strategy
        self._transport = strategy.transport
        self._next = self._transport.observer
        self._transport.observer = self._transfer
        self._steps: list[StepTimes] = []
        self.begin()

    def begin(self) -> None:
        """The step begins; what happened since the last one ended belongs to none."""
        self._start_s = time.perf_counter()
        self._waited_s = list(self._transport.waited_s)
        self._update_s = self._strategy.update_clock.total_s
        self._move_s = self._reduce_s = self._compute_s = 0.0
        self._seen_waits_s = [0.0 for _ in self._waited_s]

    def computed(self, start_s: float) -> None:
        """Forward and backward began at `start_s` and end now."""
        self._compute_s += time.perf_counter() - start_s

    def end(self, epoch: int, step: int) -> None:
        waits = zip(self._transport.waited_s, self._waited_s, self._seen_waits_s, strict=True)
        waited_for_s = [late - early + seen for late, early, seen in waits]
        self._steps.append(
            StepTimes(
                epoch=epoch,
                step=step,
                rank=self._communicator.rank,
                role="server" if self._communicator.is_server else "worker",
                step_s=time.perf_counter() - self._start_s,
                compute_s=self._compute_s,
                wait_s=sum(waited_for_s),
                move_s=self._move_s,
                reduce_s=self._reduce_s,
                update_s=self._strategy.update_clock.total_s - self._update_s,
                waited_for_s=waited_for_s,
            )
        )

    def take(self) -> list[StepTimes]:
        """The steps recorded since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def _transfer(self, transfer: Transfer) -> None:
        seconds = transfer.end_s - transfer.start_s
        if transfer.reduce:
            self._reduce_s += seconds
        else:
            self._move_s += seconds
        if self._transport.enqueues:  # a stream's waits are known to who looks at the message only
            self._seen_waits_s[transfer.source] += transfer.start_s - transfer.wait_start_s
        if self._next is not None:
            self._next(transfer)


def compute_ends(
    start_s: float, step: int, device: torch.device, slowdown: Slowdown | None, recorder: StepRecorder | None
) -> None:
    """Forward and backward, begun at `start_s`, are done: makes them last longer and records them, if asked for."""
    if slowdown is None and recorder is None:
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if slowdown is not None:
        slowdown.stretch(start_s, step)
    if recorder is not None:
        recorder.computed(start_s)
