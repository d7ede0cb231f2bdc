"""Learning-rate schedules: the factor on the learning rate is a function of the step, so there is nothing to save."""

from __future__ import annotations

import math
from collections.abc import Callable

# progress 0..1 through the steps after the warm-up -> factor
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def factor(name: str, step: int, total_steps: int, warmup_steps: int) -> float:
    """The factor for `step`, counted from 1: a linear rise over `warmup_steps`, then the schedule down to its end.

    Warm-up is what a large global batch needs (Goyal et al., "Accurate, large minibatch SGD", 2017).
    """
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    return SCHEDULES[name]((step - 1 - warmup_steps) / max(1, total_steps - warmup_steps))
