"""Torch's own process groups, gloo's and NCCL's: how long they wait, and which of their errors only tell of a peer."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

SHORTEST_S = 1.0
"""Shorter ones would not do for the start of a group, in which processes open and close connections."""

LONGEST_WORK = timedelta(days=7)
"""How long a group may wait for a peer at work of which nobody knows how long it takes."""

OF_GLOO = "third_party/gloo/"
"""Its errors begin with the place in its source, whatever they say."""
COMPLAINTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
    "NCCL",
    "wait timeout after",
)
"""What a RuntimeError of a group says of a peer that has gone, or does not come."""


def deadline_of(deadline_s: float) -> timedelta:
    """How long a group, and the store by which its processes meet, may wait where the run's deadline is this."""
    return timedelta(seconds=max(SHORTEST_S, deadline_s))


def set_deadline(deadline: timedelta) -> None:
    """Of the default group, for what it is given from now on; without effect where this torch has no such thing."""
    # the name since torch 2.14, and the one before
    set_timeout = getattr(dist, "set_timeout", None) or getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        set_timeout(deadline)


def tells_of_a_peer(error: BaseException) -> bool:
    """Whether this error of a process group, or its cause, may only be what another rank's failure looks like."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error) if type(error) is RuntimeError else ""
    if OF_GLOO in text or any(complaint in text for complaint in COMPLAINTS):
        return True
    return error.__cause__ is not None and tells_of_a_peer(error.__cause__)


def in_plain_words(error: BaseException) -> str:
    """One line for an error of which `tells_of_a_peer` is true."""
    first_line = str(error).split("\n")[0]
    said = first_line.partition("] ")[2] if first_line.startswith("[") else first_line
    return f"{type(error).__name__}: torch's process group has lost a peer, or waited for it in vain: {said}"
