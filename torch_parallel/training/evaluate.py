"""What train.py and the controls measure alike.

Exact evaluation: every sample once, whatever the number of workers; counts are summed, ratios never averaged. And, for
the controls, when a device gets somewhere: theirs may not be the stopwatch of what they are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

EVALUATION_BATCH = 500

Moment = float | torch.cuda.Event


def count_correct(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    prepare: Callable[[Tensor], Tensor],
    device: torch.device | None = None,
) -> tuple[float, int, int]:
    """Sum of the losses, correct predictions, and samples, of `inputs` [n, ...] and `targets` [n].

    `prepare` makes a batch of inputs what the model is fed. Every module is left in the mode it was in.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    loss_sum, correct = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(targets), EVALUATION_BATCH):
            batch = slice(start, start + EVALUATION_BATCH)
            wanted = targets[batch].to(device)
            logits = model(prepare(inputs[batch].to(device)))
            loss_sum += cross_entropy(logits, wanted, reduction="sum").item()
            correct += int((logits.argmax(1) == wanted).sum())
    for module in training:
        module.training = True
    return loss_sum, correct, len(targets)


def moment(device: torch.device) -> Moment:
    """When `device` gets this far: a GPU does so later than the host, and another GPU event tells by how much."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device.index))  # which it would find by itself, but more slowly
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Between two moments of one device, which has come so far: on a GPU somebody has waited for it."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3
