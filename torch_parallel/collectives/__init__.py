"""Every collective algorithm, by name. A new one is a function that yields rounds, and one line here."""

from __future__ import annotations

from torch_parallel.collectives.direct import DIRECT_REDUCE_SCATTER
from torch_parallel.collectives.ring import RING_ALL_GATHER, RING_ALL_REDUCE, RING_REDUCE_SCATTER
from torch_parallel.collectives.rooted import broadcast_from, reduce_to
from torch_parallel.collectives.schedule import Collective, Receive, Round, Send

ALL_REDUCE: dict[str, Collective] = {"ring": RING_ALL_REDUCE}

COLLECTIVES: dict[str, Collective] = {
    **ALL_REDUCE,
    "ring_reduce_scatter": RING_REDUCE_SCATTER,
    "ring_all_gather": RING_ALL_GATHER,
    "direct_reduce_scatter": DIRECT_REDUCE_SCATTER,
    "reduce": reduce_to(0),
    "push": reduce_to(0, root_contributes=False),
    "broadcast": broadcast_from(0),
}

__all__ = [
    "ALL_REDUCE",
    "COLLECTIVES",
    "DIRECT_REDUCE_SCATTER",
    "RING_ALL_GATHER",
    "RING_ALL_REDUCE",
    "Collective",
    "Receive",
    "Round",
    "Send",
    "broadcast_from",
    "reduce_to",
]


def main(arguments: list[str]) -> None:
    """The command `python -m torch_parallel collectives`."""
    from torch_parallel.collectives.show import main  # it reads the registry above

    main(arguments)
