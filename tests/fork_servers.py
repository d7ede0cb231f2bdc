"""What tests ask of the fork server."""

from __future__ import annotations

import multiprocessing.forkserver
from pathlib import Path
from typing import Any


def fork_server_pid() -> int:
    server: Any = multiprocessing.forkserver._forkserver
    return int(server._forkserver_pid)


def workers_alive() -> list[int]:
    """The processes that the fork server has started and that have not ended."""
    pid = fork_server_pid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
