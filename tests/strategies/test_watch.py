"""Writes that counts of versions do not show, with the watch alone."""

from __future__ import annotations

import pytest
from torch import nn

from torch_parallel.strategies.model_check import UnsupportedModel
from torch_parallel.strategies.watch import Watch, is_looked_at


def found_in(period: int, rebound: bool, steps: int = 3000) -> int | None:
    """The step in which it is noticed that forward writes the weight in every `period`-th step."""
    model = nn.Linear(3, 3)
    watch = Watch(model, alone=False)
    for step in range(1, steps + 1):
        watch.begin_step()
        if step % period == 0:
            if rebound:
                model.weight.data = model.weight.data + 1.0
            else:
                model.weight.data.add_(1.0)
        try:
            watch.look()
        except UnsupportedModel as error:
            assert "parameter weight was written during forward or backward" in str(error)
            return step
    return None


@pytest.mark.parametrize("period", [1, 2, 3, 5, 7, 12])
def test_a_parameter_that_is_put_elsewhere_is_noticed_at_once(period: int) -> None:
    assert found_in(period, rebound=True) == period


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_no_rhythm_escapes(period: int) -> None:
    """Of the writes in steps p, 2p, 3p, ... one falls on a step that is looked at closely."""
    assert found_in(period, rebound=False) is not None


def test_ever_fewer_steps_are_looked_at() -> None:
    """The chances 1 / sqrt(k) add up to 2 sqrt(N), 200 for 10,000 steps, give or take a few roots of that."""
    seen = [step for step in range(1, 10_001) if is_looked_at(step)]
    assert seen[0] == 1 and 150 <= len(seen) <= 250
    assert len([step for step in seen if step > 5000]) < len([step for step in seen if step <= 5000])
