"""The collective operations, whoever performs them, on tables [n, width] of float32 in which row r concerns rank r.

Rank r has the table `base + r`, of whole numbers so small that every sum is exact: a result is right or wrong.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torch_parallel.collectives import ALL_REDUCE, COLLECTIVES, Collective

ALGORITHMS: dict[str, dict[str, Collective]] = {
    "all_reduce": ALL_REDUCE,
    **{
        operation: {name: COLLECTIVES[name] for name in names}
        for operation, names in {
            "reduce": ("reduce", "tree_reduce"),
            "broadcast": ("broadcast", "tree_broadcast"),
            "gather": ("gather",),
            "scatter": ("scatter",),
            "all_gather": ("direct_all_gather", "ring_all_gather"),
            "reduce_scatter": ("direct_reduce_scatter", "ring_reduce_scatter"),
            "all_to_all": ("all_to_all",),
            "barrier": ("barrier",),
        }.items()
    },
}
"""Operation -> our algorithms for it, by name."""

# torch renames them; the old names warn at every call
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bus_factor(operation: str, n: int) -> float:
    """Bus bandwidth / algorithm bandwidth, as nccl-tests define both (its file PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2 * (n - 1) / n
    return 1.0 if operation in ("reduce", "broadcast", "barrier") else (n - 1) / n


def base(n: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """[n, width] whole numbers below 1000."""
    return torch.arange(n * width, dtype=torch.float32, device=device).remainder_(997).view(n, width)


def expected(operation: str, base: Tensor, rank: int) -> tuple[slice, Tensor] | None:
    """Which rows of this rank's result are promised, and what they hold; None where nothing is."""
    n = len(base)
    own, everything = slice(rank, rank + 1), slice(0, n)
    ranks = torch.arange(n, dtype=torch.float32, device=base.device).view(n, 1)
    total = n * (n - 1) / 2
    match operation:
        case "all_reduce":
            return everything, base * n + total
        case "reduce":
            return (everything, base * n + total) if rank == 0 else None
        case "broadcast":
            return everything, base
        case "gather":
            return (everything, base + ranks) if rank == 0 else None
        case "scatter":
            return own, base[own]
        case "all_gather":
            return everything, base + ranks
        case "reduce_scatter":
            return own, base[own] * n + total
        case "all_to_all":
            return everything, base[own] + ranks
    return None


def by_torch(operation: str, mine: Tensor, out: Tensor, rank: int) -> Tensor:
    """Performs it with torch.distributed, in `mine` or from there into `out`; returns where the result lies."""
    match operation:
        case "all_reduce":
            dist.all_reduce(mine)
        case "reduce":
            dist.reduce(mine, 0)
        case "broadcast":
            dist.broadcast(mine, 0)
        case "gather":
            dist.gather(mine[rank], list(out) if rank == 0 else None, 0)
        case "scatter":
            dist.scatter(out[rank], list(mine) if rank == 0 else None, 0)
        case "all_gather":
            ALL_GATHER(out.view(-1), mine[rank])
        case "reduce_scatter":
            REDUCE_SCATTER(out[rank], mine.view(-1))
        case "all_to_all":
            dist.all_to_all_single(out, mine)
        case "barrier":
            dist.barrier()
    return mine if operation in ("all_reduce", "reduce", "broadcast") else out
