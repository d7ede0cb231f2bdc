"""Every data set, by name, and how a run comes by its data.

Called once, in the process that starts the workers, before it starts them: only this touches files and network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch_parallel.workloads.cifar10 import load_cifar10
from torch_parallel.workloads.dataset import DataError, DataNotFound, Dataset
from torch_parallel.workloads.digits import load_digits
from torch_parallel.workloads.image_folder import find_folder, load_image_folder
from torch_parallel.workloads.mnist import load_mnist
from torch_parallel.workloads.synthetic import is_synthetic, load_synthetic

# A loader is given the folders to look in; a download goes to the first. It raises DataNotFound if there is nothing.
DATASETS: dict[str, Callable[[Sequence[Path]], Dataset]] = {
    "mnist": load_mnist,
    "cifar10": load_cifar10,
    "digits": load_digits,
    "synthetic": load_synthetic,
}

FOLDER_VARIABLE = "TORCH_PARALLEL_DATA"
DEFAULT_FOLDER = Path("data")
REMEDY = f"name a folder that has it (--data_dir, or {FOLDER_VARIABLE} in the environment), or take --dataset digits"


def load_dataset(
    name: str | None,
    data_dir: str | None,
    train_size: int | None,
    seed: int,
    test_size: int | None = None,
    side: int | None = None,
) -> tuple[Dataset, str]:
    """The data of a run, and one line that says which it is and where it came from.

    Without a `name`: MNIST if it can be had, else digits, and the line says why. Looks in `data_dir`, in the folder
    that the environment variable TORCH_PARALLEL_DATA names, and in ./data; a download goes to the first of these that
    is given. `train_size` and `test_size` keep that many samples, drawn by `seed`; of synthetic data they are made.

    A name that is none of DATASETS is a folder of images, one sub-folder a class, or the name of one below the folders
    above: see `load_image_folder`. Its images are made `side` pixels wide and high (default 64).

    Raises DataError, one line with the remedies: unknown name, no such folder, data that can neither be found nor
    downloaded, a damaged file (never passed over for other data), a size that is not in 1..n.
    """
    folders = search_folders(data_dir)
    if name is not None and is_synthetic(name):
        synthetic = load_synthetic((), name, train_size, test_size)
        return synthetic, f"{synthetic.name} from {synthetic.source}"
    if name is not None and name not in DATASETS and (folder := _image_folder(name, folders)):
        return load_image_folder(folder, side, seed, train_size, test_size)
    dataset = _load_default(folders) if name is None else _load_named(name, folders)
    line = f"{dataset.name} from {dataset.source}"
    if train_size is not None:
        line += f"; {train_size} of {len(dataset.train_targets)} training samples"
    if test_size is not None:
        line += f"; {test_size} of {len(dataset.test_targets)} test samples"
    return dataset.subset(train_size, seed, test_size), line


def search_folders(data_dir: str | None) -> list[Path]:
    """Where to look for data, first to last. Raises DataError if `data_dir` is given and is no folder."""
    named = [folder for folder in (data_dir, os.environ.get(FOLDER_VARIABLE)) if folder]
    if data_dir and not os.path.isdir(_path_of(data_dir)):
        raise DataError(f"--data_dir {data_dir}: there is no such folder; create it to have data downloaded there")
    return list(dict.fromkeys([*map(_path_of, named), DEFAULT_FOLDER]))


def _path_of(folder: str) -> Path:
    """`~` expanded; in UTF-8 where the locale's encoding has not all its characters."""
    try:
        os.fsencode(folder)
    except UnicodeEncodeError:
        folder = os.fsdecode(folder.encode("utf-8", "surrogateescape"))
    return Path(folder).expanduser()


def _image_folder(name: str, folders: Sequence[Path]) -> Path | None:
    return find_folder(str(_path_of(name)) if name else "", folders)


def _load_named(name: str, folders: Sequence[Path]) -> Dataset:
    if name not in DATASETS:
        known = ", ".join(DATASETS)
        raise DataError(
            f"there is no data set {name!r}; choose from {known}, or give the path of a folder of images, with one "
            "sub-folder a class"
        )
    try:
        return DATASETS[name](folders)
    except DataNotFound as error:
        raise DataError(f"{error}; {REMEDY}") from error


def _load_default(folders: Sequence[Path]) -> Dataset:
    try:
        return load_mnist(folders)
    except DataNotFound as error:
        digits = load_digits()
        return replace(digits, source=f"{digits.source}, because {error}")


__all__ = ["DATASETS", "DataError", "DataNotFound", "Dataset", "load_dataset", "search_folders"]
