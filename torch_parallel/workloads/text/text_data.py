"""Text that a model learns from: tensors by name, for a training and a test part, and what the model must know of it.

The three tasks need different tensors, so a part is a dictionary and not a pair of inputs and targets as in `Dataset`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.forms import TextTask

FIELDS: dict[str, tuple[str, ...]] = {
    "classification": ("tokens", "mask", "labels"),
    "next_token": ("tokens", "count"),
    "masked": ("tokens", "mask", "targets"),
}


@dataclass(frozen=True, eq=False)
class TextData:
    """Text as numbers. Each tensor of `train` has n rows, each of `test` has m.

    classification: "tokens" int32 [n, length], filled up with the pad id; "mask" bool [n, length], True where a token
    is; "labels" int64 [n], which count from 0 in the order of `class_names`.

    next_token: "tokens" uint8 or int32 [n, length + 1]: tokens[:, 1:] are to be predicted from tokens[:, :-1]. Each
    window begins with the last token of the one before it. "count" int64 [n] is how many targets a window has: the last
    may have less than `length`, and is filled up with 0.

    masked: "tokens" int32 [n, length], some of them replaced; "mask" as above; "targets" int64 [n, length], the true
    token where it is to be predicted and -100 elsewhere. A row may have no target.

    `vocabulary_size` is above every token. `unit` is what one token is: "byte" or "token". `source` says where the text
    came from and what was done with it. Raises DataError where the tensors are not those of the task.
    """

    name: str
    source: str
    task: TextTask
    train: dict[str, Tensor]
    test: dict[str, Tensor]
    vocabulary_size: int
    length: int
    class_names: tuple[str, ...] = ()
    unit: str = "token"

    def __post_init__(self) -> None:
        if self.task not in FIELDS:
            raise DataError(f"task of {self.name}: it is {self.task!r}; one of {', '.join(FIELDS)} is wanted")
        for part in ("train", "test"):
            self._check(part, getattr(self, part))

    def _check(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        wanted = FIELDS[self.task]
        if set(tensors) != set(wanted):
            found = ", ".join(sorted(tensors)) or "nothing"
            raise DataError(f"{part} of {self.name}: it has {found}; for {self.task}, {', '.join(wanted)} are wanted")
        rows = {field: len(tensors[field]) for field in wanted}
        if len(set(rows.values())) > 1 or not rows["tokens"]:
            counts = ", ".join(f"{field} {count}" for field, count in rows.items())
            raise DataError(f"{part} of {self.name}: its rows are {counts}; as many of each, at least 1, are wanted")
        width = self.length + (self.task == "next_token")
        if tuple(tensors["tokens"].shape[1:]) != (width,):
            shape = list(tensors["tokens"].shape)
            raise DataError(f"{part} of {self.name}: its tokens have the shape {shape}; [n, {width}] is wanted")
