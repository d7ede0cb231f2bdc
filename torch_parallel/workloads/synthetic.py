"""Synthetic: 1,152 random images [3, 224, 224] in 1,000 random classes, made in memory, as large as ImageNet's.

For measuring throughput where no data is at hand: what a step costs does not depend on what the pixels show. A model
can learn the training samples by heart; the test samples have nothing to do with them, so accuracy stays at 0.1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_parallel.workloads.dataset import Dataset

TRAIN_COUNT, TEST_COUNT = 1024, 128  # 154 MB and 19 MB
CLASS_COUNT = 1000
IMAGE_SHAPE = (3, 224, 224)


def load_synthetic(folders: Sequence[Path] = ()) -> Dataset:
    """1,024 training and 128 test samples, the same in every run; `folders` is not looked at."""
    count = TRAIN_COUNT + TEST_COUNT
    generator = torch.Generator().manual_seed(0)
    # Eight pixels of each random number: a quarter of the time that drawing them one by one takes, which is 1 s.
    numbers = torch.randint(-(2**63), 2**63 - 1, (count * math.prod(IMAGE_SHAPE) // 8,), generator=generator)
    images = numbers.view(torch.uint8).view(count, *IMAGE_SHAPE)
    targets = torch.randint(0, CLASS_COUNT, (count,), generator=generator)
    return Dataset(
        name="synthetic",
        train_inputs=images[:TRAIN_COUNT],
        train_targets=targets[:TRAIN_COUNT],
        test_inputs=images[TRAIN_COUNT:],
        test_targets=targets[TRAIN_COUNT:],
        class_count=CLASS_COUNT,
        mean=(0.5,) * 3,
        std=(0.2898,) * 3,  # of 0..255, all alike, divided by 255: sqrt((256**2 - 1) / 12) / 255
        source="random numbers: made up, nothing can be learnt from it, and it is there to measure throughput",
    )
