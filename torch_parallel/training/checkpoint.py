"""Checkpoints: everything a run needs to go on as if it had never stopped, in a file that plain `torch.load` reads.

A checkpoint holds the bare model's state_dict, the optimizer's state by parameter name, the step, the place in the
epoch's permutation, the history, and for each rank its random states and its BatchNorm statistics. Nothing in it
depends on the number of processes, the strategy or the bucket size, except each rank's own part, which only a run with
as many ranks takes up: such a run continues to the bit.

A file is complete or it is not there: it is written to a temporary name, brought to disk, and renamed. Only then is it
announced, and only then are older ones removed.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

FORMAT = 1
KEEP = 3
"""So many of the newest checkpoints stay."""
_NAME = re.compile(r"step_(\d{9})\.pt")


class CheckpointError(Exception):
    """A checkpoint that is not there, damaged, or of another run. One line, with what to do."""


def path_for(folder: Path, step: int) -> Path:
    return folder / f"step_{step:09d}.pt"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints of a folder, oldest first. What was being written when a run was killed is not one."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def save(content: dict[str, Any], folder: Path, step: int) -> Path:
    """Writes the checkpoint of `step` and removes all but the newest.

    Raises CheckpointError where it cannot be written; then older ones are untouched and nothing half-written is left.
    """
    path = path_for(folder, step)
    temporary = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        temporary.unlink(missing_ok=True)
        cause = next((each for each in (error.__context__, error) if isinstance(each, OSError)), error)
        reason = getattr(cause, "strerror", None) or cause
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be written to {folder} ({reason}): make room there, or choose "
            "another folder with --results_dir; earlier checkpoints are untouched"
        ) from None
    for old in complete_checkpoints(folder)[:-KEEP]:
        old.unlink()
    for unfinished in folder.glob("*.tmp"):
        unfinished.unlink()
    return path


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
    given = Path(path)
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
    content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True)
    return content


def on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share no memory with the model."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def rank_state(model: nn.Module, loss_sum: float) -> dict[str, Any]:
    """What is this rank's alone: random states, buffers, and the losses of the epoch so far."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy_rng": [kind, torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64)), position, has_gauss, gauss],
        "python_rng": random.getstate(),
        "buffers": {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()},
        "loss_sum": loss_sum,
    }


def restore_rank(model: nn.Module, state: dict[str, Any]) -> None:
    """The reverse of `rank_state`, for the rank that made it."""
    torch.set_rng_state(state["torch_rng"].clone())
    if state["cuda_rng"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda_rng"].clone())
    kind, keys, position, has_gauss, gauss = state["numpy_rng"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), position, has_gauss, gauss))
    random.setstate(state["python_rng"])
    buffers = dict(model.named_buffers())
    for name, value in state["buffers"].items():
        buffers[name].copy_(value)
