"""What torch's own process groups need of the machine: a network, if only the loopback."""

from __future__ import annotations

import os
import socket

from torch_parallel.nics import INTERFACES
from torch_parallel.usage import ConfigError

ANSWER_S = 5.0


def check_network(who: str, instead: str, device: str) -> None:
    """Raises ConfigError where processes of this machine cannot connect to each other; `who` needs that, `instead`
    says what to do where there is to be no network."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=ANSWER_S).close()
    except OSError as error:
        raise ConfigError(
            f"{who}: torch's process group needs a network, and no address of the loopback answers "
            f"({error.strerror or error}): bring it up (ip link set lo up), or {instead}"
        ) from None
    if device != "cuda":
        _check_interfaces(who)


def _check_interfaces(who: str) -> None:
    """That gloo finds those that it is told to take."""
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(INTERFACES, "").split(",")):
        if name not in there:
            raise ConfigError(
                f"{who}: {INTERFACES} names {name}, and this machine's network interfaces are {', '.join(there)}: "
                f"unset {INTERFACES}, or name one of them"
            )
