"""Bytes that crossed each network card: as the system has counted them, and as the messages of ranks add up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch_parallel.collectives.schedule import Nodes

INTERFACES = "GLOO_SOCKET_IFNAME"
"""The variable by which torch is told which cards to take."""

Traffic = dict[str, list[int]]
"""By card, the bytes that left it and that entered it."""


def named_by_environment() -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, os.environ.get(INTERFACES, "").split(","))))


def nic_between(nodes: Nodes, rank: int, peer: int, nics: Sequence[str]) -> str:
    """The network card, of both their nodes, by which two ranks exchange: that of the lower one's place in its node.

    The ranks of a node have its cards in equal, neighbouring groups. Without `nics` there is no choice: an empty text.
    """
    if not nics:
        return ""
    low = min(rank, peer)
    mates = [each for each, node in enumerate(nodes) if node == nodes[low]]
    return nics[mates.index(low) * len(nics) // max(len(mates), len(nics))]


def read() -> Traffic:
    """What the system has counted, headers included, of each card that this process sees (Linux; else nothing)."""
    try:
        lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    except OSError:
        return {}
    rows = [line.replace(":", " ").split() for line in lines]
    return {name: [int(numbers[8]), int(numbers[0])] for name, *numbers in rows}


def counted(nodes: Nodes, nics: Sequence[str], received_bytes: Sequence[Sequence[int]]) -> list[Traffic]:
    """By node, what its cards have carried where rank r received `received_bytes[r][s]` bytes from rank s."""
    of_node: list[Traffic] = [{nic: [0, 0] for nic in nics} for _ in set(nodes)]
    for rank, by_source in enumerate(received_bytes):
        for source, nbytes in enumerate(by_source):
            if nodes[source] != nodes[rank] and nics:
                nic = nic_between(nodes, rank, source, nics)
                of_node[nodes[source]][nic][0] += nbytes
                of_node[nodes[rank]][nic][1] += nbytes
    return of_node
