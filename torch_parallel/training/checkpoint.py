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
import copy
import io
import os
import pickle
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor, nn

from torch_parallel.files import path_of
from torch_parallel.gradients.layout import lies_over_itself, written_once
from torch_parallel.strategies.replicas import described, extra_state, make_missing_buffers, set_extra_state

FORMAT = 1
KEEP = 3
"""So many of the newest checkpoints stay."""
_NAME = re.compile(r"step_(\d{9})\.pt")


class CheckpointError(Exception):
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


def on_cpu(state: Any) -> Any:
    """Copies that share no memory with the model, of all tensors in dicts, lists and tuples; of a tied one only one."""
    copies: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(copied, value))
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        place = (
            (value.device, value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else id(value)
        )
        if place not in copies:
            copies[place] = value.detach().cpu().clone()
        return copies[place]

    return copied(state)


def beside_parameters(model: nn.Module) -> dict[str, Any]:
    """The model's `state_dict()`, with None in place of every parameter: a server has these from elsewhere."""
    kept = model.state_dict(keep_vars=True)
    return {key: None if isinstance(value, nn.Parameter) else on_cpu(value) for key, value in kept.items()}


def put_together(model: nn.Module, others: dict[str, Any]) -> dict[str, Any]:
    """A `state_dict()` of this rank's parameters and what `beside_parameters` gave on another rank."""
    own = on_cpu(model.state_dict())
    return {key: own[key] if value is None else value for key, value in others.items()}


def load_model(model: nn.Module, saved: dict[str, Any]) -> None:
    """Takes up the model of a checkpoint: what its `state_dict()` held, and the buffers that are not in that.

    Buffers come from the lowest rank that trained, those that forward had made among them.
    """
    buffers = saved["ranks"][saved["server_count"]]["buffers"]
    present = {name: described(buffer) for name, buffer in model.named_buffers()}
    make_missing_buffers(model, {name: described(value) for name, value in buffers.items() if name not in present})
    with _expanded_set_aside(model):
        model.load_state_dict(saved["model"])
    _fill_buffers(model, buffers)


@contextlib.contextmanager
def _expanded_set_aside(model: nn.Module) -> Iterator[None]:
    """Puts clones in the places of expanded buffers, which torch does not write."""
    expanded = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and lies_over_itself(buffer)
    ]
    for module, name, buffer in expanded:
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in expanded:
            module._buffers[name] = buffer


def _fill_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    buffers = dict(model.named_buffers())
    for name, value in values.items():
        target = written_once(buffers[name])
        target.copy_(value[tuple(slice(size) for size in target.shape)])


def check_plain(extra: dict[str, Any]) -> None:
    """Raises CheckpointError for a module's extra state that `torch.load` would refuse by default."""
    for name, state in extra.items():
        file = io.BytesIO()
        try:
            torch.save(on_cpu(state), file)
            torch.load(io.BytesIO(file.getvalue()))
        except Exception as error:
            raise CheckpointError(
                f"module {name or 'at the top'}: its extra state cannot be in a checkpoint, which holds "
                "tensors, numbers, texts and containers of them: let get_extra_state return such, or leave "
                "--checkpoint_every out"
            ) from error


def rank_state(model: nn.Module, loss_sum: float) -> dict[str, Any]:
    """What is this rank's alone: random states, buffers, extra state, and the losses of the epoch so far."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy_rng": [kind, torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64)), position, has_gauss, gauss],
        "python_rng": random.getstate(),
        "buffers": on_cpu(dict(model.named_buffers())),
        "extra": on_cpu(extra_state(model)),
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
    _fill_buffers(model, state["buffers"])
    set_extra_state(model, state.get("extra", {}))
