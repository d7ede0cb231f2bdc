"""Checkpoints: everything a run needs to go on as if it had never stopped, in a file that plain `torch.load` reads.

A checkpoint holds the bare model's state_dict, the optimizer's state by parameter name, the step, the place in the
epoch's permutation, the history, and for each rank its random states and its BatchNorm statistics. Nothing in it
depends on the number of processes, the strategy or the bucket size, except each rank's own part, which only a run with
as many ranks takes up: such a run continues to the bit.

A file is complete or it is not there: it is written to a temporary name, brought to disk, and renamed. Only then is it
announced, and only then are older ones removed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torch_parallel.files import path_of
from torch_parallel.usage import UserError

FORMAT = 1
KEEP = 3
"""So many of the newest checkpoints stay."""
_NAME = re.compile(r"step_(\d{9})\.pt")


class CheckpointError(UserError):
    """A checkpoint that is not there, damaged, or of another run. One line, with what to do."""

    headline_suffices = True  # see mailbox.Failure


def path_for(folder: Path, step: int) -> Path:
    return folder / f"step_{step:09d}.pt"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints of a folder, oldest first. What was being written when a run was killed is not one."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def save(content: dict[str, Any], folder: Path, step: int) -> Path:
    """Writes the checkpoint of `step` and removes all but the newest.

    Raises CheckpointError where it cannot be written, and whatever pickling the content raises; then older ones are
    untouched and nothing half-written is left.
    """
    path = path_for(folder, step)
    write_whole(content, path, f"the checkpoint of step {step}", "; earlier checkpoints are untouched")
    for old in complete_checkpoints(folder)[:-KEEP]:
        old.unlink()
    for unfinished in folder.glob("*.tmp"):
        unfinished.unlink()
    return path


def write_whole(content: dict[str, Any], path: Path, what: str, but: str = "") -> None:
    """Writes a file that plain `torch.load` reads, or leaves nothing.

    Raises CheckpointError, which says `what`, where it cannot be written, and whatever pickling the content raises.
    """
    temporary, writing = path.with_suffix(".tmp"), _Writing()
    try:
        with writing.watched():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch()
        with open(temporary, "wb") as file:
            torch.save(content, writing.into(file))
            with writing.watched():
                file.flush()
                os.fsync(file.fileno())
        with writing.watched():
            os.replace(temporary, path)
            _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if writing.fault is None:  # a user's own: content that cannot be pickled
            raise
        reason = writing.fault.strerror or writing.fault
        raise CheckpointError(
            f"{what} cannot be written to {path.parent} ({reason}): make room there, or choose another folder with "
            f"--results_dir{but}"
        ) from None


class _Writing:
    """Remembers what kept a file from being written: torch turns a full disk into a RuntimeError."""

    def __init__(self) -> None:
        self.fault: OSError | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.fault = error
            raise

    def into(self, file: BinaryIO) -> Any:
        """What torch writes to, in place of `file`."""
        return _Watched(file, self)


class _Watched:
    def __init__(self, file: BinaryIO, writing: _Writing) -> None:
        self._file, self._writing = file, writing

    def write(self, data: Any) -> int:
        with self._writing.watched():
            return self._file.write(data)

    def flush(self) -> None:
        with self._writing.watched():
            self._file.flush()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find(path: str) -> Path:
    """The checkpoint that `--resume PATH` means: a file, or the newest in a run's folder.

    Raises CheckpointError where there is none, and where the one meant is damaged: an earlier complete one is named,
    and is never taken silently.
    """
    given = path_of(path)
    if given.is_dir():
        candidates = complete_checkpoints(given) or complete_checkpoints(given / "checkpoints")
        if not candidates:
            raise CheckpointError(f"--resume {path}: there is no checkpoint in this folder")
        given = candidates[-1]
    if not given.is_file():
        raise CheckpointError(f"--resume {path}: there is no such file or folder")
    fault = _fault(given)
    if fault is not None:
        older = [other for other in complete_checkpoints(given.parent) if other.name < given.name]
        complete = next((other for other in reversed(older) if _fault(other) is None), None)
        remedy = f"an earlier one is complete: --resume {complete}" if complete else "no earlier one is complete"
        raise CheckpointError(f"--resume {given}: {fault}; {remedy}")
    return given


def _fault(path: Path) -> str | None:
    """What is wrong with the file, None if nothing: every byte is checked against the checksums it was stored with."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is not None:
            return f"the file is damaged ({bad} does not match its checksum)"
        content = load(path)
    except (zipfile.BadZipFile, RuntimeError, OSError, EOFError, ValueError) as error:
        return f"the file is damaged ({str(error).splitlines()[0] or type(error).__name__})"
    except pickle.UnpicklingError:
        return "this is no checkpoint of this program (it holds other things than tensors, containers and numbers)"
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return f"this is no checkpoint of this program (format {FORMAT})"
    return None


def load(path: Path) -> dict[str, Any]:
    """The content, its tensors mapped from the file: any number of ranks may load it and memory holds it once."""
    with open(path, "rb") as file:
        name = str(path)
        if not name.isascii():  # torch maps by a name in UTF-8, which this one may not be
            name = f"/dev/fd/{file.fileno()}"
        content: dict[str, Any] = torch.load(name, map_location="cpu", mmap=True)
    return content


def with_epoch_reopened(content: dict[str, Any], sizes: list[int]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """For a run whose epochs have these `sizes`: an epoch that `max_steps` had ended early goes on where it was ended.

    Returns the content, and what was recorded of that epoch, which its record to come takes the place of; or None.
    """
    history, batch_size = content["history"], content["config"].get("batch_size")
    if not history or content["samples_done"] or batch_size is None:
        return content, None
    *before, last = history
    done = last["steps"] * batch_size
    if last["epoch"] > len(sizes) or done >= sizes[last["epoch"] - 1]:
        return content, None
    return content | {"history": before, "samples_done": done}, last
