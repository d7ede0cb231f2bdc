"""From a folder of images to a `Dataset`.

Files are listed, split and chosen before any is decoded: a few samples of a large folder cost a few files.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torch_parallel.devices import free_memory_bytes
from torch_parallel.units import bytes_text
from torch_parallel.workloads.dataset import Dataset
from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.image_folder.decode import all_grey, decode, threads
from torch_parallel.workloads.image_folder.listing import Part, list_images
from torch_parallel.workloads.image_folder.split import in_both, split
from torch_parallel.workloads.samples import drawn

DEFAULT_SIDE = 64
"""Pixels, for models that do not say theirs."""
COUNTED_AT_ONCE = 256


@dataclass(frozen=True)
class _Found:
    name: str
    source: str


def load_image_folder(
    folder: Path, side: int | None, seed: int, train_size: int | None = None, test_size: int | None = None
) -> tuple[Dataset, str]:
    """The images of `folder` as bytes [n, 1 or 3, side, side], and one line about them.

    `train/` and `test/` (or `val/`) in it are the parts. Else a tenth of each class is drawn by `seed` for testing.
    `train_size` and `test_size` keep that many, drawn by `seed`; the others are not decoded. Images have 3 channels
    unless all are grey. Mean and deviation are those of the training part.

    Raises DataError, one line that names the file or folder and what helps.
    """
    side = side or DEFAULT_SIDE
    name, listing = folder.resolve().name or "images", list_images(folder)
    notes = [f"{len(listing.classes)} classes", *listing.notes]
    if listing.test is None:
        train, test, more = split(listing.train, seed)
        notes += [f"{len(test):,} of {len(listing.train):,} images drawn for testing", *more]
    else:
        train, test = listing.train, listing.test
        if equal := in_both(train, test):
            notes.append(f"test images that are in the training part too: {equal:,}")
    found = _Found(name, str(folder))
    chosen_train = _chosen(found, "train", train, train_size, seed)
    chosen_test = _chosen(found, "test", test, test_size, seed)
    start_s = time.perf_counter()
    grey = all_grey([*chosen_train.files, *chosen_test.files])
    count, channels = len(chosen_train) + len(chosen_test), 1 if grey else 3
    _check_memory(name, count, channels, side)
    images = decode(chosen_train.files, side, grey), decode(chosen_test.files, side, grey)
    seconds = time.perf_counter() - start_s
    notes.append(
        f"{count:,} images decoded to {channels} x {side} x {side} in {seconds:.1f} s by {threads()} "
        f"thread{'s' * (threads() > 1)}"
    )
    mean, std = mean_and_deviation(images[0])
    dataset = Dataset(
        name=name,
        train_inputs=images[0],
        train_targets=torch.tensor(chosen_train.targets),
        test_inputs=images[1],
        test_targets=torch.tensor(chosen_test.targets),
        class_count=len(listing.classes),
        mean=mean,
        std=std,
        source=f"{folder} ({'; '.join(notes)})",
    )
    line = f"{name} from {dataset.source}"
    for size, part, what in ((train_size, train, "training"), (test_size, test, "test")):
        line += f"; {size} of {len(part)} {what} samples" if size is not None else ""
    return dataset, line


def _chosen(found: _Found, name: str, part: Part, size: int | None, seed: int) -> Part:
    which = drawn(found, name, size, len(part), seed)
    return part if isinstance(which, slice) else part.at(which.tolist())


def _check_memory(name: str, count: int, channels: int, side: int) -> None:
    needed, free = count * channels * side * side, free_memory_bytes()
    if free is not None and needed > free:
        raise DataError(
            f"{name}: {count:,} images of {channels} x {side} x {side} take {bytes_text(needed)} of memory, and "
            f"{bytes_text(free)} are free; take fewer (--train_size, --test_size), or a smaller --model_size"
        )


def mean_and_deviation(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of the pixels of each channel in 0..1, from counts of the 256 values: exact, and the same on every machine."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.zeros(images.shape[1], 256, dtype=torch.int64)
    for some in images.split(COUNTED_AT_ONCE):
        for channel, plane in enumerate(some.unbind(1)):
            counts[channel] += torch.bincount(plane.flatten(), minlength=256)
    parts = counts.double() / counts.sum(1, keepdim=True)
    means = parts @ levels
    deviations = [float((part * (levels - mean) ** 2).sum().sqrt()) for part, mean in zip(parts, means, strict=True)]
    # of one colour alone there is no deviation
    return tuple(round(mean, 4) for mean in means.tolist()), tuple(round(each, 4) or 1.0 for each in deviations)
