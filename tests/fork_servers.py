"""What tests ask of the fork server."""

from __future__ import annotations

from pathlib import Path

from torch_parallel import fork_server


def fork_server_pid() -> int:
    pid = fork_server.pid()
    assert pid is not None
    return pid


def workers_alive() -> list[int]:
    """The processes that the fork server has started and that have not ended."""
    pid = fork_server_pid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
