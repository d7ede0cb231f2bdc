"""Every worker holds everything: gradients are summed by an all-reduce, and all make the same update.

The sum has the same bits on every rank, so the parameters stay equal to the bit without ever being sent. There is one
strategy for each algorithm of the registry, and one that takes the fastest.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.collectives.choice import fastest_all_reduce
from torch_parallel.collectives.schedule import Collective
from torch_parallel.gradients.buckets import Bucket
from torch_parallel.strategies.from_scratch import FromScratch

SAYS_IT_ALL = ("two_shot_in_place", "reduce_broadcast", "gather_scatter", "all_gather_average")
"""Algorithms whose strategies have their names; the others' end in `_all_reduce`."""


class AllReduce(FromScratch):
    """Synchronous data-parallel training over one all-reduce algorithm, by its name in the registry."""

    options: ClassVar[tuple[str, ...]] = ("overlap",)
    algorithm: str

    def collective(self, bucket: Bucket) -> Collective:
        """What sums it: the same on all ranks."""
        return ALL_REDUCE[self.algorithm]

    def describe_buckets(self) -> list[dict[str, Any]]:
        described = zip(super().describe_buckets(), self.buckets, strict=True)
        return [{**sizes, "algorithm": self.collective(bucket).name} for sizes, bucket in described]

    def reduce(self, bucket: Bucket) -> None:
        with self._exchanging():
            bucket.publish()
            what = f"gradients of bucket {bucket.index}"
            bucket.result = self.transport.perform(self.collective(bucket), bucket.shared, what)

    def update(self, bucket: Bucket, scale: float | None = 1.0) -> None:
        if scale is not None:
            self._optimize(bucket, scale)

    def _sums_are_common(self, bucket: Bucket) -> bool:
        return self.collective(bucket).common_result


class FastestAllReduce(AllReduce):
    """Synchronous data-parallel training over the all-reduce that `algorithm` names, or, with "auto", for each bucket
    over the one that was measured as the fastest for its size. Raises TransportError where ranks would choose unlike.
    """

    options = ("overlap", "algorithm")
    common_sums = True  # some are

    def __init__(self, *arguments: Any, algorithm: str = "auto", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.algorithms = [self._fastest(bucket) if algorithm == "auto" else algorithm for bucket in self.buckets]
        self.transport.agree(f"sum gradients by {', '.join(self.algorithms)}")

    def _fastest(self, bucket: Bucket) -> str:
        memory = bucket.shared.local
        return fastest_all_reduce(memory.device.type, self.transport.world_size, memory.nbytes)

    def collective(self, bucket: Bucket) -> Collective:
        return ALL_REDUCE[self.algorithms[bucket.index]]


def strategy_of(algorithm: str) -> tuple[str, type[AllReduce]]:
    """The strategy over one algorithm, and its name."""
    name = algorithm if algorithm in SAYS_IT_ALL else f"{algorithm}_all_reduce"
    attributes = {"algorithm": algorithm, "common_sums": ALL_REDUCE[algorithm].common_result}
    return name, type(name, (AllReduce,), {**attributes, "__doc__": f"Gradients summed by {algorithm}."})


ALL_REDUCE_STRATEGIES: dict[str, type[FromScratch]] = dict(map(strategy_of, ALL_REDUCE))
