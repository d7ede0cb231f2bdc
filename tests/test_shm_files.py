"""In /dev/shm a run removes what its workers made, and nothing else, whatever its name."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_parallel import WorkerFailure, launch, shm_files, worker_process
from torch_parallel.communicator import Communicator
from torch_parallel.shm_files import SHARED_MEMORY, held_by, remove

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")


@pytest.fixture
def mark() -> Iterator[str]:
    """Part of the names of this test's files, which are removed after it."""
    mark = uuid.uuid4().hex
    yield mark
    for file in SHARED_MEMORY.glob(f"*{mark}*"):
        file.unlink()


def made(name: str) -> Path:
    path = SHARED_MEMORY / name
    path.write_bytes(bytes(4096))
    return path


def mapped(path: Path) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 4096)


def test_what_a_process_maps_or_has_open_is_its_own(mark: str) -> None:
    pid = os.getpid()
    assert held_by(pid) == set()
    maps, opens, others, named_otherwise = (
        made(name)
        for name in (f"torch_{pid}_{mark}", f"cuda.shm.0.{pid:x}.{mark}", f"torch_{pid}_{mark}_2", f"x_{mark}")
    )
    with mapped(maps), mapped(named_otherwise), open(opens, "rb"):
        seen = held_by(pid)
    assert {each.path for each in seen} == {maps, opens}
    remove(seen)
    assert [path.exists() for path in (maps, opens, others, named_otherwise)] == [False, False, True, True]


def test_a_file_that_came_later_under_the_same_name_stays(mark: str) -> None:
    path = made(f"torch_{os.getpid()}_{mark}")
    with mapped(path):
        seen = held_by(os.getpid())
    kept = path.rename(path.with_name(f"kept_{mark}"))
    made(path.name)
    remove(seen)
    assert path.exists() and kept.exists()
    remove(held_by(2**22 + 1))  # there is no such process


def leaves(communicator: Communicator, mark: str, end: Callable[[], Any]) -> int:
    """Two files with this process's number: one that it maps, and one that somebody else has made."""
    pid = os.getpid()
    global held
    held = mapped(made(f"torch_{pid}_{mark}_mine"))
    made(f"torch_{pid}_{mark}_others")
    communicator.barrier()
    if communicator.rank == 1:
        end()
    return pid


def left(mark: str) -> list[str]:
    return sorted(file.name.rsplit("_", 1)[1] for file in SHARED_MEMORY.glob(f"*{mark}*"))


def test_workers_that_return(mark: str) -> None:
    launch(leaves, 2, mark, lambda: None, deadline_s=20)
    assert left(mark) == ["others", "others"]


def raises() -> None:
    raise ValueError("at its end")


def is_killed_after_a_look() -> None:
    import time

    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", [raises, is_killed_after_a_look])
def test_workers_that_raise_or_are_killed(end: Callable[[], None], mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "LOOK_S", 0.1)
    with pytest.raises(WorkerFailure):
        launch(leaves, 2, mark, end, deadline_s=20)
    assert left(mark) == ["others", "others"]


def test_looking_is_cheap_where_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps and descriptors, which may be thousands, are read only where there is a file of the process's number."""
    monkeypatch.setattr(shm_files, "_mapped", lambda pid: pytest.fail("maps were read"))
    monkeypatch.setattr(shm_files, "_open", lambda pid: pytest.fail("descriptors were read"))
    assert held_by(os.getpid()) == set()
