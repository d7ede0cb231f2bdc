"""The flags that slow a run down on purpose: what they mean together, and what cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch_parallel.collectives.schedule import Nodes
from torch_parallel.strategies import BUILTIN, STRATEGIES
from torch_parallel.topology import Topology
from torch_parallel.training.straggler import Slowdown, parse_stragglers
from torch_parallel.units import parse_seconds

if TYPE_CHECKING:
    from torch_parallel.training.config import RunConfig

COMPUTE = ("straggler", "jitter", "compute_ms")
LINKS = ("link", "latency", "nodes", "workers_per_node", "nics")
SETUP_LINK, SETUP_LATENCY = "10gbit", "50us"
"""Between the nodes of a set-up, where nothing else is said: two machines of one room."""
MOST_PROCESSES = 10_000


def flags(config: RunConfig, names: tuple[str, ...] = COMPUTE + LINKS) -> dict[str, Any]:
    """Those that were given, with their values; empty where all that the run measures is real."""
    given = {name: getattr(config, name) for name in names}
    return {name: value for name, value in given.items() if value != type(config).__dataclass_fields__[name].default}


def check(config: RunConfig) -> None:
    """Raises ValueError, or the configuration's own error, with one line: the flag, its value, and what would do."""
    builtin = config.strategy in BUILTIN
    of_nodes = "it says something of emulated nodes: give --nodes too"
    for name, good, why in (
        (
            "straggler",
            config.strategy != "ddp" or "x" not in (config.straggler or ""),
            "ddp waits inside of backward, which would be multiplied too: give a time, as in 3:50ms",
        ),
        (
            "straggler",
            not config.overlap or "x" not in (config.straggler or ""),
            "with --overlap backward waits for others, which would be multiplied too: give a time, as in 3:50ms",
        ),
        ("overlap", not config.overlap or config.steps_csv is None, "it hides what --steps_csv tells apart: take one"),
        ("compute_ms", 0 <= config.compute_ms < math.inf, "it must be finite and not < 0"),
        (
            "compute_ms",
            not config.overlap or config.compute_ms == 0,
            "with --overlap backward exchanges meanwhile, which would be free: take one of the two",
        ),
        ("steps_csv", config.steps_csv is None or not builtin, f"what {config.strategy} waits for cannot be seen"),
        ("nodes", config.nodes is None or config.nodes >= 1, "at least 1 node is needed"),
        ("workers_per_node", (config.workers_per_node or 1) >= 1, "at least 1 worker is needed"),
        ("workers_per_node", config.workers_per_node is None or config.nodes is not None, of_nodes),
        ("nics", config.nics == 1 or bool(config.nic_names) or config.nodes is not None, of_nodes),
    ):
        config.require(name, good, why)
    _check_links(config, ("link", "latency"))
    _check_count(config)
    topology(config)
    _stragglers(config)
    _jitter_s(config)


def _check_links(config: RunConfig, names: tuple[str, ...]) -> None:
    """That the strategy exchanges in a way that emulated links can slow down, where one of these flags is given."""
    common = STRATEGIES[config.strategy].common_sums and config.nodes != 1  # within a node nothing crosses a link
    one_memory = f"{config.strategy} needs memory that all workers have in common, which links have not: take another"
    unlike = f"{config.strategy} exchanges by torch's own means, which know no emulated links: take another --strategy"
    for name in names:
        is_given = getattr(config, name) is not None
        config.require(name, not is_given or config.strategy not in BUILTIN, unlike)
        config.require(name, not is_given or not common, f"{one_memory} --strategy")


def set_up(text: str, server_count: int) -> dict[str, Any]:
    """The flags that a set-up such as 2_4 is short for: nodes, and workers of each. Raises ValueError."""
    parts = text.split("_")
    if len(parts) != 2 or not all(part.isdecimal() and part.isascii() and int(part) >= 1 for part in parts):
        raise ValueError("it must be nodes and workers of each, two whole numbers from 1 on, such as 2_4")
    nodes, per_node = (int(part) for part in parts)
    if nodes * per_node > MOST_PROCESSES:
        raise ValueError(f"these are {nodes * per_node} processes; at most {MOST_PROCESSES} are started")
    return {"n_gpus": nodes * per_node + server_count, "nodes": nodes, "workers_per_node": per_node}


def _check_count(config: RunConfig) -> None:
    if config.workers_per_node is not None and config.n_gpus not in (None, on_all_nodes := _on_all_nodes(config)):
        raise ValueError(
            f"--n_gpus {config.n_gpus}: --nodes {config.nodes} --workers_per_node {config.workers_per_node} are "
            f"{on_all_nodes} processes, servers included: leave one of the three out"
        )


def _on_all_nodes(config: RunConfig) -> int:
    return (config.nodes or 0) * (config.workers_per_node or 0) + STRATEGIES[config.strategy].server_count


def processes(config: RunConfig) -> int | None:
    """How many are asked for, by `n_gpus` or by the emulated nodes; None where nothing is said."""
    return _on_all_nodes(config) if config.n_gpus is None and config.workers_per_node is not None else config.n_gpus


def topology(config: RunConfig) -> Topology | None:
    """The emulated links; None where there are none, or the number of processes is not known yet. Raises ValueError."""
    n, given = processes(config), flags(config, LINKS)
    if n is None or not given:
        return None
    servers = STRATEGIES[config.strategy].server_count
    links: Topology = _explained(
        given,
        lambda: Topology.of(n, config.link or "", config.latency or "0s", config.nodes, config.nic_count, servers),
    )
    return links


def on_nodes(config: RunConfig, nodes: Nodes) -> RunConfig:
    """The run on the nodes on which its processes stand, by rank: there nothing of nodes and links is emulated.

    What the flags say of nodes must be so. Raises the configuration's own error.
    """
    count = len(set(nodes))
    if count == 1:
        _check_links(config, ("nodes",))  # not before: they may be real ones
        names_are_of_use = not config.nic_names
        config.require("nics", names_are_of_use, "names of cards are for several nodes: give a number, or leave it out")
        return config
    servers = STRATEGIES[config.strategy].server_count
    each = [nodes[servers:].count(node) for node in dict.fromkeys(nodes)]
    layout = f"{count} nodes with {', '.join(map(str, each))} workers were started"
    asked = config.workers_per_node
    config.require("nodes", config.nodes in (None, count), f"{layout}: start as many, or leave it out")
    config.require("workers_per_node", asked is None or set(each) == {asked}, f"{layout}: start as many on each node")
    if config.setup is None:
        for name in ("link", "latency"):
            why = f"it is emulated on one machine, and {count} nodes were started: leave it out"
            config.require(name, getattr(config, name) is None, why)
    nics = config.nics if config.nic_names else 1
    return replace(config, setup=None, link=None, latency=None, nodes=None, workers_per_node=None, nics=nics)


def slowdown(config: RunConfig, rank: int) -> Slowdown | None:
    """What makes the compute of this rank last longer; None where nothing does, as on a server."""
    if not flags(config, COMPUTE) or rank < STRATEGIES[config.strategy].server_count:
        return None
    return replace(
        _stragglers(config).get(rank, Slowdown()),
        at_least_s=config.compute_ms / 1e3,
        jitter_s=_jitter_s(config),
        seed=f"{config.seed} {rank}",
    )


def _stragglers(config: RunConfig) -> dict[int, Slowdown]:
    if config.straggler is None:
        return {}
    text = config.straggler
    stragglers: dict[int, Slowdown] = _explained({"straggler": text}, lambda: parse_stragglers(text))
    servers = STRATEGIES[config.strategy].server_count
    for rank in stragglers:
        if rank < servers:
            raise ValueError(
                f"--straggler {config.straggler}: rank {rank} is a server, which computes nothing: take a worker"
            )
        if config.n_gpus is not None and rank >= config.process_count:
            last = config.process_count - 1
            raise ValueError(
                f"--straggler {config.straggler}: there is no rank {rank}: workers are {servers} to {last}"
            )
    return stragglers


def _jitter_s(config: RunConfig) -> float:
    """Its mean."""
    if config.jitter is None:
        return 0.0
    text = config.jitter
    return float(_explained({"jitter": text}, lambda: parse_seconds(text)))


def _explained(given: dict[str, Any], parse: Callable[[], Any]) -> Any:
    """What `parse` makes of these flags; its ValueError names them."""
    try:
        return parse()
    except ValueError as error:
        said = " ".join(f"--{name} {value}" for name, value in given.items())
        raise ValueError(f"{said}: {error}") from None
