"""Every collective algorithm, by name. A new one is a function that yields rounds, and one line in `registry.py`; or,
from a script or notebook, one call: `register(MINE)`."""

from __future__ import annotations

from torch_parallel.collectives.direct import ALL_TO_ALL, DIRECT_ALL_GATHER, DIRECT_REDUCE_SCATTER
from torch_parallel.collectives.registry import ALL_REDUCE, COLLECTIVES, HIERARCHICAL, RegistryError, register
from torch_parallel.collectives.ring import RING_ALL_GATHER, RING_ALL_REDUCE, RING_REDUCE_SCATTER
from torch_parallel.collectives.rooted import broadcast_from, gather_to, reduce_to, scatter_from
from torch_parallel.collectives.schedule import Collective, Local, Operation, Receive, Round, Send

__all__ = [
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "COLLECTIVES",
    "DIRECT_ALL_GATHER",
    "DIRECT_REDUCE_SCATTER",
    "HIERARCHICAL",
    "RING_ALL_GATHER",
    "RING_ALL_REDUCE",
    "RING_REDUCE_SCATTER",
    "Collective",
    "Local",
    "Operation",
    "Receive",
    "RegistryError",
    "Round",
    "Send",
    "broadcast_from",
    "gather_to",
    "reduce_to",
    "register",
    "scatter_from",
]


def main(arguments: list[str]) -> None:
    """The command `python -m torch_parallel collectives`."""
    from torch_parallel.collectives.show import main  # it reads the registry above

    main(arguments)
