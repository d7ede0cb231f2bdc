"""What each rank's time went on in each step: the rows of `--steps_csv`, written and read.

`analysis/waits.py` draws them: who waits for whom, and for how long.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch_parallel.files import our_own, path_of


@dataclass(frozen=True)
class StepTimes:
    """One rank's seconds in one step. What is left of `step_s` is bookkeeping: buffers, messages to nobody."""

    epoch: int
    step: int  # of the epoch, from 1
    rank: int
    role: str  # worker or server
    step_s: float
    compute_s: float  # forward and backward, with what is emulated
    wait_s: float
    move_s: float  # peers' chunks copied
    reduce_s: float  # peers' chunks added
    update_s: float
    waited_for_s: list[float]  # by peer; their sum is wait_s


COLUMNS = ("run_id", "kind", "strategy", *(each.name for each in fields(StepTimes)))


class StepsFile:
    """A file of steps, begun anew, to which each epoch's are added. Raises OutputError where it cannot be written."""

    def __init__(self, path: str | Path, **same: Any) -> None:
        self._path = path_of(path)
        self._same = same  # run_id, kind, strategy: the same in all rows
        self._write("w", [dict(zip(COLUMNS, COLUMNS, strict=True))])

    def append(self, steps: Iterable[StepTimes]) -> None:
        rows = [{**self._same, **asdict(step), "waited_for_s": json.dumps(step.waited_for_s)} for step in steps]
        self._write("a", rows)

    def _write(self, mode: str, rows: list[dict[str, Any]]) -> None:
        with our_own(), open(self._path, mode, newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS).writerows(rows)


def read_steps(path: str | Path) -> list[StepTimes]:
    """The steps of a file of `StepsFile`, by epoch, step and rank. Raises ValueError for another file."""
    try:
        with open(path_of(path), newline="", encoding="utf-8") as file:
            steps = [_step(row) for row in csv.DictReader(file, strict=True)]
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is no file of steps, as --steps_csv writes it: {error!r}") from None
    return sorted(steps, key=lambda step: (step.epoch, step.step, step.rank))


def _step(row: dict[str, str]) -> StepTimes:
    whole = {name: int(row[name]) for name in ("epoch", "step", "rank")}
    seconds = {each.name: float(row[each.name]) for each in fields(StepTimes) if each.type == "float"}
    return StepTimes(**whole, **seconds, role=row["role"], waited_for_s=json.loads(row["waited_for_s"]))  # type: ignore[arg-type]
