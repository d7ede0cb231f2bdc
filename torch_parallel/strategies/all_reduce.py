"""Every worker holds everything: gradients are summed by an all-reduce, and all make the same update.

The sum has the same bits on every rank, so the parameters stay equal to the bit without ever being sent.
"""

from __future__ import annotations

from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.gradients.buckets import Bucket
from torch_parallel.strategies.base import FromScratch


class AllReduce(FromScratch):
    """Synchronous data-parallel training over one all-reduce algorithm, by its name in the registry."""

    algorithm: str

    def reduce(self, bucket: Bucket) -> None:
        with self._exchanging():
            bucket.publish()
            self.transport.perform(ALL_REDUCE[self.algorithm], bucket.shared, f"gradients of bucket {bucket.index}")

    def update(self, bucket: Bucket, scale: float | None = 1.0) -> None:
        if scale is not None:
            self._optimize(bucket, scale)


class RingAllReduce(AllReduce):
    """The ring of `collectives/ring.py`: 2(P-1) messages a bucket and rank, 2(P-1)/P of its bytes."""

    algorithm = "ring"
