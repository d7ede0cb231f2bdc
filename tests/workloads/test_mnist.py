"""MNIST: the IDX reader by hand, damage, where it is looked for, and the download, with small files made here."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torch_parallel.workloads import DataError, load_dataset
from torch_parallel.workloads.mnist import FILES, load_mnist, read_idx

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = FILES
REAL_FOLDER = os.environ.get("TORCH_PARALLEL_DATA", "")  # read before the fixture below hides it


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No ./data, no folder in the environment, and a host that refuses every download."""
    from torchvision.datasets import MNIST

    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("TORCH_PARALLEL_DATA", raising=False)
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:1/"])


def idx(values: torch.Tensor) -> bytes:
    """`values` in the IDX format."""
    header = struct.pack(f">{1 + values.dim()}I", 0x0800 + values.dim(), *values.shape)
    return header + bytes(values.flatten().tolist())


def made_files(train_count: int = 12, test_count: int = 5) -> dict[str, bytes]:
    """The four files, unpacked: image i is filled with i and has label i % 10."""
    contents = {}
    for count, images, labels in ((train_count, TRAIN_IMAGES, TRAIN_LABELS), (test_count, TEST_IMAGES, TEST_LABELS)):
        contents[images] = idx(torch.arange(count).reshape(-1, 1, 1).expand(-1, 28, 28))
        contents[labels] = idx(torch.arange(count) % 10)
    return contents


def make_mnist(place: Path, packed: bool = True, train_count: int = 12, without: str = "") -> Path:
    place.mkdir(parents=True, exist_ok=True)
    for name, content in made_files(train_count).items():
        if name != without:
            (place / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return place


def test_read_idx_by_hand(tmp_path: Path) -> None:
    content = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 253, 254, 255])
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    for name in ("plain", "packed.gz"):
        values = read_idx(tmp_path / name, 2)
        assert values.dtype == torch.uint8 and values.tolist() == [[1, 2, 3], [253, 254, 255]]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
def test_every_layout_is_found(tmp_path: Path, place: str, packed: bool) -> None:
    made = make_mnist(tmp_path / "folder" / place, packed)
    dataset, line = load_dataset(None, str(tmp_path / "folder"), None, seed=0)
    assert line == f"mnist from {made}"
    assert dataset.train_inputs.shape == (12, 1, 28, 28) and dataset.test_inputs.shape == (5, 1, 28, 28)
    assert dataset.train_inputs[:, 0, 27, 27].tolist() == list(range(12))
    assert dataset.train_targets.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert dataset.train_targets.dtype == torch.int64
    assert dataset.image_shape == (1, 28, 28)


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_PARALLEL_DATA", str(tmp_path / "variable"))
    (tmp_path / "argument").mkdir()
    places = [Path("data/mnist"), tmp_path / "variable" / "mnist", tmp_path / "argument" / "mnist"]
    for count, place in enumerate(places, start=20):  # each that is made goes before those made so far
        make_mnist(place, train_count=count)
        dataset, line = load_dataset("mnist", str(tmp_path / "argument"), None, seed=0)
        assert len(dataset.train_inputs) == count and line == f"mnist from {place}"


def test_train_size_is_said(tmp_path: Path) -> None:
    made = make_mnist(tmp_path / "mnist")
    dataset, line = load_dataset(None, str(tmp_path), 7, seed=0)
    assert line == f"mnist from {made}; 7 of 12 training samples"
    assert torch.equal(dataset.train_inputs[:, 0, 0, 0] % 10, dataset.train_targets) and len(dataset.train_targets) == 7


@pytest.mark.parametrize("name", FILES)
def test_one_of_four_missing_is_named(tmp_path: Path, name: str) -> None:
    made = make_mnist(tmp_path / "mnist", without=name)
    with pytest.raises(DataError, match=rf"neither found in .* \({made} lacks {name}.gz\) nor downloadable"):
        load_dataset("mnist", str(tmp_path), None, seed=0)
    dataset, line = load_dataset(None, str(tmp_path), None, seed=0)
    assert dataset.name == "digits" and f"lacks {name}.gz" in line
    make_mnist(Path("data/mnist"))
    assert load_dataset(None, str(tmp_path), None, seed=0)[1] == f"mnist from data/mnist ({made} lacks {name}.gz)"


def named(place: Path, rename: Callable[[str], str], packed: bool = True) -> Path:
    make_mnist(place, packed)
    for file in list(place.iterdir()):
        file.rename(place / rename(file.name))
    return place


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("-idx", ".idx"),  # as some archives have it
        lambda name: name.upper(),
        lambda name: name.replace("-", "_"),
        lambda name: name.removesuffix(".gz"),  # packed, and not called so
    ],
)
@pytest.mark.parametrize("place", ["mnist", "MNIST", "."])
def test_names_that_mean_the_same_are_read(
    place: str, rename: Callable[[str], str], packed: bool, tmp_path: Path
) -> None:
    made = named(tmp_path / "folder" / place, rename, packed)
    dataset, line = load_dataset("mnist", str(tmp_path / "folder"), None, seed=0)
    assert line == f"mnist from {made}"
    assert dataset.train_inputs[:, 0, 0, 0].tolist() == list(range(12))


def test_a_browser_may_have_unpacked_what_is_still_called_gz(tmp_path: Path) -> None:
    named(tmp_path, lambda name: f"{name}.gz", packed=False)
    assert load_dataset("mnist", str(tmp_path), None, seed=0)[0].test_targets.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([TRAIN_IMAGES.upper(), TRAIN_IMAGES.replace("-idx", ".idx")],
         rf"{TRAIN_IMAGES}.gz \(nearly: {TRAIN_IMAGES.upper()} and train-images.idx3-ubyte\)"),
        (["train-images-idx3-ubyte (1).gz"], rf"{TRAIN_IMAGES}.gz \(nearly: train-images-idx3-ubyte \(1\).gz\)"),
        (["train-image-idx3-ubyte"], rf"{TRAIN_IMAGES}.gz \(nearly: train-image-idx3-ubyte\)"),
    ],
)  # fmt: skip
def test_what_is_nearly_there_is_named(made: list[str], said: str, tmp_path: Path) -> None:
    """Two that mean the same are not chosen between."""
    for name in made:
        (tmp_path / name).write_bytes(b"x")
    others = f", {TRAIN_LABELS}.gz, {TEST_IMAGES}.gz, {TEST_LABELS}.gz"
    with pytest.raises(DataError, match=rf"neither found in .* \({tmp_path} lacks {said}{others}\) nor download"):
        load_dataset("mnist", str(tmp_path), None, seed=0)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda packed: b"", "it ends after 0 bytes"),
    "not gzip": (lambda packed: b"<html>404</html>", "Not a gzipped file"),
    "truncated": (lambda packed: packed[: len(packed) // 2], "ended before the end-of-stream marker"),
    "truncated in the checksum": (lambda packed: packed[:-6], "ended before the end-of-stream marker"),
    "damaged checksum": (lambda packed: packed[:-8] + bytes(8), "CRC check failed"),
    "damaged middle": (lambda packed: packed[:10] + b"\xff" * 20 + packed[30:], "Error -3 while decompressing"),
    "short header": (lambda packed: gzip.compress(gzip.decompress(packed)[:6]), "it ends after 6 bytes"),
    "short content": (
        lambda packed: gzip.compress(gzip.decompress(packed)[:-1]),
        "28 x 28 bytes, and 9407 follow|11 f",
    ),
    "long content": (lambda packed: gzip.compress(gzip.decompress(packed) + b"0"), "and 9409 follow|13 follow"),
    "wrong magic": (
        lambda packed: gzip.compress(b"\0\0\x0d" + gzip.decompress(packed)[3:]),
        "magic number is 0x00000d0",
    ),
    "no samples": (lambda packed: gzip.compress(idx(torch.zeros(0, 28, 28))), "its header says 0 x 28 x 28|magic"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", [TRAIN_IMAGES, TRAIN_LABELS])
def test_a_damaged_file_is_one_line_and_never_passed_over(tmp_path: Path, file: str, damage: str) -> None:
    path = make_mnist(tmp_path / "mnist") / f"{file}.gz"
    make, expected = DAMAGES[damage]
    path.write_bytes(make(path.read_bytes()))
    make_mnist(Path("data/mnist"))  # a sound one further on does not hide it
    for name in (None, "mnist"):
        with pytest.raises(DataError, match=f"^{path} cannot be used: .*({expected}).*; delete it.*digits$") as error:
            load_dataset(name, str(tmp_path), None, seed=0)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        (TRAIN_LABELS, torch.full((12,), 10), "a label 10, and labels go from 0 to 9"),
        (TRAIN_LABELS, torch.zeros(11), "11 labels for the 12 images of train-images-idx3-ubyte.gz"),
        (TEST_IMAGES, torch.zeros(5, 8, 9), "8 x 9 pixels instead of 28 x 28"),
    ],
)
def test_files_that_do_not_fit_together(tmp_path: Path, name: str, values: torch.Tensor, expected: str) -> None:
    path = make_mnist(tmp_path) / f"{name}.gz"
    path.write_bytes(gzip.compress(idx(values.to(torch.uint8))))
    with pytest.raises(DataError, match=f"^{path} cannot be used: .*{expected}"):
        load_mnist([tmp_path])


def make_mirror(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A mirror of made files, reached through a file:// address; test_download.py has a server."""
    from torchvision.datasets import MNIST

    make_mnist(folder)
    md5s = [(f"{name}.gz", hashlib.md5((folder / f"{name}.gz").read_bytes()).hexdigest()) for name in FILES]
    monkeypatch.setattr(MNIST, "resources", md5s)
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:1/", folder.as_uri() + "/"])


@pytest.mark.parametrize("given", ["argument", "variable", "data"])
def test_download_goes_to_the_first_folder_and_happens_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    make_mirror(monkeypatch, tmp_path / "mirror")
    (tmp_path / "argument").mkdir()
    if given == "variable":
        monkeypatch.setenv("TORCH_PARALLEL_DATA", str(tmp_path / "variable"))
    folder = Path("data") if given == "data" else tmp_path / given
    for _ in range(2):
        dataset, line = load_dataset(None, str(folder) if given == "argument" else None, None, seed=0)
        assert line == f"mnist from {folder / 'mnist'}" and len(dataset.train_inputs) == 12
        monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", [])  # the second time no one is asked
    assert sorted(path.name for path in (folder / "mnist").iterdir()) == sorted(f"{name}.gz" for name in FILES)


def test_download_completes_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mirror(monkeypatch, tmp_path / "mirror")
    make_mnist(Path("data/mnist"), without=TEST_LABELS)
    (tmp_path / "mirror" / f"{TRAIN_IMAGES}.gz").unlink()  # it is there already, and not asked for again
    assert len(load_mnist([Path("data")]).test_targets) == 5


def test_a_mirror_with_other_files_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mirror(monkeypatch, tmp_path / "mirror")
    (tmp_path / "mirror" / f"{TRAIN_IMAGES}.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: what came has md5 .* instead of "):
        load_dataset("mnist", None, None, seed=0)
    assert list(Path("data/mnist").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mirror(monkeypatch, tmp_path / "mirror")
    Path("data").touch()
    with pytest.raises(DataError, match=r"nor downloadable: data/mnist cannot be written: .*--dataset digits$"):
        load_dataset("mnist", None, None, seed=0)
    dataset, line = load_dataset(None, None, None, seed=0)
    assert dataset.name == "digits" and "data/mnist cannot be written" in line


def test_the_real_one_where_there_is_one(tmp_path: Path) -> None:
    """With TORCH_PARALLEL_DATA naming a folder with MNIST: that; else the made files take its place."""
    real = any((Path(REAL_FOLDER) / "mnist" / f"{TRAIN_IMAGES}{end}").is_file() for end in ("", ".gz"))
    folder = Path(REAL_FOLDER) if REAL_FOLDER and real else make_mnist(tmp_path / "mnist").parent
    dataset = load_mnist([folder])
    counts = (60_000, 10_000) if folder != tmp_path else (12, 5)
    assert (len(dataset.train_inputs), len(dataset.test_inputs)) == counts
    if folder != tmp_path:
        assert dataset.train_targets[:5].tolist() == [5, 0, 4, 1, 9]
        fed = dataset.normalize(dataset.train_inputs, torch.float32)
        assert abs(fed.mean().item()) < 1e-3 and abs(fed.std().item() - 1) < 1e-3
