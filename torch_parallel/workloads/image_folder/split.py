"""A tenth of the images for testing, drawn by a seed, class by class.

Files of the same bytes stay on one side. A model that was trained on a test image knows it by heart, and the accuracy
would say so of all images.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.image_folder.listing import Part

TEST_PART = 0.1


def split(part: Part, seed: int) -> tuple[Part, Part, list[str]]:
    """For training, for testing, and what there is to say.

    Of each class with two different images or more at least one is for testing, and at least one for training. Raises
    DataError where no class has two.
    """
    groups = groups_of_equals(part.files)
    by_class: dict[int, list[list[int]]] = defaultdict(list)
    for group in groups:
        by_class[part.targets[group[0]]].append(group)
    generator = torch.Generator().manual_seed(seed)
    tested: set[int] = set()
    for number in sorted(by_class):
        of_class = by_class[number]
        order = torch.randperm(len(of_class), generator=generator).tolist()
        for index in order[: _test_count(len(of_class))]:
            tested.update(of_class[index])
    if not tested:
        raise DataError(
            f"{part.files[0].parent.parent} has one image a class, and none is left for testing; two different ones of "
            "a class at least are wanted"
        )
    places = range(len(part))
    train, test = (part.at([place for place in places if (place in tested) == which]) for which in (False, True))
    return train, test, _notes(part, groups)


def in_both(train: Part, test: Part) -> int:
    """How many files of `test` have the bytes of one of `train`."""
    groups = groups_of_equals([*train.files, *test.files])
    return sum(sum(place >= len(train) for place in group) for group in groups if group[0] < len(train))


def groups_of_equals(files: Sequence[Path]) -> list[list[int]]:
    """The places of files of the same bytes, group by group, in the order of their first ones.

    Only files of the same size are read.
    """
    by_size: dict[int, list[int]] = defaultdict(list)
    for place, file in enumerate(files):
        by_size[file.stat().st_size].append(place)
    groups: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for size, places in by_size.items():
        for place in places:
            groups[size, _digest(files[place]) if len(places) > 1 else b""].append(place)
    return sorted(groups.values())


def _digest(file: Path) -> bytes:
    try:
        with open(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}; make it readable, or remove it") from error


def _test_count(groups: int) -> int:
    """Of the images of a class, which are different."""
    return max(1, round(groups * TEST_PART)) if groups > 1 else 0


def _notes(part: Part, groups: list[list[int]]) -> list[str]:
    copies = sum(len(group) - 1 for group in groups)
    torn = sum(len({part.targets[place] for place in group}) > 1 for group in groups)
    notes = [f"files that are copies of others, on the same side: {copies:,}"] if copies else []
    return notes + ([f"images in several classes: {torn:,}"] if torn else [])
