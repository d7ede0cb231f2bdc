"""Every worker holds everything: gradients are summed by an all-reduce, and all make the same update.

The sum has the same bits on every rank, so the parameters stay equal to the bit without ever being sent. There is one
strategy for each algorithm of the registry, and one that takes the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from torch import Tensor

from torch_parallel.collectives import ALL_REDUCE, COLLECTIVES, HIERARCHICAL
from torch_parallel.collectives.choice import fastest_all_reduce
from torch_parallel.collectives.schedule import Collective
from torch_parallel.gradients.buckets import Bucket
from torch_parallel.gradients.layout import NamedParameters
from torch_parallel.strategies.base import OptimizerFactory
from torch_parallel.strategies.from_scratch import SCHEDULE_OPTIONS, FromScratch
from torch_parallel.strategies.scheduled import Mark, Partition
from torch_parallel.transport.channels import Steps

MARKS = ALL_REDUCE["reduce_broadcast"]
SAYS_IT_ALL = (
    *("two_shot_in_place", "reduce_broadcast", "gather_scatter", "all_gather_average"),
    *("hierarchical_leaders", "hierarchical_multi_nic", "hierarchical_grouped", "hierarchical_sharded"),
)
"""Algorithms whose strategies have their names; the others' end in `_all_reduce`."""


class AllReduce(FromScratch):
    """Synchronous data-parallel training over one all-reduce algorithm, by its name in the registry."""

    options: ClassVar[tuple[str, ...]] = ("overlap", *SCHEDULE_OPTIONS)
    algorithm: str

    def collective(self, memory: Tensor) -> Collective:
        """What sums it: the same on all ranks."""
        own = ALL_REDUCE.get(self.algorithm) or HIERARCHICAL[self.algorithm]
        return self.communicator.placed(own)

    def describe_buckets(self) -> list[dict[str, Any]]:
        described = zip(super().describe_buckets(), self.buckets, strict=True)
        return [{**sizes, "algorithm": self.collective(bucket.shared.local).name} for sizes, bucket in described]

    def reduce(self, bucket: Bucket) -> None:
        with self.exchanging():
            bucket.publish()
            what = f"gradients of bucket {bucket.index}"
            collective = self.collective(bucket.shared.local)
            bucket.result = self.transport.perform(collective, bucket.shared, what)

    def update(self, bucket: Bucket, scale: float | None = 1.0) -> None:
        if scale is not None:
            self._optimize(bucket, scale)

    def _sums_are_common(self, bucket: Bucket) -> bool:
        return self.collective(bucket.shared.local).common_result

    def bind_partition(self, partition: Partition, optimizer_factory: OptimizerFactory) -> None:
        collective = self.collective(partition.shared.local)
        result = partition.channel.bind(collective, partition.shared)
        is_common = collective.common_result and self.transport.world_size > 1
        partition.make_optimizer(optimizer_factory, result, is_common)

    def partition_steps(self, partition: Partition) -> Steps:
        what = f"gradients of {partition.name}"
        yield from partition.channel.steps(self.collective(partition.shared.local), partition.shared, what)
        if self.bucket_by_bucket:
            yield from partition.await_mark()
            self.update_partition(partition)

    def bind_mark(self, mark: Mark) -> None:
        mark.result = mark.channel.bind(MARKS, mark.shared)

    def mark_steps(self, mark: Mark) -> Steps:
        return mark.channel.steps(MARKS, mark.shared, mark.name)


class FastestAllReduce(AllReduce):
    """Synchronous data-parallel training over the all-reduce that `algorithm` names, or, with "auto", for each bucket
    over the one that was measured as the fastest for its size. Raises TransportError where ranks would choose unlike.
    """

    options = ("overlap", "algorithm", *SCHEDULE_OPTIONS)
    common_sums = True  # some are

    def __init__(self, *arguments: Any, algorithm: str = "auto", **options: Any) -> None:
        self._chosen = algorithm
        self._algorithm_by_bytes: dict[int, str] = {}
        super().__init__(*arguments, **options)
        self.algorithms = [self._algorithm_for(bucket.shared.local) for bucket in self.buckets]
        self.transport.agree(f"sum gradients by {', '.join(self.algorithms)}")

    def _algorithm_for(self, memory: Tensor) -> str:
        """Asked for in every step, and looked up once."""
        if memory.nbytes not in self._algorithm_by_bytes:
            self._algorithm_by_bytes[memory.nbytes] = self._look_up(memory)
        return self._algorithm_by_bytes[memory.nbytes]

    def _look_up(self, memory: Tensor) -> str:
        if self._chosen != "auto":
            return self._chosen
        if len(set(self.communicator.nodes)) > 1:
            return "hierarchical_sharded"  # what crosses a card decides, and this sends least over each
        return fastest_all_reduce(memory.device.type, self.transport.world_size, memory.nbytes)

    def collective(self, memory: Tensor) -> Collective:
        return self.communicator.placed(COLLECTIVES[self._algorithm_for(memory)])


class GroupedAllReduce(AllReduce):
    """Synchronous data-parallel training in which each network card of a node carries a group of whole parameters.

    All gradients of one type lie in one bucket, group after group, and the groups are as equal as parameters allow.
    """

    options = ()
    one_bucket = True
    algorithm = "hierarchical_grouped"

    def _in_order(self, parameters: NamedParameters) -> NamedParameters:
        return [each for group in self._groups(parameters) for each in group]

    def _groups(self, parameters: NamedParameters) -> list[NamedParameters]:
        sizes = [parameter.numel() for _, parameter in parameters]
        collective = self.communicator.placed(COLLECTIVES[self.algorithm])
        chosen = balanced(sizes, collective.group_count(self.transport.world_size))
        return [[parameters[index] for index in group] for group in chosen]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for bucket in self.buckets:
            sizes = [sum(each.numel() for _, each in group) for group in self._groups(bucket.parameters)]
            sizes[-1] += bucket.shared.local.numel() - bucket.numel  # with the use marks
            bucket.shared.groups = (0, *accumulate(sizes))

    def describe_buckets(self) -> list[dict[str, Any]]:
        described = super().describe_buckets()
        for entry, bucket in zip(described, self.buckets, strict=True):
            itemsize = bucket.flat.itemsize
            entry["group_bytes"] = [itemsize * (stop - start) for start, stop in pairwise(bucket.shared.groups)]
        return described


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The places of these sizes in `count` groups of nearly equal sums, in each in order; some groups may be empty.

    The largest that is left goes to the group with the least (Graham, "Bounds on multiprocessing timing anomalies",
    1969): no group is more than 4/3 of the best largest.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        least = sums.index(min(sums))
        groups[least].append(place)
        sums[least] += sizes[place]
    return [sorted(group) for group in groups]


def strategy_of(algorithm: str) -> tuple[str, type[AllReduce]]:
    """The strategy over one algorithm, and its name."""
    name = algorithm if algorithm in SAYS_IT_ALL else f"{algorithm}_all_reduce"
    attributes = {"algorithm": algorithm, "common_sums": COLLECTIVES[algorithm].common_result}
    return name, type(name, (AllReduce,), {**attributes, "__doc__": f"Gradients summed by {algorithm}."})


ALL_REDUCE_STRATEGIES: dict[str, type[FromScratch]] = {
    **dict(strategy_of(algorithm) for algorithm in (*ALL_REDUCE, *HIERARCHICAL)),
    GroupedAllReduce.algorithm: GroupedAllReduce,
}
