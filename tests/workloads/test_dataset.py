"""The Dataset itself, digits, and what load_dataset promises whatever the data set."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy
import pytest
import torch

from torch_parallel.workloads import DATASETS, DataError, Dataset, load_dataset
from torch_parallel.workloads import digits as digits_module
from torch_parallel.workloads.data import search_folders


def made_dataset(inputs: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Dataset:
    targets = torch.arange(len(inputs))
    return Dataset("made", inputs, targets, inputs[:1], targets[:1], len(inputs), mean, std, source="this test")


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No ./data, no folder in the environment, and a host that refuses every download."""
    from torchvision.datasets import CIFAR10, MNIST

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("TORCH_PARALLEL_DATA", raising=False)
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:1/"])
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:1/cifar-10-python.tar.gz")


def test_normalize_by_hand() -> None:
    pixels = torch.tensor([[[[0, 51]], [[255, 102]]]], dtype=torch.uint8)  # 1 image, 2 channels, 1 x 2 pixels
    dataset = made_dataset(pixels, mean=(0.2, 0.5), std=(0.1, 0.25))
    expected = torch.tensor([[[[-2.0, 0.0]], [[2.0, -0.4]]]], dtype=torch.float64)
    torch.testing.assert_close(dataset.normalize(pixels, torch.float64), expected, rtol=0, atol=1e-15)
    assert pixels.flatten().tolist() == [0, 51, 255, 102]  # the stored pixels are not touched
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        once_rounded = dataset.normalize(pixels, torch.float32).to(dtype)
        assert torch.equal(dataset.normalize(pixels, dtype), once_rounded)


def test_normalize_only_casts_floats() -> None:
    dataset = made_dataset(torch.rand(3, 1, 2, 2), mean=(0.5,), std=(0.1,))
    assert dataset.normalize(dataset.train_inputs, torch.float32) is dataset.train_inputs
    assert torch.equal(dataset.normalize(dataset.train_inputs, torch.float64), dataset.train_inputs.double())


def test_normalize_refuses_other_channels() -> None:
    dataset = made_dataset(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), mean=(0.5,) * 3, std=(0.1,) * 3)
    with pytest.raises(ValueError, match="zip"):
        dataset.normalize(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.float32)


def test_subset_is_seeded_without_repeats_and_keeps_pairs() -> None:
    inputs = torch.arange(100, dtype=torch.uint8).reshape(100, 1, 1, 1)
    dataset = made_dataset(inputs, mean=(0.5,), std=(0.1,))
    small = dataset.subset(30, seed=3)
    assert len(set(small.train_targets.tolist())) == 30
    assert torch.equal(small.train_inputs.flatten().long(), small.train_targets)  # each image still has its own label
    assert torch.equal(small.train_targets, dataset.subset(30, seed=3).train_targets)
    assert not torch.equal(small.train_targets, dataset.subset(30, seed=4).train_targets)
    assert torch.equal(small.test_inputs, dataset.test_inputs)
    assert torch.equal(dataset.subset(100, seed=3).train_inputs, inputs)


def test_subset_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    made_dataset(torch.zeros(9, 1, 1, 1), mean=(0.5,), std=(0.1,)).subset(5, seed=3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("train_size", [-1, 0, 101])
def test_subset_names_both_numbers(train_size: int) -> None:
    dataset = made_dataset(torch.zeros(100, 1, 1, 1), mean=(0.5,), std=(0.1,))
    with pytest.raises(DataError, match=f"train_size is {train_size}, but made has 100 "):
        dataset.subset(train_size, seed=0)


def test_digits() -> None:
    digits, line = load_dataset("digits", None, None, seed=0)
    assert line == "digits from scikit-learn's 8x8 digits"
    assert digits.image_shape == (1, 8, 8)
    assert (len(digits.train_inputs), len(digits.test_inputs)) == (1437, 360)
    assert digits.train_inputs.dtype == torch.uint8 and int(digits.train_inputs.max()) == 255
    fed = digits.normalize(digits.train_inputs, torch.float64)
    assert abs(fed.mean().item()) < 1e-3 and abs(fed.std().item() - 1) < 1e-3
    counts = torch.cat((digits.train_targets, digits.test_targets)).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # all 1,797, as UCI counts them


@pytest.mark.parametrize("found", [True, False])
def test_digits_are_those_of_scikit_learn(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its file, and, where that is not found, by its own function."""
    from sklearn.datasets import load_digits

    if not found:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    images, targets = digits_module._images_and_digits()
    theirs = load_digits()
    assert numpy.array_equal(images, theirs.images) and numpy.array_equal(targets, theirs.target)
    assert (images.dtype, targets.dtype) == (theirs.images.dtype, theirs.target.dtype)


def test_digits_split_is_the_same_in_every_run_and_disjoint() -> None:
    digits, other = DATASETS["digits"]([]), load_dataset("digits", None, None, seed=7)[0]
    assert torch.equal(digits.train_inputs, other.train_inputs) and torch.equal(digits.test_targets, other.test_targets)
    assert digits.test_targets[:8].tolist() == [7, 9, 4, 7, 0, 2, 6, 1]
    images = torch.cat((digits.train_inputs, digits.test_inputs)).flatten(1)
    assert len({tuple(image) for image in images.tolist()}) == 1797  # no image is there twice, so none is in both parts


def test_synthetic() -> None:
    synthetic, line = load_dataset("synthetic", None, None, seed=0)
    assert line.startswith("synthetic from random numbers: made up, nothing can be learnt from it")
    assert (synthetic.image_shape, synthetic.class_count) == ((3, 224, 224), 1000)
    assert (len(synthetic.train_inputs), len(synthetic.test_inputs)) == (1024, 128)
    assert synthetic.train_inputs.dtype == torch.uint8 and synthetic.train_inputs.is_contiguous()
    assert synthetic.train_inputs.nbytes == 154_140_672
    counts = torch.bincount(synthetic.train_inputs.flatten(), minlength=256)
    assert abs(counts / 602_112 - 1).max() < 0.01  # each value as often as any other: five deviations are 0.0064
    for targets in (synthetic.train_targets, synthetic.test_targets):
        assert targets.dtype == torch.int64 and int(targets.min()) >= 0 and int(targets.max()) < 1000
    assert len(synthetic.train_targets.unique()) > 600  # of 1,000: 641 are expected
    fed = synthetic.normalize(synthetic.test_inputs, torch.float32)
    assert abs(fed.mean().item()) < 1e-3 and abs(fed.std().item() - 1) < 1e-3


def test_synthetic_is_the_same_in_every_run_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again = DATASETS["synthetic"]([]), load_dataset("synthetic", None, None, seed=7)[0]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.train_inputs, again.train_inputs) and torch.equal(first.test_targets, again.test_targets)
    assert first.train_inputs[0, 0, 0, :4].tolist() == [47, 170, 196, 151]
    assert not Path("data").exists()


def test_without_a_name_and_without_network_it_is_digits_and_says_why() -> None:
    digits, line = load_dataset(None, None, 100, seed=0)
    assert digits.name == "digits" and len(digits.train_inputs) == 100 and len(digits.test_inputs) == 360
    assert "because MNIST was neither found in data nor downloadable: http://127.0.0.1:1/train-images" in line
    assert line.endswith("Connection refused; 100 of 1437 training samples") and "\n" not in line
    assert not Path("data").exists()  # a download that failed leaves no trace
    with pytest.raises(DataError, match=r"train_size is 5000, but digits has 1437 .*because MNIST was neither"):
        load_dataset(None, None, 5000, seed=0)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_named_data_set_that_cannot_be_had_names_the_remedies(name: str) -> None:
    with pytest.raises(DataError) as error:
        load_dataset(name, None, None, seed=0)
    message = str(error.value)
    assert "\n" not in message and "Connection refused" in message
    assert all(remedy in message for remedy in ("--data_dir", "TORCH_PARALLEL_DATA", "--dataset digits"))
    assert not Path("data").exists()


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(DataError, match="no data set 'imagenet'; choose from mnist, cifar10, digits, synthetic"):
        load_dataset("imagenet", None, None, seed=0)


@pytest.mark.parametrize("name", [None, "mnist", "cifar10"])
def test_a_data_dir_that_is_no_folder_is_an_error_even_where_digits_would_do(name: str | None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in ("absent", "file"):
        with pytest.raises(DataError, match=f"--data_dir .*{wrong}: there is no such folder"):
            load_dataset(name, str(tmp_path / wrong), None, seed=0)


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert search_folders(None) == [Path("data")]
    monkeypatch.setenv("TORCH_PARALLEL_DATA", "elsewhere")
    assert search_folders(str(tmp_path)) == [tmp_path, Path("elsewhere"), Path("data")]
    monkeypatch.setenv("TORCH_PARALLEL_DATA", "./data/")
    assert search_folders(None) == [Path("data")]
    monkeypatch.setenv("TORCH_PARALLEL_DATA", "")
    assert search_folders(None) == [Path("data")]
