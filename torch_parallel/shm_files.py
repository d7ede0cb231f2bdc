"""What processes that used a GPU leave in /dev/shm, and whose it is.

The files are named by the number of a process. Containers may share /dev/shm and not their process numbers, so a name
alone does not tell whose file it is: only what a worker was seen to map, or to have open, is taken for its own.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
_OF_DRIVER = "cuda.shm."


class Seen(NamedTuple):
    """A file that a process held, and which one it was: another may have its name later."""

    path: Path
    identity: tuple[int, int]  # device and inode


def files_of(pid: int) -> list[Path]:
    """What a process of this number may leave, killed or ended at once, as workers are: the files by which torch counts
    who maps GPU memory, and one of the driver's, 4 KiB."""
    of_torch, of_driver = f"torch_{pid}_", f".{pid:x}."
    with contextlib.suppress(OSError):
        return [
            SHARED_MEMORY / name
            for name in os.listdir(SHARED_MEMORY)
            if name.startswith(of_torch) or (name.startswith(_OF_DRIVER) and of_driver in name[len(_OF_DRIVER) :])
        ]
    return []


def held_by(pid: int) -> set[Seen]:
    """Those of its files that the process maps or has open now; cheap where there are none. Empty after its end."""
    found = {Seen(path, identity) for path in files_of(pid) if (identity := _identity(path)) is not None}
    if not found:
        return found
    held = _mapped(pid) | _open(pid)
    return {each for each in found if each.identity in held}


def remove(seen: set[Seen]) -> None:
    """Removes those that are still the files that were seen."""
    for path, identity in seen:
        if _identity(path) == identity:
            with contextlib.suppress(OSError):
                path.unlink()


def _identity(path: Path | str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        about = os.stat(path)
        return about.st_dev, about.st_ino
    return None


def _mapped(pid: int) -> set[tuple[int, int]]:
    """A line is "7f00-7f10 rw-s 00000000 00:19 42 /dev/shm/name": device, in hexadecimal, and inode."""
    mapped = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            major_minor, inode = line.split()[3:5]
            if inode != b"0":
                major, minor = (int(number, 16) for number in major_minor.split(b":"))
                mapped.add((os.makedev(major, minor), int(inode)))
    return mapped


def _open(pid: int) -> set[tuple[int, int]]:
    with contextlib.suppress(OSError):
        folder = f"/proc/{pid}/fd"
        return {found for number in os.listdir(folder) if (found := _identity(f"{folder}/{number}")) is not None}
    return set()
