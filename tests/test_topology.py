"""Where ranks stand, what their bytes cross, and what cannot be."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torch_parallel.topology import Topology

GBIT = 125_000_000.0


def test_alone_every_rank_is_a_node_with_a_link_of_its_own() -> None:
    topology = Topology.of(3, link="1gbit, 2:100mbit", latency="2s")
    assert topology == Topology((0, 1, 2), (0, 1, 2), (GBIT, GBIT, GBIT / 10), 2.0)
    assert (topology.world_size, topology.node_count) == (3, 3)
    assert Topology.of(2, latency="1ms").bytes_per_s == (math.inf, math.inf)
    assert Topology.of(2, link="1:1gbit").bytes_per_s == (math.inf, GBIT)


def test_workers_fill_the_nodes_and_share_their_nics() -> None:
    """2 nodes of 4 with 2 NICs each: ranks 0 and 1 share the first NIC, 2 and 3 the second, and so on."""
    topology = Topology.of(8, link="1gbit,1:2gbit", nodes=2, nics=2)
    assert topology.node_of == (0, 0, 0, 0, 1, 1, 1, 1)
    assert topology.nic_of == (0, 0, 1, 1, 2, 2, 3, 3)
    assert topology.bytes_per_s == (GBIT, GBIT, 2 * GBIT, 2 * GBIT)
    assert Topology.of(6, link="1gbit", nodes=2).nic_of == (0, 0, 0, 1, 1, 1)
    assert Topology.of(6, link="1gbit", nodes=2, nics=3).nic_of == (0, 1, 2, 3, 4, 5)


def test_a_server_is_a_node_of_its_own() -> None:
    topology = Topology.of(5, link="1gbit,0:10gbit", nodes=2, nics=2, server_count=1)
    assert topology.node_of == (0, 1, 1, 2, 2)
    assert topology.nic_of == (0, 1, 2, 3, 4)
    assert topology.bytes_per_s == (10 * GBIT, GBIT, GBIT, GBIT, GBIT)
    assert topology.node_count == 3
    assert Topology.of(3, link="1gbit", server_count=1).node_of == (0, 1, 2)


def test_bytes_of_each_nic_by_hand() -> None:
    """Two nodes of two. Within a node nothing crosses a NIC: the 7s and 9s do not count."""
    topology = Topology.of(4, link="1gbit", nodes=2)
    received = [[0, 7, 10, 0], [9, 0, 0, 20], [100, 0, 0, 7], [1, 2, 9, 0]]
    assert topology.carried_bytes(received) == [(103, 30), (30, 103)]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"nodes": 3}, "4 workers do not fill 3 nodes equally: take a multiple of 3 workers"),
        ({"nodes": 0}, "do not fill 0 nodes"),
        ({"nodes": 2, "nics": 3}, "3 NICs a node: .* between 1 and 2"),
        ({"nodes": 2, "nics": 0}, "0 NICs a node"),
        ({"link": "1gbit,2gbit"}, "two bandwidths for all nodes"),
        ({"link": "1:1gbit,1:2gbit"}, "two bandwidths for node 1"),
        ({"link": "4:1gbit"}, "'4' is no node: they are numbered 0 to 3"),
        ({"link": "2:1gbit", "nodes": 2}, "'2' is no node: they are numbered 0 to 1"),
        ({"link": "x:1gbit"}, "'x' is no node"),
        ({"link": "-1:1gbit"}, "'-1' is no node"),
        ({"link": "fast"}, "'fast' is no bandwidth"),
        ({"latency": "5"}, "'5' is no time"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        Topology.of(4, **options)
    assert "\n" not in str(raised.value)
