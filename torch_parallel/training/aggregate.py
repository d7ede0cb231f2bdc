"""What the gradient of a step is: by what each worker divides the sum of its losses before all are added up."""

from __future__ import annotations

from collections.abc import Callable

# (this worker's targets, all workers' targets, workers that have targets) -> divisor
AGGREGATES: dict[str, Callable[[int, int, int], int]] = {
    "weighted": lambda own, total, workers: total,  # the mean over all targets
    "mean": lambda own, total, workers: own * workers,  # the mean of the workers' means
    "sum": lambda own, total, workers: own,  # the sum of the workers' means
}


def divisor(name: str, own_count: int, global_count: int, worker_count: int) -> int:
    """For a worker with `own_count` of the step's `global_count` targets, which lie on `worker_count` workers.

    A worker without targets has no mean and does not count: were the others' divided by it too, the last step of an
    epoch would be smaller for no reason.
    """
    return max(1, AGGREGATES[name](own_count, global_count, worker_count))
