"""Every collective algorithm, by name: those of this package, and those that `register` adds.

    register(MINE)                                       proved first, for several numbers of ranks
    communicator.all_reduce(tensor, algorithm="mine")    then known by its name wherever the others are
    RunConfig(strategy="mine_all_reduce")                an all-reduce is a strategy too

The workers of every later launch know it as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache

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
from torch_parallel.collectives.hierarchical import FLAT, GROUPED, LEADERS, MULTI_NIC, SHARDED
from torch_parallel.collectives.proof import examine
from torch_parallel.collectives.ring import RING_ALL_GATHER, RING_ALL_REDUCE, RING_REDUCE_SCATTER
from torch_parallel.collectives.rooted import (
    GATHER_SCATTER,
    REDUCE_BROADCAST,
    broadcast_from,
    gather_to,
    reduce_to,
    scatter_from,
)
from torch_parallel.collectives.schedule import Collective, Send, chunk_size
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

HIERARCHICAL = _by_name(FLAT, LEADERS, MULTI_NIC, GROUPED, SHARDED)
"""All-reduces that depend on which ranks stand on one node: see `Collective.placed`."""

COLLECTIVES = {
    **ALL_REDUCE,
    **HIERARCHICAL,
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

PROVED_FOR = (1, 2, 3, 4, 5, 8)
"""Numbers of ranks for which one is proved when it is registered; for others it is when it is first performed."""
_RECOUNTED_SIZES = (0, 7, 1000)  # elements

_registered: dict[str, Collective] = {}
_known_from_the_launcher: set[str] = set()
_when_registered: list[Callable[[Collective], None]] = []


class RegistryError(ValueError):
    """A collective cannot be registered, or not be used where it is given. One line."""


def register(collective: Collective, replace: bool = False) -> Collective:
    """Makes an algorithm of your own known by its name, here and in the workers of later launches; returns it.

    What gives every rank the sum of all is an all-reduce: `algorithm` of the communicator and of RunConfig, and a
    strategy, NAME_all_reduce. With `replace` it takes the place of one that was registered under its name before.

    Raises RegistryError where it breaks a promise of `Collective` for one of PROVED_FOR ranks, its formulas included,
    and for a name that is taken or is no word.
    """
    if not isinstance(collective, Collective):
        raise RegistryError(f"a Collective is wanted, not {type(collective).__name__}")
    name = collective.name
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
        raise RegistryError(f"the name {name!r} is no word: letters, digits and _ are wanted")
    if name == "auto":
        raise RegistryError("the name auto is taken: it means the fastest one; choose another")
    if COLLECTIVES.get(name) is collective:
        return collective
    own = name in _registered and (replace or name in _known_from_the_launcher)
    if name in COLLECTIVES and not own:
        why = "give replace=True to replace it" if name in _registered else "choose another"
        raise RegistryError(f"the name {name} is taken: {why}")
    for world_size in PROVED_FOR:
        _refuse_if_wrong(collective, world_size)
    _add(collective)
    return collective


def registered() -> tuple[Collective, ...]:
    """What was added to the package's own, for other processes to `adopt`."""
    return tuple(_registered.values())


def adopt(collectives: Iterable[Collective]) -> None:
    """Knows what another process has registered. It was proved there, and may be registered here once more."""
    for collective in collectives:
        _add(collective)
        _known_from_the_launcher.add(collective.name)


def when_registered(tell: Callable[[Collective], None]) -> None:
    """Calls `tell` with each all-reduce that is registered from now on."""
    _when_registered.append(tell)


@cache
def is_all_reduce(collective: Collective, world_size: int) -> bool:
    """Whether every rank is promised the sum of all ranks' values, in its place."""
    everybody = frozenset(range(world_size))
    return all(
        collective.contributors(rank, world_size, chunk) == everybody
        and collective.source_chunk(rank, world_size, chunk) == chunk
        for rank in range(world_size)
        for chunk in range(collective.chunk_count(world_size))
    )


def _add(collective: Collective) -> None:
    name = collective.name
    COLLECTIVES[name] = _registered[name] = collective
    ALL_REDUCE.pop(name, None)
    if all(is_all_reduce(collective, world_size) for world_size in PROVED_FOR):
        ALL_REDUCE[name] = collective
        for tell in _when_registered:
            tell(collective)


def _refuse_if_wrong(collective: Collective, world_size: int) -> None:
    try:
        faults = examine(collective, world_size).faults or tuple(_wrong_formulas(collective, world_size))
        is_all_reduce(collective, world_size)
    except Exception as error:  # of its own formulas
        faults = (f"{type(error).__name__}: {error}",)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise RegistryError(f"{collective.name} is wrong for {world_size} ranks: {faults[0]}{more}")


def _wrong_formulas(collective: Collective, world_size: int) -> Iterable[str]:
    """What its formulas say and its schedule does not do."""
    chunk_count, common = collective.chunk_count(world_size), collective.common_chunks(world_size)
    for rank in range(world_size):
        rounds = [this for this in collective.rounds(rank, world_size) if this]
        sends = [each for this in rounds for each in this if isinstance(each, Send)]
        counted = {"round_count": len(rounds), "message_count": len(sends)}
        said = {name: getattr(collective, name)(rank, world_size) for name in counted}
        moved = [chunk for send in sends for chunk in send.chunks if chunk not in common]
        for numel in _RECOUNTED_SIZES:
            counted[f"sent_elements of {numel}"] = sum(chunk_size(numel, chunk_count, chunk) for chunk in moved)
            said[f"sent_elements of {numel}"] = collective.sent_elements(rank, world_size, numel)
        for name, count in counted.items():
            if said[name] != count:
                yield f"its {name} is {said[name]} on rank {rank}, and its schedule has {count}"
