"""Every worker is the server of one shard of the parameters; there is no server process.

  P = 3: the gradients of each rank,              and the parameters, once, in memory that all of them map
  cut into 3 shards

  rank 0   [ a0 | a1 | a2 ]      rank 0: a0 + b0 + c0, and updates   [ w0 |    |    ]
  rank 1   [ b0 | b1 | b2 ]      rank 1: b1 + a1 + c1, and updates   [    | w1 |    ]
  rank 2   [ c0 | c1 | c2 ]      rank 2: c2 + a2 + b2, and updates   [    |    | w2 ]

After backward and one signal each rank adds up its own shard straight from its peers' memory, updates it with its own
optimizer, and signals that it is done; then everybody computes on with the new parameters. A step takes two signals
for each ordered pair of ranks. No gradient and no parameter is copied, the sums are made once and not once a rank, and
so are the updates and the optimizer's state: the work is 1/P of what every rank does under an all-reduce (Rajbhandari
et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, shard the same way; there every
rank has a copy of the parameters).

Where links lie between the ranks nothing is in common, and of GPUs each needs the parameters in its own memory. Then
each rank has all parameters, and a third signal, an all-gather, brings those of the others' shards: reduce_scatter,
update, all_gather. Over links, which parameters were used, which is read in the peers' memory else, is exchanged too.

The first signal says that a rank has finished backward: nobody reads the old parameters any more, which may be written.
The second is the acknowledgement of the first, given only after the update: the peers' gradients have been read, and
this shard's parameters are those of the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_parallel.collectives import ALL_REDUCE, DIRECT_ALL_GATHER, DIRECT_REDUCE_SCATTER, RING_ALL_GATHER
from torch_parallel.collectives.schedule import chunk_bounds
from torch_parallel.gradients.buckets import Bucket
from torch_parallel.gradients.layout import NamedParameters, in_memory_order, laid_out, move_to_common, views_of
from torch_parallel.gradients.pieces import check_elementwise, pieces_of, put_together
from torch_parallel.strategies import optimizer_state
from torch_parallel.strategies.base import OptimizerFactory
from torch_parallel.strategies.from_scratch import FromScratch, norm_of
from torch_parallel.strategies.optimizer_state import States
from torch_parallel.transport.buffer import SharedBuffer

PIECE_BYTES = 4 << 20
"""Of each shard, as much as this of parameters at a time: so their optimizer's state is brought to rank 0."""


class ShardedParamServer(FromScratch):
    """See the module's docstring. All parameters of one type are one bucket, whatever `bucket_bytes` says.

    After set-up the model's parameters are views of memory that peers reach, so only `step` may change them; after a
    step `.grad` means nothing. An optimizer is given pieces: flat, unless the whole parameter lies in the shard. Where
    GPUs do not reach each other's memory the shards are updated on the host, and each rank copies the parameters from
    there.

    Raises ValueError for an optimizer that is not one of ELEMENTWISE.
    """

    one_bucket = True
    common_parameters = True

    def _prepare(self, optimizer_factory: OptimizerFactory, is_scheduled: bool) -> None:
        rank, world_size = self.transport.rank, self.transport.world_size
        self.gradients = [bucket.shared.narrow(bucket.numel) for bucket in self.buckets]
        self._copies: list[SharedBuffer] = []  # of all parameters, on every rank, where memory is not shared
        self.parameters = [self._share_parameters(bucket) for bucket in self.buckets]
        self.shards = [
            Shard(bucket, flat, rank, world_size, optimizer_factory)
            for bucket, flat in zip(self.buckets, self.parameters, strict=True)
        ]
        self.optimizers = [shard.optimizer for shard in self.shards if shard.optimizer is not None]
        self._norms = self.transport.share(world_size, torch.float64)
        self._marks = [self.transport.share(len(bucket.parameters), bucket.flat.dtype) for bucket in self.buckets]

    def optimized(self) -> Iterable[tuple[NamedParameters, Optimizer]]:
        return [(shard.named_parameters, shard.optimizer) for shard in self.shards if shard.optimizer is not None]

    def reduce(self, bucket: Bucket) -> None:
        """Leaves the sum of this rank's shard in its own gradients; the peers wait until `step` acknowledges."""
        with self.exchanging():
            bucket.publish()
            what = f"gradients of bucket {bucket.index}"
            self.transport.perform(DIRECT_REDUCE_SCATTER, self.gradients[bucket.index], what, acknowledge=False)
            self.shards[bucket.index].used = self._used_anywhere(bucket)

    def _used_anywhere(self, bucket: Bucket) -> list[float]:
        """For each parameter how many ranks have used it: their marks came with their gradients, of the same signal."""
        if self.transport.one_memory:
            marks = torch.stack([part[bucket.numel :] for part in bucket.shared.parts]).sum(0)
        else:
            own = self._marks[bucket.index]
            own.local.copy_(bucket.shared.local[bucket.numel :])
            marks = self.transport.perform(ALL_REDUCE["one_shot"], own, f"use marks of bucket {bucket.index}")
        used: list[float] = marks.tolist()
        return used

    def update(self, bucket: Bucket, scale: float | None = 1.0) -> None:
        """Updates this rank's shard; `step` waits for the others'."""
        shard = self.shards[bucket.index]
        if scale is None or shard.optimizer is None:
            return
        with self._updating(bucket.index):
            if self.stays_apart(bucket):
                shard.take_up_parameters()
            shard.collect()
            self._stop_if_overflown(bucket.index, shard.sums, ((piece.name, piece.gradient) for piece in shard.pieces))
            if scale != 1.0:
                shard.sums.mul_(scale)
            shard.optimizer.step()

    def step(self) -> None:
        super().step()
        with self.exchanging():
            self.transport.acknowledge()
            for copy in self._copies:
                self.transport.perform(DIRECT_ALL_GATHER, copy, "parameters")
            self.transport.settle()
            for bucket, flat in zip(self.buckets, self.parameters, strict=True):
                if self.stays_apart(bucket):
                    for (_, parameter), view in zip(bucket.parameters, views_of(flat, bucket.parameters), strict=True):
                        parameter.detach().copy_(view)

    def _norm_of_sums(self) -> float:
        """Every rank knows its shard's: they tell each other, and add up the same numbers in the same order."""
        own = norm_of([shard.sums for shard in self.shards])
        with self.exchanging():
            self._norms.local[self.transport.rank] = own
            self.transport.perform(RING_ALL_GATHER, self._norms, "norms of the shards")
        return norm_of([self._norms.local])

    def _share_parameters(self, bucket: Bucket) -> Tensor:
        """All parameters of the bucket, [numel], in memory that peers reach; those of the same device move there."""
        in_common = self.transport.one_memory and self.transport.common_is_near
        if in_common:
            flat = self.transport.share_common(bucket.numel, bucket.flat.dtype)
        else:
            self._copies.append(self.transport.share(bucket.numel, bucket.flat.dtype))
            flat = self._copies[-1].local
        for (_, parameter), view in zip(bucket.parameters, views_of(flat, bucket.parameters), strict=True):
            if self.transport.rank == 0 or not in_common:
                view.copy_(parameter.detach())
            if not self.stays_apart(bucket):
                move_to_common(parameter, view)
        self.transport.agree("use the parameters there")  # rank 0 has written those that are in common
        return flat

    def optimizer_state(self) -> States:
        """Of whole parameters, on rank 0. It comes there in pieces: no other rank holds more than its own state."""
        parts: dict[str, dict[str, list[tuple[int, Any]]]] = {}  # of a parameter and key: from which rank, and what
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            bounds = chunk_bounds(bucket.numel, self.transport.world_size)
            length = max(1, PIECE_BYTES // bucket.flat.itemsize)
            for start in range(0, max(stop - begin for begin, stop in pairwise(bounds)), length):
                for rank, states in enumerate(self.communicator.gather(shard.states(start, start + length)) or []):
                    for name, state in states.items():
                        for key, value in state.items():
                            parts.setdefault(name, {}).setdefault(key, []).append((rank, value))
        parameters = [each for bucket in self.buckets for each in bucket.parameters]
        return {
            name: {
                key: put_together([value for _, value in sorted(some, key=lambda part: part[0])], parameter)
                for key, some in parts.pop(name).items()
            }
            for name, parameter in parameters
            if name in parts
        }

    def load_optimizer_state(self, state: States) -> None:
        pieces = [piece for shard in self.shards for piece in shard.pieces if piece.name in state]
        optimizer_state.restore(self.optimized(), {piece.name: piece.cut_out(state[piece.name]) for piece in pieces})


class Shard:
    """Chunk `rank` of a bucket, cut at the boundaries of parameters, and what updates it: nothing, if it is empty."""

    def __init__(
        self, bucket: Bucket, flat_parameters: Tensor, rank: int, world_size: int, optimizer_factory: OptimizerFactory
    ) -> None:
        self.used: list[float] = []
        """How many ranks have used each parameter of the bucket in this step."""
        start, stop = chunk_bounds(bucket.numel, world_size)[rank : rank + 2]
        self.sums = bucket.shared.local[start:stop]
        self.pieces = list(pieces_of(bucket, start, stop, flat_parameters))
        self.named_parameters = [(piece.name, piece.parameter) for piece in self.pieces]
        self.optimizer = optimizer_factory(self.named_parameters) if self.pieces else None
        if self.optimizer is not None:
            check_elementwise(self.optimizer, "sharded_param_server updates pieces of parameters", "another strategy")

    def take_up_parameters(self) -> None:
        """Where they lie apart, what the model has: somebody may have written them since the last step."""
        for piece in self.pieces:
            elements = in_memory_order(piece.whole.detach(), piece.whole)[piece.start : piece.stop]
            piece.parameter.detach().copy_(laid_out(elements, piece.parameter))

    def collect(self) -> None:
        """The sums have arrived: they are the pieces' gradients, or None where no worker used the parameter."""
        for piece in self.pieces:
            piece.parameter.grad = piece.gradient if self.used[piece.position] else None

    def states(self, start: int, stop: int) -> States:
        """By parameter, copies on the CPU of what the optimizer has for elements [start, stop) of the shard: flat."""
        states: States = {}
        begin = 0
        for piece in self.pieces:
            first, last = max(start - begin, 0), min(stop - begin, piece.stop - piece.start)
            begin += piece.stop - piece.start
            state = self.optimizer.state.get(piece.parameter) if self.optimizer is not None else None
            if first < last and state:
                states[piece.name] = {key: piece.copied(value, first, last) for key, value in state.items()}
        return states


def _by_rank(parts: list[tuple[int, Any]]) -> list[Any]:
    return [value for _, value in sorted(parts, key=lambda part: part[0])]
