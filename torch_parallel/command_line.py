"""What every command shares: exit codes, and errors that are one line.

0 done; 2 the user asked for something that cannot be; 1 the run failed; 130, 143 and 129 interrupted by SIGINT, SIGTERM
or SIGHUP.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from torch_parallel import fork_server
from torch_parallel.files import OutputError, prepare_streams
from torch_parallel.place import RendezvousError, place_of
from torch_parallel.usage import UserError


def start_command(starts_workers: bool = True) -> None:
    """What every command does before it imports torch: starts the fork server, which imports torch at the same time, if
    the command starts workers.

    Until `run_command` there is nothing to clean up, so Ctrl-C ends the process at once, and without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted_early)
    prepare_streams()
    with contextlib.suppress(RendezvousError):  # which is told later
        if starts_workers and place_of() is None:  # else the processes are there
            fork_server.start()


def run_command(name: str, command: Callable[[], None]) -> NoReturn:
    """Runs `command` and ends the process with the right exit code, its children ended and its files written.

    An error of the user's own code, an OSError too, keeps its traceback.
    """
    prepare_streams()
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it, and so do we then
        signal.signal(signal.SIGHUP, _terminated)
    if signal.getsignal(signal.SIGINT) is _interrupted_early:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command()
    except UserError as error:
        _tell(f"{name}: error: {error}", error)
        sys.exit(2)
    except RuntimeError as failure:
        from torch_parallel.launcher import WorkerFailure  # which imports torch

        if not isinstance(failure, WorkerFailure):
            raise
        _tell(f"{name}: {failure}", failure)
        sys.exit(1)
    except MemoryError as error:
        print(f"{name}: out of memory: {error}", file=sys.stderr)
        sys.exit(1)
    except OutputError as error:  # a disk that is full, `| head` that reads no further
        print(f"{name}: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains again when it flushes the output
        sys.exit(1)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C changes nothing any more
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def _tell(line: str, error: Exception) -> None:
    """Unless rank 0 tells it, of processes that others have started."""
    if not getattr(error, "is_told", False):
        print(line, file=sys.stderr)


def _interrupted_early(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
