"""Every collective algorithm, by name. A new one is a function that yields rounds, and one line here."""

from __future__ import annotations

from torch_parallel.collectives.barrier import BARRIER
from torch_parallel.collectives.direct import (
    ALL_GATHER_AVERAGE,
    ALL_TO_ALL,
    DIRECT_ALL_GATHER,
    DIRECT_REDUCE_SCATTER,
    ONE_SHOT_ALL_REDUCE,
    TWO_SHOT_ALL_REDUCE,
    TWO_SHOT_IN_PLACE,
)
from torch_parallel.collectives.halving_doubling import HALVING_DOUBLING_ALL_REDUCE
from torch_parallel.collectives.ring import RING_ALL_GATHER, RING_ALL_REDUCE, RING_REDUCE_SCATTER
from torch_parallel.collectives.rooted import (
    GATHER_SCATTER,
    REDUCE_BROADCAST,
    broadcast_from,
    gather_to,
    reduce_to,
    scatter_from,
)
from torch_parallel.collectives.schedule import Collective, Local, Operation, Receive, Round, Send
from torch_parallel.collectives.tree import TREE_ALL_REDUCE, tree_broadcast_from, tree_reduce_to


def _by_name(*collectives: Collective) -> dict[str, Collective]:
    return {collective.name: collective for collective in collectives}


ALL_REDUCE = _by_name(
    RING_ALL_REDUCE,
    TREE_ALL_REDUCE,
    HALVING_DOUBLING_ALL_REDUCE,
    TWO_SHOT_ALL_REDUCE,
    TWO_SHOT_IN_PLACE,
    ONE_SHOT_ALL_REDUCE,
    REDUCE_BROADCAST,
    GATHER_SCATTER,
    ALL_GATHER_AVERAGE,
)

COLLECTIVES = {
    **ALL_REDUCE,
    **_by_name(
        RING_REDUCE_SCATTER,
        RING_ALL_GATHER,
        DIRECT_REDUCE_SCATTER,
        DIRECT_ALL_GATHER,
        reduce_to(0),
        reduce_to(0, root_contributes=False),
        broadcast_from(0),
        tree_reduce_to(0),
        tree_broadcast_from(0),
        gather_to(0),
        scatter_from(0),
        ALL_TO_ALL,
        BARRIER,
    ),
}

__all__ = [
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "COLLECTIVES",
    "DIRECT_ALL_GATHER",
    "DIRECT_REDUCE_SCATTER",
    "RING_ALL_GATHER",
    "RING_ALL_REDUCE",
    "RING_REDUCE_SCATTER",
    "Collective",
    "Local",
    "Operation",
    "Receive",
    "Round",
    "Send",
    "broadcast_from",
    "gather_to",
    "reduce_to",
    "scatter_from",
]


def main(arguments: list[str]) -> None:
    """The command `python -m torch_parallel collectives`."""
    from torch_parallel.collectives.show import main  # it reads the registry above

    main(arguments)
