"""Nodes and the links between them: which rank stands where, and what its bytes cross.

Real runs of one machine need none of this. It describes *emulated* links, by which a laptop shows what a network does
to a collective: `Topology.of(8, link="1gbit", latency="50us", nodes=2)` is two machines with four ranks and one
network card (NIC) each. `transport/links.py` makes transfers take as long as they would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_parallel.units import parse_bytes_per_s, parse_seconds


@dataclass(frozen=True)
class Topology:
    """Where each rank stands. NICs are numbered over all nodes; a NIC is full duplex, so each direction has its rate.

    Between ranks of one node nothing crosses a NIC.
    """

    node_of: tuple[int, ...]  # by rank
    nic_of: tuple[int, ...]  # by rank
    bytes_per_s: tuple[float, ...]  # by NIC, in each direction; infinite where only the latency counts
    latency_s: float  # of a message between nodes

    @classmethod
    def of(
        cls,
        world_size: int,
        link: str = "",
        latency: str = "0s",
        nodes: int | None = None,
        nics: int = 1,
        server_count: int = 0,
    ) -> Topology:
        """The topology of `world_size` ranks, of which the first `server_count` are servers.

        Without `nodes` each rank is a node of its own with its own link. With `nodes` the workers fill so many nodes
        with equal shares, in the order of their ranks, and each node's ranks share its `nics` in equal, neighbouring
        groups; a server is a node of its own. Nodes are numbered in the order of their ranks. `link` is a bandwidth for
        all (`1gbit`), for some nodes (`3:100mbit`), or both, comma-separated. Raises ValueError.
        """
        workers = world_size - server_count
        if nodes is None:
            nodes = max(workers, 1)
        if nodes < 1 or workers % nodes:
            raise ValueError(f"{workers} workers do not fill {nodes} nodes equally: take a multiple of {nodes} workers")
        per_node = workers // nodes
        if not 1 <= nics <= max(per_node, 1):
            raise ValueError(f"{nics} NICs a node: with {per_node} workers a node, between 1 and {per_node} are of use")
        servers = list(range(server_count))
        places = [divmod(worker, per_node) for worker in range(workers)]  # node among the workers', place in it
        rates = _rates(link, server_count + nodes)
        return cls(
            node_of=(*servers, *(server_count + node for node, _ in places)),
            nic_of=(*servers, *(server_count + node * nics + place * nics // per_node for node, place in places)),
            bytes_per_s=(*rates[:server_count], *(rate for rate in rates[server_count:] for _ in range(nics))),
            latency_s=parse_seconds(latency),
        )

    @classmethod
    def at(cls, nodes: Sequence[int], nics: int, bytes_per_s: float, latency_s: float = 0.0) -> Topology:
        """Of ranks that stand on these nodes, numbered from 0 on; each has so many NICs, all of one rate."""
        places = [tuple(nodes[:rank]).count(node) for rank, node in enumerate(nodes)]
        counts = [tuple(nodes).count(node) for node in nodes]
        nic_of = [
            node * nics + place * nics // max(count, nics)
            for node, place, count in zip(nodes, places, counts, strict=True)
        ]
        return cls(tuple(nodes), tuple(nic_of), (bytes_per_s,) * (nics * len(set(nodes))), latency_s)

    @property
    def world_size(self) -> int:
        return len(self.node_of)

    @property
    def node_count(self) -> int:
        return len(set(self.node_of))

    def carried_bytes(self, received_bytes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Bytes that left and that entered each NIC, where rank r received `received_bytes[r][s]` from rank s."""
        out, into = [0] * len(self.bytes_per_s), [0] * len(self.bytes_per_s)
        for rank, by_source in enumerate(received_bytes):
            for source, nbytes in enumerate(by_source):
                if self.node_of[source] != self.node_of[rank]:
                    out[self.nic_of[source]] += nbytes
                    into[self.nic_of[rank]] += nbytes
        return list(zip(out, into, strict=True))


def _rates(link: str, node_count: int) -> list[float]:
    """Bytes a second of each node's NICs."""
    everywhere, of_node = math.inf, dict[int, float]()
    for entry in filter(None, link.split(",")):
        head, colon, rate = entry.rpartition(":")
        if not colon:
            if everywhere != math.inf:
                raise ValueError(f"two bandwidths for all nodes: give one, and others as in {node_count - 1}:{rate}")
            everywhere = parse_bytes_per_s(rate)
            continue
        if not head.strip().isdecimal() or int(head) >= node_count:
            raise ValueError(f"{head!r} is no node: they are numbered 0 to {node_count - 1}, as in 1gbit,0:100mbit")
        if int(head) in of_node:
            raise ValueError(f"two bandwidths for node {head.strip()}: give one")
        of_node[int(head)] = parse_bytes_per_s(rate)
    return [of_node.get(node, everywhere) for node in range(node_count)]
