"""Exact evaluation: every sample once, whatever the number of workers; counts are summed, ratios never averaged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

EVALUATION_BATCH = 500


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
