"""Digits: 1,797 images [1, 8, 8] of handwritten digits that scikit-learn ships, so that nothing needs a network.

The test set of "Optical Recognition of Handwritten Digits", UCI repository (Alpaydin and Kaynak, 1998). A model learns
it in seconds on one core, and it is too small to compare algorithms by accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from torch_parallel.workloads.dataset import Dataset

TRAIN_COUNT = 1437  # 80 %; 360 are left for the test
LEVELS = 16  # a pixel counts the black dots of a 4 x 4 block


def load_digits(folders: Sequence[Path] = ()) -> Dataset:
    """1,437 training and 360 test samples, split the same in every run; `folders` is not looked at."""
    from sklearn.datasets import load_digits as load_bunch

    bunch = load_bunch()
    images = torch.from_numpy(bunch.images * (255 / LEVELS)).round().to(torch.uint8).unsqueeze(1)
    targets = torch.from_numpy(bunch.target).long()
    # numpy promises that this generator never changes, so the split is the same with every version.
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(targets)))
    train, test = order[:TRAIN_COUNT], order[TRAIN_COUNT:]
    pixels = images[train].double() / 255
    return Dataset(
        name="digits",
        train_inputs=images[train],
        train_targets=targets[train],
        test_inputs=images[test],
        test_targets=targets[test],
        class_count=10,
        mean=(round(pixels.mean().item(), 4),),  # rounded: the same number on every machine
        std=(round(pixels.std().item(), 4),),
        source="scikit-learn's 8x8 digits",
    )
