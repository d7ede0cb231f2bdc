"""Torch's own DataParallel and DistributedDataParallel as strategies: the loop is ours, everything else is torch's.

They are here to be compared with, in the same loop and with the same records. The two scripts at the top level are the
stricter controls: they share no code with ours.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import secrets
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_parallel.communicator import Communicator
from torch_parallel.gradients.finite import NamedCheck, NotFinite, first_not_finite
from torch_parallel.gradients.layout import NamedParameters
from torch_parallel.strategies.base import OptimizerFactory, Strategy
from torch_parallel.strategies.model_check import UnsupportedModel
from torch_parallel.transport.process_groups import LONGEST_WORK, deadline_of, set_deadline
from torch_parallel.workloads.whole_model import of_sparse_gradients

OTHER_GRAPH = ("Expected to have finished reduction", "Your training graph has changed")
"""What torch says in the forward, or in the backward, of a step that uses other parameters than the first one."""
SAMPLED_EVERY = 10
"""DistributedDataParallel times its own exchange in one of so many steps; torch's default is 100."""


class Builtin(Strategy):
    """When backward returns, torch has put the mean of the gradients into every `.grad`; what is left is the update."""

    def __init__(self, model: nn.Module, optimizer_factory: OptimizerFactory, *arguments: Any, **options: Any) -> None:
        super().__init__(model, optimizer_factory, *arguments, **options)
        if (fault := of_sparse_gradients(model)) is not None:
            raise UnsupportedModel(f"{fault}, or take another --strategy")
        self.parameters = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        if not self.parameters:
            raise ValueError("the model has no trainable parameter: all are frozen (requires_grad=False), or none is")
        self.optimizers = [optimizer_factory(self.parameters)]
        # Whoever needs the norm before the update waits for it; else a GPU is not to run out of work for being asked.
        later = self.communicator.device.type == "cuda" and self.clip_norm is None and not self.skip_not_finite
        self._later = NamedCheck(len(self.parameters), self.communicator.device) if later else None

    def optimized(self) -> Iterable[tuple[NamedParameters, Optimizer]]:
        return [(self.parameters, self.optimizers[0])]

    def begin_step(self) -> None:
        super().begin_step()
        self.optimizers[0].zero_grad()

    def step(self) -> None:
        self.watch.look()
        with self._updating(0):
            skipped_before = self.skipped_steps
            self._step()
        self._end_step(skipped=self.skipped_steps > skipped_before)

    def _step(self) -> None:
        gradients = [(name, each.grad) for name, each in self.parameters if each.grad is not None]
        if self._later is not None:
            self._later.look(gradients)
            self.optimizers[0].step()
            return
        norm = torch.nn.utils.get_total_norm([gradient for _, gradient in gradients])
        self.last_norm = norm.item()
        if not math.isfinite(self.last_norm):  # it may overflow though no gradient does
            norm = torch.nn.utils.get_total_norm([gradient.double() for _, gradient in gradients])
            self.last_norm = norm.item()
        if not math.isfinite(self.last_norm) and (name := first_not_finite(gradients)) is not None:
            if not self.skip_not_finite:
                raise NotFinite.of(name)
            self.skipped_steps += 1
            return
        if self.clip_norm is not None:
            parameters = [each for _, each in self.parameters]
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
        self.optimizers[0].step()

    def confirm(self) -> None:
        super().confirm()
        if self._later is not None:
            self._later.confirm()


class DistributedDataParallelStrategy(Builtin):
    """torch.nn.parallel.DistributedDataParallel at its best settings: gloo on the CPU, NCCL on GPUs.

    Gradients lie in its buckets, and the graph is taken to be the same in every step, which torch does not allow with
    accumulation: then every step must use every parameter, else RuntimeError.
    """

    options = ("accumulate",)
    needs_network = True
    every_rank_computes = True  # each of them waits for all others during backward

    @property
    def _in_process_group(self) -> bool:
        return self.communicator.device.type == "cuda"  # where torch's SyncBatchNorm works

    def __init__(self, *arguments: Any, accumulate: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.accumulate = accumulate
        communicator = self.communicator
        on_gpu = communicator.device.type == "cuda"
        deadline = deadline_of(communicator.deadline_s)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=_meet(communicator, deadline),
            timeout=deadline,
            rank=communicator.rank,
            world_size=communicator.world_size,
        )
        self.ddp = at_its_best(
            self.model,
            device_ids=[communicator.device.index] if on_gpu else None,
            bucket_cap_mb=self.bucket_bytes / 2**20,
            static_graph=accumulate == 1,
            init_sync=False,  # set-up has given all ranks the same, and torch writes no expanded buffers
        )
        self.ddp._set_ddp_runtime_logging_sample_rate(SAMPLED_EVERY)
        self.forward = self._forward
        self.loss_factor = float(communicator.world_size)  # it takes the mean over the ranks
        self._steps = self.exchange_samples = 0

    def begin_step(self) -> None:
        self.transport.count_call("begin a step of DistributedDataParallel")
        super().begin_step()

    @contextlib.contextmanager
    def synchronising(self, last: bool) -> Iterator[None]:
        with self._same_graph(), contextlib.nullcontext() if last else self.ddp.no_sync():
            yield

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Meanwhile a stopped process is found by the launcher alone: the group cannot tell it from one at work."""
        set_deadline(LONGEST_WORK)
        try:
            with super().compiling():
                yield
        finally:
            set_deadline(deadline_of(self.communicator.deadline_s))

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        with self._same_graph():
            return self.ddp(*inputs, **named)

    @contextlib.contextmanager
    def _same_graph(self) -> Iterator[None]:
        """Around forward and backward. Raises UnsupportedModel where torch finds other parameters used than before."""
        try:
            yield
        except RuntimeError as error:
            if not any(text in str(error) for text in OTHER_GRAPH):
                raise
            if self.accumulate == 1:
                raise UnsupportedModel(
                    "DistributedDataParallel takes the graph of the first step for that of every step, and this step's "
                    "parameters with a gradient are others: take another --strategy"
                ) from None
            raise UnsupportedModel(
                "DistributedDataParallel accumulates only where every step uses every parameter: leave --accumulate "
                "out, freeze what is not used, or take another --strategy"
            ) from None

    def step(self) -> None:
        self._steps += 1
        if self._steps % SAMPLED_EVERY == 0:
            self.exchange_samples = self._steps // SAMPLED_EVERY
            self.exchange_clock.add(SAMPLED_EVERY * exposed_exchange_s(self.ddp))
        super().step()

    def close(self) -> None:
        self.communicator.barrier()
        dist.destroy_process_group()


def at_its_best(model: nn.Module, static_graph: bool = True, **options: Any) -> DistributedDataParallel:
    """With the settings that make it fastest: gradients lie in its buckets, the graph is the same in every step, and
    BatchNorm's statistics are not broadcast before each forward (under a name that torch changed in 2.13)."""
    new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    options["forward_sync_buffers" if new_name else "broadcast_buffers"] = False
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static_graph, **options)


def exposed_exchange_s(ddp: DistributedDataParallel) -> float:
    """Seconds of exchange, waiting included, that did not overlap with computing in the step it timed last."""
    timed = ddp._get_ddp_logging_data()
    return float(timed["backward_comm_time"] - timed["backward_compute_comm_overlap_time"]) / 1e9


def _meet(communicator: Communicator, deadline: timedelta) -> Store:
    """Where the processes have met already, or else, on one machine, rank 0 opens a free port of the loopback and tells
    the others."""
    if communicator.store is not None and communicator.nodes:
        turn = communicator.broadcast_object(secrets.token_hex(8), name="the store of torch's group")
        return PrefixStore(f"torch's group {turn}", communicator.store)
    port = torch.zeros((), dtype=torch.int64, device="cpu")
    store = None
    if communicator.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=deadline)
        port.fill_(store.port)
    port = communicator.broadcast(port)
    return store or TCPStore("127.0.0.1", int(port), is_master=False, timeout=deadline)


class DataParallelStrategy(Builtin):
    """torch.nn.DataParallel: one process feeds all GPUs. Without GPUs it runs the plain module, as torch does."""

    options = ("n_gpus",)

    def __init__(self, *arguments: Any, n_gpus: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        on_gpu = self.communicator.device.type == "cuda"
        self.forward = nn.DataParallel(self.model, list(range(n_gpus)) if on_gpu else None)
        self.exchange_samples = 0 if on_gpu else None  # torch does not time it

    @staticmethod
    def process_count(n: int) -> int:
        return 1
