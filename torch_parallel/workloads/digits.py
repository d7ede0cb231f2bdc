"""Digits: 1,797 images [1, 8, 8] of handwritten digits that scikit-learn ships, so that nothing needs a network.

The test set of "Optical Recognition of Handwritten Digits", UCI repository (Alpaydin and Kaynak, 1998). A model learns
it in seconds on one core, and it is too small to compare algorithms by accuracy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_parallel.workloads.dataset import Dataset

TRAIN_COUNT = 1437  # 80 %; 360 are left for the test
LEVELS = 16  # a pixel counts the black dots of a 4 x 4 block


def load_digits(folders: Sequence[Path] = ()) -> Dataset:
    """1,437 training and 360 test samples, split the same in every run; `folders` is not looked at."""
    levels, digits = _images_and_digits()
    images = torch.from_numpy(levels * (255 / LEVELS)).round().to(torch.uint8).unsqueeze(1)
    targets = torch.from_numpy(digits).long()
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
        built_in=True,
    )


def _images_and_digits() -> tuple[Any, Any]:
    """[n, 8, 8] of float64 and [n] of int64, from scikit-learn's file; by its own function, should that lie elsewhere.

    To import the function takes 1.5 s, a third of all that a run on digits begins with, and to read the file 0.03.
    """
    package = importlib.util.find_spec("sklearn")
    places = (package.submodule_search_locations if package else None) or []
    files = [Path(place) / "datasets" / "data" / "digits.csv.gz" for place in places]
    if files and files[0].exists():
        table = np.loadtxt(files[0], delimiter=",")
        return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits as load_bunch

    bunch = load_bunch()
    return bunch.images, bunch.target
