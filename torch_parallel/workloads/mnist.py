"""MNIST: 60,000 training and 10,000 test images [1, 28, 28] of handwritten digits (LeCun, Cortes and Burges, 1998).

Four files in the IDX format, gzipped or not. IDX is a header of big-endian 32-bit numbers, then the bytes:

    magic number        0x0800 + number of dimensions (0x08: unsigned bytes)
    one size a dimension
    the values, last dimension fastest

Read here in 20 lines rather than with torchvision, whose import takes longer than reading MNIST does.
"""

from __future__ import annotations

import difflib
import gzip
import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_parallel.workloads.dataset import DataError, DataNotFound, Dataset
from torch_parallel.workloads.download import fetch

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CLASS_COUNT = 10
IMAGE_SIZE = (28, 28)


def load_mnist(folders: Sequence[Path]) -> Dataset:
    """MNIST from the first of `folders` that has all of it, else downloaded to `folders[0]/mnist`.

    Looks for `mnist/`, for torchvision's `MNIST/raw/`, and for the files in the folder itself. Names that mean the same
    are taken too: in capitals, or with dots for dashes as in `train-images.idx3-ubyte`. Raises DataNotFound if there is
    none, naming what is nearly one, and DataError, one line that names the file, if one of the four is damaged.
    """
    files, lacking = _find(folders)
    note = f" ({'; '.join(lacking)})" if lacking else ""
    if files is None:
        try:
            files = _download(folders[0] / "mnist")
        except DataNotFound as error:
            places = ", ".join(map(str, folders))
            raise DataNotFound(f"MNIST was neither found in {places}{note} nor downloadable: {error}") from error
    train_inputs, train_targets = _read_part(*files[:2])
    test_inputs, test_targets = _read_part(*files[2:])
    return Dataset(
        name="mnist",
        train_inputs=train_inputs,
        train_targets=train_targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
        class_count=CLASS_COUNT,
        mean=(0.1307,),
        std=(0.3081,),
        source=f"{files[0].parent}{note}",
    )


def _find(folders: Sequence[Path]) -> tuple[list[Path] | None, list[str]]:
    """The four files of the first complete place, in the order of FILES, and what incomplete places before it lack."""
    lacking: list[str] = []
    places = [folder / below for folder in folders for below in ("mnist", "MNIST/raw", "MNIST", "mnist/raw", "raw", "")]
    for place in places:
        names = _names(place)
        paths = [_existing(place, name, names) for name in FILES]
        found = [path for path in paths if path]
        if len(found) == len(FILES):
            return found, lacking
        missing = [_missing(name, names) for name, path in zip(FILES, paths, strict=True) if not path]
        if found or any("nearly" in each for each in missing):
            lacking.append(f"{place} lacks {', '.join(missing)}")
    return None, lacking


def _names(place: Path) -> list[str]:
    try:
        return sorted(os.listdir(place))
    except OSError:  # it is not there, is no folder, or may not be read
        return []


def _existing(place: Path, name: str, names: Sequence[str]) -> Path | None:
    """`name`.gz or `name`, the first that is a file: gzip first, because it carries a checksum. Else the only file
    whose name means the same."""
    alike = [each for each in names if _plain(each) == name and os.path.isfile(place / each)]
    exact = [each for each in (f"{name}.gz", name) if each in alike]
    chosen = exact[:1] or (alike if len(alike) == 1 else [])
    return place / chosen[0] if chosen else None


def _plain(name: str) -> str:
    """The name of FILES that it means: without .gz, in small letters, with dashes for dots and underscores."""
    return name.lower().removesuffix(".gz").replace(".", "-").replace("_", "-")


def _missing(name: str, names: Sequence[str]) -> str:
    near = [each for each in names if difflib.get_close_matches(_plain(each), FILES, 1, 0.8) == [name]]
    return f"{name}.gz" + (f" (nearly: {' and '.join(near)})" if near else "")


def _download(place: Path) -> list[Path]:
    """Fetches what `place` lacks of the four files; they are in the order of FILES."""
    from torchvision.datasets import MNIST  # here, because the import takes 2 s

    for name, md5 in MNIST.resources:
        fetch([f"{mirror}{name}" for mirror in MNIST.mirrors], place / name, md5)
    return [place / f"{name}.gz" for name in FILES]


def _read_part(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 28, 28] uint8 and labels [n] int64, checked against each other."""
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if tuple(images.shape[1:]) != IMAGE_SIZE:
        raise _damaged(images_path, f"its images are {images.shape[1]} x {images.shape[2]} pixels instead of 28 x 28")
    if len(labels) != len(images):
        raise _damaged(labels_path, f"it has {len(labels)} labels for the {len(images)} images of {images_path.name}")
    if int(labels.max()) >= CLASS_COUNT:
        raise _damaged(labels_path, f"it has a label {int(labels.max())}, and labels go from 0 to {CLASS_COUNT - 1}")
    return images.unsqueeze(1), labels.long()


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The values of an IDX file of unsigned bytes (uint8), in the shape that its header gives.

    Raises DataError, one line that names the file, if it cannot be read, has another magic number (so another type or
    number of `dimensions`), is empty, or is shorter or longer than its header says.
    """
    content = _content(path)
    header_bytes = 4 + 4 * dimensions
    if len(content) < header_bytes:
        raise _damaged(path, f"it ends after {len(content)} bytes, and its header alone has {header_bytes}")
    magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
    if magic != 0x0800 + dimensions:
        raise _damaged(path, f"its magic number is 0x{magic:08x} instead of 0x{0x0800 + dimensions:08x}")
    if len(content) - header_bytes != math.prod(shape) or not math.prod(shape):
        sizes = " x ".join(map(str, shape))
        raise _damaged(path, f"its header says {sizes} bytes, and {len(content) - header_bytes} follow")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header_bytes).reshape(shape)


def _content(path: Path) -> bytearray:
    """All bytes of a file, unpacked if it is packed, as its beginning tells, or else its name; a bytearray, so that a
    tensor may lie on it."""
    try:
        with path.open("rb") as file:
            beginning = file.read(3)
        is_packed = beginning[:2] == b"\x1f\x8b" or (path.suffix.lower() == ".gz" and beginning != b"\0\0\x08")
        with gzip.open(path) if is_packed and beginning else path.open("rb") as opened:
            return bytearray(opened.read())
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, getattr(error, "strerror", None) or str(error)) from error


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} cannot be used: {what}; delete it to have it downloaded, or take --dataset digits")
