"""Layouts of an all-reduce over nodes: seconds, and bytes of each network card, beside what they should be.

    python -m torch_parallel lab --nodes 2 --workers_per_node 4 --nics 4 --rate 100mbit -- \\
        -m torch_parallel bench nodes --link 100mbit                       over real sockets
    python -m torch_parallel bench nodes --nodes 2 --workers_per_node 4 --nics 4 --link 100mbit      emulated

In turns, on one buffer that is shared beforehand. In theory the busiest card sets the pace: its bytes, by the schedule,
over its rate. Over real sockets gloo's own all-reduce is a layout too.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from torch_parallel import joined, nics
from torch_parallel.bench.common import recorded, save
from torch_parallel.collectives import HIERARCHICAL
from torch_parallel.collectives.cost import predicted_on_nodes_s
from torch_parallel.collectives.schedule import Nodes
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import launch
from torch_parallel.results import RunFolder
from torch_parallel.topology import Topology
from torch_parallel.units import parse_bytes_per_s, parse_seconds
from torch_parallel.usage import ConfigError, OneLineParser

GLOO = "gloo's all_reduce"


@dataclass(frozen=True)
class Layout:
    """What one way to sum was measured to do."""

    name: str
    seconds: list[float]  # of the slowest rank, by repeat
    message_bytes: int  # of the busiest card in its busier direction, in one repeat; 0 where it is not known
    read_bytes: float  # likewise, as the system has counted, on average; NaN where nothing is real
    wrong: int


def bench_nodes(arguments: list[str]) -> None:
    """Raises ConfigError."""
    options = _parse(arguments)
    meeting = joined.group()
    numel, repeats = round(options.mb * 1e6) // 4, options.repeats
    if meeting is None:
        topology = _topology(options)
        layouts, nodes = launch(
            partial(time_layouts, numel=numel, repeats=repeats, cards=options.nics),
            topology.world_size,
            links=topology,
            threads=1,
        )[0]
        kind, cards = "emulated", options.nics
    else:
        communicator = joined.join()
        layouts, nodes = time_layouts(communicator, numel, repeats)
        kind, cards = "measured", max(1, len(meeting.nics))
        if meeting.rank > 0:
            return
    rows = [_row(each, nodes, cards, options, kind) for each in layouts]
    print(f"{kind}: {_layout_text(nodes)}, {cards} card{'s' * (cards > 1)} a node, {options.mb:g} MB, {repeats} times")
    for row in rows:
        print(_line(row), flush=True)
    if any(row["wrong"] for row in rows):
        sys.exit("wrong sums, so no figure above means anything")
    folder = RunFolder(options.results_dir, f"bench_nodes_{kind}_n{len(nodes)}")
    with recorded(folder, len(nodes), kind=kind):
        save(folder, rows)


def time_layouts(communicator: Communicator, numel: int, repeats: int, cards: int = 1) -> tuple[list[Layout], Nodes]:
    """The worker function: what each layout takes, the same on all ranks. Emulated nodes have so many `cards`."""
    names = communicator.nics or tuple(map(str, range(cards)))
    nodes = communicator.nodes or (0,) * communicator.world_size
    buffer = communicator.share(numel)
    sums: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(_performed, communicator, communicator.placed(each), buffer)
        for name, each in HIERARCHICAL.items()
    }
    if communicator.store is not None and len(set(nodes)) > 1:
        sums[GLOO] = partial(_by_gloo, _gloo(communicator), buffer)
    figures: dict[str, list[list[float]]] = {name: [] for name in sums}
    expected = communicator.world_size * (communicator.world_size + 1) / 2
    for repeat in range(-1, repeats):  # the first one binds, connects and warms up
        order = list(sums)
        for name in order if repeat % 2 else order[::-1]:
            buffer.local.fill_(communicator.rank + 1.0)
            communicator.barrier()
            before, at_cards = list(communicator.transport.received_bytes), _cards(communicator, nodes)
            communicator.barrier()
            start_s = time.perf_counter()
            result = sums[name]()
            took_s = time.perf_counter() - start_s
            communicator.barrier()
            moved = [now - then for now, then in zip(_cards(communicator, nodes), at_cards, strict=True)]
            received = [now - then for now, then in zip(communicator.transport.received_bytes, before, strict=True)]
            wrong = int((result != expected).sum())
            communicator.transport.settle()
            if repeat >= 0:
                figures[name].append([took_s, wrong, max(moved, default=math.nan), *received])
    table = communicator.all_gather(torch.tensor(list(figures.values()), dtype=torch.float64))
    return [_of(name, table[:, index], nodes, names) for index, name in enumerate(figures)], nodes


def _of(name: str, table: torch.Tensor, nodes: Nodes, names: Sequence[str]) -> Layout:
    """`table` is [ranks, repeats, 3 + ranks]."""
    received = table[:, 0, 3:].long().tolist()
    carried = nics.counted(nodes, names, received) if len(set(nodes)) > 1 else []
    busiest = max((max(both) for node in carried for both in node.values()), default=0)
    read = table[:, :, 2].mean(1)
    read = read[~read.isnan()]
    return Layout(
        name,
        table[:, :, 0].amax(0).tolist(),
        0 if name == GLOO else busiest,
        float(read.max()) if len(read) else math.nan,
        int(table[:, :, 1].sum()),
    )


def _performed(communicator: Communicator, collective: Any, buffer: Any) -> torch.Tensor:
    return communicator.transport.perform(collective, buffer, collective.name)


def _by_gloo(group: Any, buffer: Any) -> torch.Tensor:
    own: torch.Tensor = buffer.local
    group.allreduce([own]).wait()
    return own


def _gloo(communicator: Communicator) -> Any:
    """As torch makes it: by the cards that GLOO_SOCKET_IFNAME names."""
    assert communicator.store is not None
    store = PrefixStore("gloo beside", communicator.store)
    return dist.ProcessGroupGloo(store, communicator.rank, communicator.world_size)


def _cards(communicator: Communicator, nodes: Nodes) -> list[int]:
    """Bytes sent and received by each card of this rank's node, on its lowest rank."""
    if not communicator.nics or nodes.index(nodes[communicator.rank]) != communicator.rank:
        return []
    traffic = nics.read()
    return [nbytes for name in communicator.nics for nbytes in traffic[name]]


def _row(layout: Layout, nodes: Nodes, cards: int, options: Namespace, kind: str) -> dict[str, Any]:
    rate = parse_bytes_per_s(options.link) if options.link else math.inf
    nbytes = round(options.mb * 1e6) // 4 * 4
    topology = Topology.at(nodes, cards, rate, parse_seconds(options.latency))
    collective = HIERARCHICAL.get(layout.name)
    predicted_s = None
    if collective is not None and (math.isfinite(rate) or topology.latency_s):
        predicted_s = predicted_on_nodes_s(collective.placed(nodes), topology, nbytes)
    theory_s = layout.message_bytes / rate if layout.message_bytes and math.isfinite(rate) else None
    return {
        "kind": kind,
        "layout": layout.name,
        "nodes": len(set(nodes)),
        "workers": len(nodes),
        "cards": cards,
        "link": options.link,
        "latency": options.latency,
        "bytes": nbytes,
        "median_s": round(statistics.median(layout.seconds), 6),
        "fastest_s": round(min(layout.seconds), 6),
        "slowest_s": round(max(layout.seconds), 6),
        "theory_s": None if theory_s is None else round(theory_s, 6),
        "predicted_s": None if predicted_s is None else round(predicted_s, 6),
        "busiest_card_bytes": layout.message_bytes or None,
        "busiest_card_part": round(layout.message_bytes / nbytes, 4) if layout.message_bytes else None,
        "busiest_card_read_bytes": None if math.isnan(layout.read_bytes) else round(layout.read_bytes),
        "repeats": len(layout.seconds),
        "wrong": layout.wrong,
    }


def _line(row: dict[str, Any]) -> str:
    spread = f"{1e3 * row['median_s']:9.1f} ms ({1e3 * row['fastest_s']:.1f} to {1e3 * row['slowest_s']:.1f})"
    text = f"{row['layout']:22} {spread:34}"
    if row["theory_s"]:
        text += f"  theory {1e3 * row['theory_s']:8.1f} ms (x {row['median_s'] / row['theory_s']:.3f})"
    if row["busiest_card_bytes"]:
        text += f"  busiest card {row['busiest_card_part']:.3f} S"
    if row["busiest_card_read_bytes"]:
        text += f"  read {row['busiest_card_read_bytes'] / row['bytes']:.3f} S"
    return text


def _layout_text(nodes: Nodes) -> str:
    return f"{len(set(nodes))} nodes with {', '.join(str(nodes.count(node)) for node in dict.fromkeys(nodes))} ranks"


def _topology(options: Namespace) -> Topology:
    try:
        ranks = options.nodes * options.workers_per_node
        return Topology.of(ranks, options.link or "", options.latency, options.nodes, options.nics)
    except ValueError as error:
        raise ConfigError(f"--nodes {options.nodes} --nics {options.nics}: {error}") from None


def _parse(arguments: list[str]) -> Namespace:
    parser = OneLineParser(prog="python -m torch_parallel bench nodes", allow_abbrev=False)
    parser.add_argument("--mb", type=float, default=10.0, help="megabytes (10^6) that are summed (default: 10)")
    parser.add_argument("--repeats", type=int, default=5, help="of each layout (default: 5)")
    parser.add_argument("--link", help="rate of a card, such as 100mbit: emulated, or what the lab was given")
    parser.add_argument("--latency", default="0s", help="emulated, of each message between nodes (default: 0s)")
    parser.add_argument("--nodes", type=int, default=2, help="emulated (default: 2)")
    parser.add_argument("--workers_per_node", type=int, default=2, help="emulated (default: 2)")
    parser.add_argument("--nics", type=int, default=1, help="cards of an emulated node (default: 1)")
    parser.add_argument("--results_dir", default="results/runs", help="folder for a folder with the figures")
    options = parser.parse_args(arguments)
    if not (options.mb * 1e6 >= 4 and options.repeats >= 1):
        raise ConfigError(f"--mb {options.mb:g} --repeats {options.repeats}: at least one number, once, is summed")
    return options
