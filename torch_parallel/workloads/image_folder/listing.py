"""Which images lie in a folder, and of which classes they are.

    flowers/rose/1.jpg              or      flowers/train/rose/1.jpg
    flowers/tulip/a/2.png                   flowers/test/rose/7.jpg

A sub-folder is a class, with all that lies below it. What a system leaves there unasked, hidden files and lists of
thumbnails, is passed over; any other file is an image, or is told: a sample that is lost in silence is never missed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_parallel.workloads.errors import DataError

TRAINS, TESTS = ("train", "training"), ("test", "testing", "val", "valid", "validation", "dev", "eval")
LEFT_BY_SYSTEMS = ("thumbs.db", "desktop.ini", "__macosx")
LAYOUT = "one sub-folder a class is wanted, with its images, or train/ and test/ with these"


@dataclass(frozen=True)
class Part:
    """Files and their classes, numbers in the order of the classes' names."""

    files: list[Path] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.files)

    def at(self, places: Sequence[int]) -> Part:
        """The same of some places."""
        return Part([self.files[place] for place in places], [self.targets[place] for place in places])


@dataclass(frozen=True)
class Listing:
    """What a folder holds; without a part for testing where it has none of its own."""

    classes: tuple[str, ...]
    train: Part
    test: Part | None
    notes: tuple[str, ...] = ()


def find_folder(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder of that path or, below one of `folders`, of that name. Raises DataError where it is a file."""
    given = Path(name).expanduser()
    for place in (given, *(folder / given for folder in folders)) if name else ():
        if os.path.isdir(place):
            return place
        if os.path.exists(place):
            raise DataError(f"--dataset {name}: {place} is a file; for images a folder is wanted: {LAYOUT}")
    return None


def list_images(folder: Path) -> Listing:
    """Raises DataError, one line that names the file or folder, for what is no such folder."""
    below = {each.name.lower(): each for each in _folders(folder)}
    train, test = (next((below[name] for name in names if name in below), None) for names in (TRAINS, TESTS))
    if train is not None and test is not None:
        return _of_parts(folder, train, test)
    if train is not None and len(below) == 1 and _folders(train):
        raise DataError(
            f"{folder} has {train.name}/, and no folder for testing; give {train}, of which a tenth is then drawn for "
            "testing, or put test/ beside it"
        )
    if below and below.keys() <= {*TRAINS, *TESTS} and any(map(_folders, below.values())):
        names = ", ".join(f"{each.name}/" for each in below.values())
        raise DataError(f"{folder} has {names}, and none of them is train/; name the part for training so")
    classes = _classes(folder)
    _check_several(folder, classes)
    return Listing(tuple(classes), _part(classes), None, _beside(folder, len(classes)))


def _of_parts(folder: Path, train: Path, test: Path) -> Listing:
    """Parts that somebody has made: they have the same classes."""
    train_classes, test_classes = _classes(train), _classes(test)
    for more, less, where in ((train_classes, test_classes, test), (test_classes, train_classes, train)):
        lacking = [name for name in more if name not in less]
        if lacking:
            raise DataError(
                f"{where} has no folder {lacking[0]}, and {(train if where == test else test).name}/ has one; both "
                "parts must have the same classes, by the same names"
            )
    _check_several(train, train_classes)
    return Listing(tuple(train_classes), _part(train_classes), _part(test_classes), _beside(folder, 2))


def _beside(folder: Path, used: int) -> tuple[str, ...]:
    others = len(_entries(folder)) - used
    return (f"{others} other file{'s' * (others != 1)} or folder{'s' * (others != 1)} beside not used",) * (others > 0)


def _part(classes: dict[str, list[Path]]) -> Part:
    both = [(file, number) for number, files in enumerate(classes.values()) for file in files]
    return Part([file for file, _ in both], [number for _, number in both])


def _classes(folder: Path) -> dict[str, list[Path]]:
    """Files by class, both in the order of their names, one file at least."""
    places = _folders(folder)
    if not places:
        raise DataError(f"{folder} has no sub-folder; {LAYOUT}")
    classes = {place.name: list(_files(place, set())) for place in places}
    for place in places:
        if not classes[place.name]:
            raise DataError(f"{place} has no image, and is a class; put its images there, or remove the folder")
    return classes


def _check_several(folder: Path, classes: dict[str, list[Path]]) -> None:
    if len(classes) == 1:
        only = folder / next(iter(classes))
        nested = f"; if its sub-folders are the classes, give {only}" if _folders(only) else ""
        raise DataError(f"{folder} has one class only, {only.name}; two classes at least are wanted{nested}")


def _files(place: Path, seen: set[str]) -> Iterator[Path]:
    """All files below, links followed, no folder twice: a link may lead to where it came from."""
    real = os.path.realpath(place)
    if real in seen:
        return
    seen.add(real)
    for entry in _entries(place):
        if os.path.isdir(entry):
            yield from _files(entry, seen)
        elif os.path.isfile(entry):
            yield entry
        else:
            what = "a link to nothing" if os.path.islink(entry) else "no file"
            raise DataError(f"{entry} is {what}, and no image; remove it")


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in _entries(folder) if os.path.isdir(entry)]


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, in the order of the bytes of the names, which is the same on every machine."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read: {error.strerror or error}; choose a folder that you may read"
        ) from error
    shown = [name for name in names if not name.startswith(".") and name.lower() not in LEFT_BY_SYSTEMS]
    return [folder / name for name in sorted(shown, key=os.fsencode)]
