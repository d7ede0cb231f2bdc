"""A task of the user's own is tried on a few samples before training: what would train to nonsense is told at once.

A mean in place of a sum raises nothing. Divided once more by the targets of the step, it trains with a learning rate
that is too small by the size of the batch, and differs with the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from torch_parallel.workloads.outputs import OutputMisfit
from torch_parallel.workloads.task import Task, counts_of, loss_sum_of, metric_sums_of, metrics_of
from torch_parallel.workloads.tree import Tree, count, rows, to
from torch_parallel.workloads.whole_model import in_type, left_as_it_is

FEW = 8
"""Samples that are tried."""
AS_GOOD_AS_EQUAL, CLEARLY_OTHER = 1e-3, 0.05
"""Parts of the largest of the losses that are compared: rounding stays below the first."""


def is_own(task: Task) -> bool:
    """Whether the task is the user's. Those of the package need no trial."""
    return not type(task).__module__.startswith("torch_parallel.")


def trial_of(task: Task, samples: Tree, dtype: torch.dtype) -> Callable[[Callable[[], nn.Module]], str | None]:
    """A function that can be sent to a process: of `make_model`, it tells what is wrong, in one line; None if nothing.

    It holds copies of a few samples, not all of them.
    """
    few = rows(samples, torch.arange(min(FEW, count(samples))))
    return partial(_fault, task=task, samples=few, dtype=dtype)


def _fault(make_model: Callable[[], nn.Module], task: Task, samples: Tree, dtype: torch.dtype) -> str | None:
    model = make_model()
    try:
        try_out(in_type(model, dtype), task, samples, dtype)
    except OutputMisfit as misfit:
        return str(misfit)
    return None


def try_out(
    model: nn.Module, task: Task, samples: Tree, dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """Takes the loss and the figures of a few samples, and leaves model and generators as they were.

    Raises OutputMisfit for what is no loss or no figure, and for a mean in place of a sum. Whatever else fails is left
    to the run, which tells it with its traceback.
    """
    if not is_own(task) or not count(samples):
        return
    few = rows(samples, torch.arange(min(FEW, count(samples))))
    loss = partial(_loss, model, task, dtype=dtype, device=device)
    looks = partial(_look_at_figures, model, task, few, dtype, device), partial(_look_for_a_mean, loss, task, few)
    for look in looks:
        try:
            with _as_it_was(model, device):
                model.eval()
                look()
        except OutputMisfit:
            raise
        except Exception:
            continue  # figures of so few samples may fail; the loss is looked at all the same


def _look_at_figures(model: nn.Module, task: Task, few: Tree, dtype: torch.dtype, device: torch.device | None) -> None:
    batch = task.prepare(to(few, device, copy=True), dtype)
    output = task.forward(model, batch)
    loss = loss_sum_of(task, output, batch).detach()  # with gradients on: it must have one
    with torch.no_grad():
        sums = {name: each.cpu() for name, each in metric_sums_of(task, output, batch).items()}
        counts = counts_of(task, few)
        targets = count(few) if counts is None else int(counts.sum())
        metrics_of(task, sums, targets, loss.item() / max(1, targets))


def _loss(model: nn.Module, task: Task, stored: Tree, dtype: torch.dtype, device: torch.device | None) -> float:
    with torch.no_grad():
        batch = task.prepare(to(stored, device, copy=True), dtype)
        return loss_sum_of(task, task.forward(model, batch), batch).item()


def _look_for_a_mean(loss: Callable[[Tree], float], task: Task, few: Tree) -> None:
    """The loss of all is compared with the losses of its parts, cut at several places: one may be a chance."""
    size, counts = count(few), counts_of(task, few)
    whole, shown = loss(few) if size > 1 else math.nan, [math.nan, math.nan]
    for cut in {1, size // 2, size - 1}:
        slices = slice(0, cut), slice(cut, size)
        weights = [[part.stop - part.start for part in slices]]
        if counts is not None:
            weights.append([int(counts[part].sum()) for part in slices])
        if not all(map(all, weights)):
            continue  # a part has nothing of which there could be a mean
        parts = [loss(rows(few, part)) for part in slices]
        if not any(is_mean(whole, parts, each) for each in weights):
            return
        shown = parts
    if math.isnan(shown[0]):
        return
    raise OutputMisfit(
        f"loss_sum of {type(task).__name__} gives a mean: {whole:.4g} for {size} samples, and {shown[0]:.4g} and "
        f'{shown[1]:.4g} for two parts of them; return the sum (reduction="sum"), which is divided by all targets later'
    )


def is_mean(whole: float, parts: Sequence[float], weights: Sequence[int]) -> bool:
    """Whether a loss is clearly the weighted mean of the losses of its parts, and not their sum."""
    numbers = [whole, *parts]
    if not all(map(math.isfinite, numbers)) or not sum(weights):
        return False
    scale = max(map(abs, numbers))
    if abs(whole - sum(parts)) <= CLEARLY_OTHER * scale:
        return False
    mean = sum(weight * part for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    return abs(whole - mean) <= AS_GOOD_AS_EQUAL * scale


@contextmanager
def _as_it_was(model: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Modes, buffers, extra state and torch's generators are given back what they had."""
    gpus = [device] if device is not None and device.type == "cuda" else []
    with left_as_it_is(model), torch.random.fork_rng(devices=gpus):
        yield
