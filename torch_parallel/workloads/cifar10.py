"""CIFAR-10: 50,000 training and 10,000 test colour images [3, 32, 32] in ten classes (Krizhevsky, 2009).

Read by torchvision, which checks the md5 of every file first. That matters here: the files are pickles, and unpickling
a file that someone else made may run any code.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_parallel.workloads.dataset import DataError, DataNotFound, Dataset
from torch_parallel.workloads.download import fetch, has_md5

UNPACKED = "cifar-10-batches-py"


def load_cifar10(folders: Sequence[Path]) -> Dataset:
    """CIFAR-10 from the first of `folders` that has it, else downloaded (170 MB) to `folders[0]/cifar10`.

    Looks for `cifar-10-batches-py/`, then for the archive `cifar-10-python.tar.gz`, which is unpacked where it lies;
    each in the folder's `cifar10/` and in the folder itself. Raises DataNotFound if there is none, and DataError, one
    line that names the file or folder, if it is damaged.
    """
    place = _find(folders) or _download(folders)
    train_inputs, train_targets = _read_part(place, train=True)
    test_inputs, test_targets = _read_part(place, train=False)
    return Dataset(
        name="cifar10",
        train_inputs=train_inputs,
        train_targets=train_targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
        class_count=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        source=str(place / UNPACKED),
    )


def _find(folders: Sequence[Path]) -> Path | None:
    """The first place that has the unpacked folder, else the first that has the archive, then unpacked."""
    from torchvision.datasets import CIFAR10

    places = [place for folder in folders for place in (folder / "cifar10", folder)]
    for place in places:
        if os.path.isdir(place / UNPACKED):
            return place
    for place in places:
        if os.path.isfile(place / CIFAR10.filename):
            _unpack(place / CIFAR10.filename)
            return place
    return None


def _download(folders: Sequence[Path]) -> Path:
    from torchvision.datasets import CIFAR10

    place = folders[0] / "cifar10"
    try:
        fetch([CIFAR10.url], place / CIFAR10.filename, CIFAR10.tgz_md5)
    except DataNotFound as error:
        looked_in = ", ".join(map(str, folders))
        raise DataNotFound(f"CIFAR-10 was neither found in {looked_in} nor downloadable: {error}") from error
    _unpack(place / CIFAR10.filename)
    return place


def _unpack(archive: Path) -> None:
    """Unpacks beside the archive, under another name until complete, so that no other job sees half of it."""
    from torchvision.datasets import CIFAR10

    if not has_md5(archive, CIFAR10.tgz_md5):
        raise _damaged(archive, f"its md5 is not {CIFAR10.tgz_md5}")
    try:
        with tempfile.TemporaryDirectory(dir=archive.parent, prefix="unpacking-") as folder:
            with tarfile.open(archive) as content:
                content.extractall(folder, filter="data")
            _rename(Path(folder) / UNPACKED, archive.parent / UNPACKED)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{archive} cannot be unpacked: {getattr(error, 'strerror', None) or error}") from error


def _rename(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():  # else another job was faster
            raise


def _read_part(place: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Images [n, 3, 32, 32] uint8 and labels [n] int64."""
    from torchvision.datasets import CIFAR10

    try:
        with warnings.catch_warnings():
            # The pickles date from Python 2; numpy 2.4.0 to 2.4.4 warn of how they spell a dtype.
            warnings.filterwarnings("ignore", message=r"dtype\(\): align")
            part = CIFAR10(str(place), train=train, download=False)
    except (RuntimeError, OSError) as error:
        names = [name for name, _ in CIFAR10.train_list + CIFAR10.test_list] + [CIFAR10.meta["filename"]]
        missing = [name for name in names if not os.path.isfile(place / UNPACKED / name)]
        what = f"it lacks {', '.join(missing)}" if missing else "a file in it does not have the md5 it should have"
        raise _damaged(place / UNPACKED, what) from error
    # torchvision turns each image to [H, W, C] by a view; turned back, the tensor is contiguous without a copy.
    return torch.from_numpy(part.data).permute(0, 3, 1, 2), torch.tensor(part.targets, dtype=torch.int64)


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} cannot be used: {what}; delete it to have it downloaded, or take --dataset digits")
