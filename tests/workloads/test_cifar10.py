"""CIFAR-10 with small files in the real format: pickles as Python 2 wrote them, in a folder or in the archive."""

from __future__ import annotations

import hashlib
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from torch_parallel.workloads import DataError, load_dataset
from torch_parallel.workloads.cifar10 import UNPACKED, load_cifar10

BATCHES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
ROWS = 3  # images in each batch; the real ones have 10,000


class Python2Type:
    """Pickles as `np.dtype("u1", 0, 1)`: numbers for booleans, as in the real files. numpy 2.4.0 warns of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("u1", 0, 1)


class Python2Array:
    """Pickles as a uint8 array with a `Python2Type`."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.state = (1, values.shape, Python2Type(), False, values.tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        reconstruct = np.zeros(0).__reduce__()[0]
        return reconstruct, (np.ndarray, (0,), b"b"), self.state


def made_rows(batch: int) -> np.ndarray[Any, Any]:
    """[ROWS, 3072] bytes; a row is the red plane, then green, then blue, each row by row."""
    planes = np.zeros((ROWS, 3, 32, 32), dtype=np.uint8)
    planes[:, 0, 0, 1] = 10 * batch + np.arange(ROWS)
    planes[:, 2, 31, 0] = 200
    return planes.reshape(ROWS, -1)


def make_batches(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        content = {"data": Python2Array(made_rows(number)), "labels": [number, 9, 0]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}, protocol=2))


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made archive, whose md5s torchvision is told. No ./data, no variable, a host that refuses."""
    source = tmp_path / "source"
    make_batches(source / UNPACKED)
    with tarfile.open(source / CIFAR10.filename, "w:gz") as content:
        content.add(source / UNPACKED, UNPACKED)
    md5s = [[name, md5(source / UNPACKED / name)] for name in BATCHES]
    monkeypatch.setattr(CIFAR10, "train_list", md5s[:5])
    monkeypatch.setattr(CIFAR10, "test_list", md5s[5:])
    monkeypatch.setitem(CIFAR10.meta, "md5", md5(source / UNPACKED / "batches.meta"))
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(source / CIFAR10.filename))
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:1/cifar-10-python.tar.gz")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("TORCH_PARALLEL_DATA", raising=False)
    return source / str(CIFAR10.filename)


@pytest.mark.parametrize("place", [".", "cifar10"])
def test_the_unpacked_folder(tmp_path: Path, place: str) -> None:
    make_batches(tmp_path / "folder" / place / UNPACKED)
    dataset, line = load_dataset("cifar10", str(tmp_path / "folder"), None, seed=0)
    assert line == f"cifar10 from {tmp_path / 'folder' / place / UNPACKED}"
    assert dataset.train_inputs.shape == (15, 3, 32, 32) and dataset.test_inputs.shape == (3, 3, 32, 32)
    assert dataset.train_inputs.dtype == torch.uint8 and dataset.train_inputs.is_contiguous()
    assert dataset.train_inputs[:, 0, 0, 1].tolist() == [10 * batch + row for batch in range(5) for row in range(ROWS)]
    assert dataset.test_inputs[:, 2, 31, 0].tolist() == [200] * ROWS
    assert dataset.train_inputs.sum() == sum(made_rows(batch).sum(dtype=int) for batch in range(5))
    assert dataset.train_targets.tolist() == [0, 9, 0, 1, 9, 0, 2, 9, 0, 3, 9, 0, 4, 9, 0]
    assert dataset.test_targets.tolist() == [5, 9, 0]


@pytest.mark.parametrize("place", [".", "cifar10"])
def test_the_archive_is_unpacked_where_it_lies(tmp_path: Path, archive: Path, place: str) -> None:
    folder = tmp_path / "folder" / place
    folder.mkdir(parents=True)
    archive.rename(folder / archive.name)
    for _ in range(2):
        assert len(load_cifar10([tmp_path / "folder"]).train_inputs) == 15
    assert sorted(path.name for path in folder.iterdir()) == [UNPACKED, archive.name]


def test_download(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CIFAR10, "url", archive.as_uri())
    dataset, line = load_dataset("cifar10", None, None, seed=0)
    assert line == f"cifar10 from data/cifar10/{UNPACKED}" and len(dataset.train_inputs) == 15
    assert sorted(path.name for path in Path("data/cifar10").iterdir()) == [UNPACKED, archive.name]


def test_a_damaged_archive_is_named_and_not_unpacked(archive: Path) -> None:
    folder = Path("data")
    folder.mkdir()
    (folder / archive.name).write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(DataError, match=rf"^data/{archive.name} cannot be used: its md5 is not .*; delete it"):
        load_dataset("cifar10", None, None, seed=0)
    assert [path.name for path in folder.iterdir()] == [archive.name]


@pytest.mark.parametrize("end", [0, -100])
def test_an_archive_that_cannot_be_unpacked_leaves_nothing(
    archive: Path, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    folder = Path("data")
    folder.mkdir()
    (folder / archive.name).write_bytes(archive.read_bytes()[:end])
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(folder / archive.name))
    with pytest.raises(DataError, match=rf"^data/{archive.name} cannot be unpacked: "):
        load_dataset("cifar10", None, None, seed=0)
    assert [path.name for path in folder.iterdir()] == [archive.name]


def test_a_damaged_file_is_never_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    make_batches(Path("data") / UNPACKED)
    (Path("data") / UNPACKED / "test_batch").write_bytes(
        b"cos\n_exit\n(I3\ntR."
    )  # unpickled, it would end this process
    with pytest.raises(DataError, match=f"^data/{UNPACKED} cannot be used: a file in it does not have the md5"):
        load_dataset("cifar10", None, None, seed=0)


def test_a_missing_file_is_named() -> None:
    make_batches(Path("data") / UNPACKED)
    (Path("data") / UNPACKED / "data_batch_4").unlink()
    with pytest.raises(DataError, match=f"^data/{UNPACKED} cannot be used: it lacks data_batch_4; delete it"):
        load_dataset("cifar10", None, None, seed=0)
