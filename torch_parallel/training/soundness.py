"""Whether what a run has made is sound: finite everywhere, and trained on most of the data.

Gradients are looked at in every step (`gradients/finite.py`). What is looked at here a step may have left behind in
silence: an update that overflowed after the last gradient, a buffer that forward wrote, the optimizer's own state.
"""

from __future__ import annotations

import math

from torch import nn

from torch_parallel.strategies import NotFinite, Strategy
from torch_parallel.training.evaluate import first_not_finite, not_finite
from torch_parallel.training.record import Epoch


class Soundness:
    """Looks at parameters, buffers and the optimizer's state of one rank, all of them: before a checkpoint, and at the
    end of an epoch. What is not finite from the start, such as a mask of -inf, may stay so."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._by_design = not_finite(model)

    def look(self, strategy: Strategy) -> None:
        """Raises NotFinite, which names the first."""
        found = first_not_finite(self._model, strategy.optimized(), except_for=self._by_design)
        if found is not None:
            raise NotFinite(f"{found} is NaN or infinite")


def look_at_losses(epoch: Epoch) -> None:
    """Raises NotFinite where the mean loss of training or of testing is."""
    for name, loss in (("training", epoch.train_loss), ("test", epoch.test_loss)):
        if not math.isfinite(loss):
            raise NotFinite(f"the {name} loss is NaN or infinite")


def look_at_skipped(skipped: int, steps: int, samples: int) -> None:
    """Raises NotFinite where most steps of the run have been skipped, or nothing of an epoch's samples was used."""
    if 2 * skipped > steps or samples == 0:
        raise NotFinite(
            f"{skipped} of {steps} steps have been skipped, because a gradient was NaN or infinite, so the model has "
            "not seen most of the data; a smaller --lr may help, or --clip_norm"
        )
