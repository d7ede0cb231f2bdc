"""Whether what a run has made is sound: finite everywhere, and trained on most of the data.

Gradients are looked at in every step (`gradients/finite.py`). What is looked at here a step may have left behind in
silence: an update that overflowed after the last gradient, a buffer that forward wrote, the optimizer's own state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_parallel.strategies import NotFinite, Strategy
from torch_parallel.training.evaluate import FromTheStart, first_not_finite
from torch_parallel.training.record import Epoch
from torch_parallel.workloads.whole_model import extra_state


class Soundness:
    """Looks at parameters, buffers and the optimizer's state of one rank, all of them: before a checkpoint, and at the
    end of an epoch. What is not finite from the start, such as a mask of -inf, may stay so."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._from_the_start, self._extra = FromTheStart(model), _of_extra_state(model)

    def look(self, strategy: Strategy) -> None:
        """Raises NotFinite, which names the first."""
        found = first_not_finite(self._model, strategy.optimized(), except_for=self._from_the_start)
        extra = _of_extra_state(self._model)
        found = found or next((name for name in extra if name not in self._extra), None)
        self._extra = [name for name in self._extra if name in extra]
        if found is not None:
            raise NotFinite(f"{found} is NaN or infinite")


def _of_extra_state(model: nn.Module) -> list[str]:
    """The modules whose extra state holds a number or a tensor that is not finite, in words."""
    return [
        f"the extra state of {name or 'the model'}"
        for name, state in extra_state(model).items()
        if not all(torch.isfinite(torch.as_tensor(each).cpu()).all() for each in _numbers_in(state))
    ]


def _numbers_in(state: Any) -> Iterator[float | Tensor]:
    if isinstance(state, float) or (isinstance(state, Tensor) and (state.is_floating_point() or state.is_complex())):
        yield state
    elif isinstance(state, dict | list | tuple | set):
        for each in state.values() if isinstance(state, dict) else state:
            yield from _numbers_in(each)


def look_at_losses(epoch: Epoch) -> None:
    """Raises NotFinite where the mean loss of training or of testing is."""
    for name, loss in (("training", epoch.train_loss), ("test", epoch.test_loss)):
        if not math.isfinite(loss):
            raise NotFinite(f"the {name} loss is NaN or infinite")


def look_at_skipped(skipped: int, steps: int, targets: int) -> None:
    """Raises NotFinite where most steps of the run have been skipped, or nothing of an epoch's data was used."""
    if 2 * skipped > steps or targets == 0:
        raise NotFinite(
            f"{skipped} of {steps} steps have been skipped, because a gradient was NaN or infinite, so the model has "
            "not seen most of the data; a smaller --lr may help, or --clip_norm"
        )
