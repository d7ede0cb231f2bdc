"""Every worker holds everything: gradients are summed by an all-reduce, and all make the same update.

The sum has the same bits on every rank, so the parameters stay equal to the bit without ever being sent. There is one
strategy for each algorithm of the registry.
"""

from __future__ import annotations

from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.gradients.buckets import Bucket
from torch_parallel.strategies.from_scratch import FromScratch

SAYS_IT_ALL = ("two_shot_in_place", "reduce_broadcast", "gather_scatter", "all_gather_average")
"""Algorithms whose strategies have their names; the others' end in `_all_reduce`."""


class AllReduce(FromScratch):
    """Synchronous data-parallel training over one all-reduce algorithm, by its name in the registry."""

    options = ("overlap",)
    algorithm: str

    def reduce(self, bucket: Bucket) -> None:
        with self._exchanging():
            bucket.publish()
            collective = ALL_REDUCE[self.algorithm]
            bucket.result = self.transport.perform(collective, bucket.shared, f"gradients of bucket {bucket.index}")

    def update(self, bucket: Bucket, scale: float | None = 1.0) -> None:
        if scale is not None:
            self._optimize(bucket, scale)


def strategy_of(algorithm: str) -> tuple[str, type[AllReduce]]:
    """The strategy over one algorithm, and its name."""
    name = algorithm if algorithm in SAYS_IT_ALL else f"{algorithm}_all_reduce"
    attributes = {"algorithm": algorithm, "common_sums": ALL_REDUCE[algorithm].common_result}
    return name, type(name, (AllReduce,), {**attributes, "__doc__": f"Gradients summed by {algorithm}."})


ALL_REDUCE_STRATEGIES: dict[str, type[FromScratch]] = dict(map(strategy_of, ALL_REDUCE))
