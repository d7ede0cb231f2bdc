"""What every command shares: exit codes, and errors that are one line.

0 done; 2 the user asked for something that cannot be; 1 the run failed; 130 and 143 interrupted by SIGINT or SIGTERM.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn


def run_command(name: str, command: Callable[[], None]) -> NoReturn:
    """Runs `command` and ends the process with the right exit code, its children ended and its files written."""
    from torch_parallel.devices import DeviceError
    from torch_parallel.launcher import WorkerFailure
    from torch_parallel.results import ResultsError
    from torch_parallel.training.config import ConfigError
    from torch_parallel.workloads import DataError

    signal.signal(signal.SIGTERM, _terminated)
    try:
        command()
    except (ConfigError, DataError, DeviceError, ResultsError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except WorkerFailure as failure:
        print(f"{name}: {failure}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
