"""Synthetic: random images in random classes, or random tokens, made in memory, of any shape.

For measuring throughput where no data is at hand: what a step costs does not depend on what the pixels show. A model
can learn the training samples by heart; the test samples have nothing to do with them, so accuracy stays at chance.

`synthetic` alone has images as large as ImageNet's, [3, 224, 224] in 1,000 classes. `synthetic:1x28x28:10` says other
channels, height, width, and classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_parallel.devices import free_memory_bytes
from torch_parallel.units import bytes_text
from torch_parallel.workloads.dataset import Dataset
from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.text.text_data import TextData

NAME = "synthetic"
TRAIN_COUNT, TEST_COUNT = 1024, 128  # 154 MB and 19 MB
CLASS_COUNT = 1000
IMAGE_SHAPE = (3, 224, 224)
TEXT_CLASSES = 5
SOURCE = "random numbers: made up, nothing can be learnt from it, and it is there to measure throughput"


def is_synthetic(name: str | None) -> bool:
    return name is not None and name.split(":")[0] == NAME


def load_synthetic(
    folders: Sequence[Path] = (), name: str = NAME, train_count: int | None = None, test_count: int | None = None
) -> Dataset:
    """So many samples of the shape that `name` says, the same in every run; `folders` is not looked at.

    Raises DataError for a name that says no shape, and where memory does not suffice.
    """
    shape, class_count = shape_and_classes(name)
    train = TRAIN_COUNT if train_count is None else train_count
    count = train + (TEST_COUNT if test_count is None else test_count)
    pixels = count * math.prod(shape)
    _check_memory(name, pixels)
    generator = torch.Generator().manual_seed(0)
    # Eight pixels of each random number: a quarter of the time that drawing them one by one takes, which is 1 s.
    numbers = torch.randint(-(2**63), 2**63 - 1, (-(-pixels // 8),), generator=generator)
    images = numbers.view(torch.uint8)[:pixels].view(count, *shape)
    targets = torch.randint(0, class_count, (count,), generator=generator)
    return Dataset(
        name=name.replace(":", "_"),
        train_inputs=images[:train],
        train_targets=targets[:train],
        test_inputs=images[train:],
        test_targets=targets[train:],
        class_count=class_count,
        mean=(0.5,) * shape[0],
        std=(0.2898,) * shape[0],  # of 0..255, all alike, divided by 255: sqrt((256**2 - 1) / 12) / 255
        source=SOURCE,
    )


def shape_and_classes(name: str) -> tuple[tuple[int, int, int], int]:
    """(channels, height, width) and the number of classes. Raises DataError for a name that does not say them."""
    if name == NAME:
        return IMAGE_SHAPE, CLASS_COUNT
    match = re.fullmatch(rf"{NAME}:([0-9]{{1,6}})x([0-9]{{1,6}})x([0-9]{{1,6}})(?::([0-9]{{1,9}}))?", name)
    channels, height, width, class_count = (int(each) for each in match.groups(CLASS_COUNT)) if match else (0,) * 4
    if min(channels, height, width, class_count) < 1:
        raise DataError(
            f"--dataset {name}: channels, height, width, and classes if you like, all at least 1, are wanted, as in "
            f"{NAME}:3x224x224 or {NAME}:3x224x224:1000"
        )
    return (channels, height, width), class_count


def synthetic_text(
    task: str, length: int, vocabulary_size: int, train_count: int | None, test_count: int | None
) -> TextData:
    """Random tokens: whole texts with a class each, or, for "next_token", windows of which each token is to be told."""
    train = TRAIN_COUNT if train_count is None else train_count
    count = train + (TEST_COUNT if test_count is None else test_count)
    predicts = task == "next_token"
    _check_memory(NAME, 8 * count * (length + predicts))
    generator = torch.Generator().manual_seed(0)
    dtype = torch.uint8 if vocabulary_size <= 256 else torch.int32
    tokens = torch.randint(vocabulary_size, (count, length + predicts), generator=generator, dtype=torch.int32)
    if predicts:
        samples = {"tokens": tokens.to(dtype), "count": torch.full((count,), length)}
    else:
        labels = torch.randint(TEXT_CLASSES, (count,), generator=generator)
        samples = {"tokens": tokens, "mask": torch.ones(count, length, dtype=torch.bool), "labels": labels}
    return TextData(
        name=NAME,
        source=SOURCE,
        task="next_token" if predicts else "classification",
        train={field: each[:train] for field, each in samples.items()},
        test={field: each[train:] for field, each in samples.items()},
        vocabulary_size=vocabulary_size,
        length=length,
        class_names=() if predicts else tuple(map(str, range(TEXT_CLASSES))),
        unit="byte" if predicts and dtype == torch.uint8 else "token",
    )


def _check_memory(name: str, needed: int) -> None:
    free = free_memory_bytes()
    if free is not None and needed > free:
        raise DataError(
            f"--dataset {name} takes {bytes_text(needed)} of memory, and {bytes_text(free)} are free; take fewer "
            "samples (--train_size, --test_size) or smaller ones"
        )
