"""Which rank this process is, where somebody else has started it: torchrun, Slurm's srun, Open MPI's mpirun, or a user.

Each of them says so by environment variables. What is said by halves, or twice and unlike, is refused in one line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch_parallel.usage import UserError

STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    # SLURM_NTASKS is also set in a batch script, which is one process: these are set for what srun starts
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
"""By who sets them: the variables of the rank, of the number of ranks, and of the rank within the node."""
NODES = {"torchrun": "GROUP_RANK", "srun": "SLURM_NODEID"}
"""And of the node; torchrun's is that of its agent, and there may be several on one machine."""
MEETING = ("MASTER_ADDR", "MASTER_PORT")
OF_A_NODE = 2
"""From here on they are of the node, and the rank is known without them."""


class RendezvousError(UserError, ValueError):
    """Processes that were started by others cannot meet, or are told what does not fit. One line, with the remedy."""

    headline_suffices = True  # it is no line of code that is wrong


@dataclass(frozen=True)
class Place:
    """Where this process stands, and where the store is at which all meet."""

    rank: int
    world_size: int
    host: str
    port: int
    starter: str
    node: str = ""
    """What the starter calls the node, where it says so."""


def place_of(environ: Mapping[str, str] = os.environ) -> Place | None:
    """What the environment says; None where nobody else has started this process. Raises RendezvousError."""
    for starter, names in STARTERS.items():
        given = [name for name in names[:OF_A_NODE] if name in environ]
        if starter == "srun" and len(given) < OF_A_NODE:
            continue  # a batch script
        if starter != "torchrun" and environ.get(names[1], "").strip() == "1":
            continue  # one process alone, such as the shell of `srun --pty`, which may start others
        if given or (starter == "torchrun" and "LOCAL_RANK" in environ):
            return _place(starter, names, environ)
    return None


def _place(starter: str, names: tuple[str, ...], environ: Mapping[str, str]) -> Place:
    wanted = (*names[:OF_A_NODE], *MEETING)
    missing = [name for name in wanted if not environ.get(name, "").strip()]
    if missing:
        said = next(name for name in (*names, *MEETING) if name in environ)
        raise RendezvousError(
            f"{said} is set, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not: set all of "
            f"{', '.join(wanted)}, as torchrun does, or unset {said} to start the processes from here"
        )
    rank, world_size = (_number(name, environ) for name in names[:OF_A_NODE])
    if not 0 <= rank < world_size:
        raise RendezvousError(
            f"{names[0]} is {rank} and {names[1]} is {world_size}: ranks are 0 to {names[1]} - 1; start all processes "
            "by one command, such as torchrun"
        )
    local_rank = _number(names[2], environ) if names[2] in environ else rank
    if local_rank > rank:
        raise RendezvousError(
            f"{names[2]} is {local_rank} and {names[0]} is {rank}: start all processes by one command"
        )
    port = _number("MASTER_PORT", environ)
    if not 0 < port < 1 << 16:
        raise RendezvousError(f"MASTER_PORT is {port}: a port from 1 to 65535 is needed")
    node = environ.get(NODES.get(starter, ""), "").strip()
    return Place(rank, world_size, environ["MASTER_ADDR"].strip(), port, starter, node)


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ[name].strip()
    if not text.isdecimal():
        raise RendezvousError(f"{name} is {text!r}: a whole number is needed")
    return int(text)
