"""A data set is right or it is refused, by one line that names the field, what it is and what would do."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from typing import Any

import numpy
import pytest
import torch

from torch_parallel.workloads import DataError, Dataset

FLOATS = torch.arange(24, dtype=torch.float32).view(8, 3)
IMAGES = torch.arange(8 * 2 * 2 * 2, dtype=torch.uint8).view(8, 2, 2, 2)
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def own(**changed: Any) -> Dataset:
    """Eight samples to train on and four to test with, of three floats and three classes."""
    fields: dict[str, Any] = {"name": "own", "class_count": 3}
    fields |= {"train_inputs": FLOATS, "train_targets": CLASSES, "test_inputs": FLOATS[:4], "test_targets": CLASSES[:4]}
    return Dataset(**(fields | changed))


def images(**changed: Any) -> Dataset:
    return own(**({"train_inputs": IMAGES, "test_inputs": IMAGES[:4]} | changed))


def refused(field: str, make: Any, **changed: Any) -> str:
    with pytest.raises(DataError) as error:
        make(**changed)
    line = str(error.value)
    assert line.startswith(f"{field} of {changed.get('name', 'own')}: ") and "\n" not in line
    assert "wanted" in line
    return line


# What is taken.


def test_fields_have_an_order_and_the_last_four_defaults() -> None:
    names = [field.name for field in dataclasses.fields(Dataset)]
    parts = ["train_inputs", "train_targets", "test_inputs", "test_targets"]
    assert names == ["name", *parts, "class_count", "mean", "std", "source", "built_in"]
    made = Dataset("own", FLOATS, CLASSES, FLOATS[:4], CLASSES[:4], 3)
    assert (made.mean, made.std) == ((), ()) and isinstance(made.source, str) and made.source
    assert made.built_in is False
    assert made.normalize(made.train_inputs, torch.float32) is made.train_inputs


def test_without_mean_and_std_pixels_are_divided_by_255() -> None:
    assert torch.equal(images().normalize(IMAGES, torch.float64), IMAGES.double() / 255)
    only_mean = images(mean=(0.5, 0.0)).normalize(IMAGES, torch.float64)
    assert torch.equal(only_mean[:, 0], IMAGES[:, 0].double() / 255 - 0.5)
    assert torch.equal(only_mean[:, 1], IMAGES[:, 1].double() / 255)
    only_std = images(std=numpy.array([0.5, 0.25], dtype=numpy.float32)).normalize(IMAGES, torch.float64)
    assert torch.equal(only_std[:, 1], IMAGES[:, 1].double() / 255 / 0.25)


@pytest.mark.parametrize(
    "targets",
    [
        *(CLASSES.to(dtype) for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)),
        CLASSES.numpy(),
        CLASSES.numpy().astype(">i4"),  # as the files of MNIST have it
        CLASSES.numpy()[::-1][::-1].astype(numpy.uint16),
        CLASSES.tolist(),
        tuple(CLASSES.tolist()),
    ],
    ids=lambda targets: f"{type(targets).__name__} {getattr(targets, 'dtype', '')}",
)
def test_whole_numbers_of_any_type_are_classes(targets: Any) -> None:
    kept = own(train_targets=targets).train_targets
    assert kept.dtype == torch.int64 and kept.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_truth_values_are_two_classes() -> None:
    truth = CLASSES > 0
    made = own(train_targets=truth, test_targets=truth[:4].numpy(), class_count=numpy.int64(2))
    assert made.train_targets.tolist() == [0, 1, 1, 0, 1, 1, 0, 1] and made.test_targets.tolist() == [0, 1, 1, 0]
    assert type(made.class_count) is int
    assert "torch.bool" in refused("train_targets", own, train_targets=truth)


def read_only(array: numpy.ndarray) -> numpy.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


class ArrayLike:
    def __array__(self, dtype: Any = None, copy: Any = None) -> numpy.ndarray:
        return FLOATS.numpy()


@pytest.mark.parametrize(
    "inputs",
    [
        FLOATS.numpy(),
        FLOATS.numpy().astype(">f4"),
        read_only(FLOATS.numpy()),
        FLOATS.flip(0).numpy()[::-1],  # whose rows lie the other way round
        FLOATS.clone().requires_grad_(),
        torch.nn.Parameter(FLOATS.clone()),
        FLOATS.t().contiguous().t(),
        ArrayLike(),
    ],
    ids=["array", "big_endian", "read_only", "reversed", "requires_grad", "parameter", "transposed", "array_like"],
)
def test_inputs_of_other_kinds_are_plain_tensors(inputs: Any) -> None:
    kept = own(train_inputs=inputs).train_inputs
    assert type(kept) is torch.Tensor and not kept.requires_grad and kept.device.type == "cpu"
    assert torch.equal(kept, FLOATS)


def test_nothing_is_copied_that_need_not_be() -> None:
    array = FLOATS.numpy().copy()
    assert own(train_inputs=array).train_inputs.data_ptr() == array.ctypes.data
    assert own().train_inputs.data_ptr() == FLOATS.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_tokens_reach_the_model_as_they_are(dtype: torch.dtype) -> None:
    tokens = torch.tensor([[1, 0, 5], [7, 2, 0]]).to(dtype)
    made = Dataset("text", tokens, [0, 1], tokens, [0, 1], 2)
    assert made.normalize(made.train_inputs, torch.float32) is made.train_inputs


def test_a_data_set_is_a_task_and_samples() -> None:
    given = images(mean=[0.5, 0.25])
    assert (given.task.class_count, given.task.mean, given.task.std) == (3, (0.5, 0.25), (1.0, 1.0))
    assert torch.equal(given.task.normalize(IMAGES, torch.float32), given.normalize(IMAGES, torch.float32))
    assert given.samples.name == "own" and torch.equal(given.samples.train["inputs"], given.train_inputs)
    assert torch.equal(given.samples.test["targets"], given.test_targets)


def test_a_part_may_be_empty_until_something_is_trained() -> None:
    for empty in (FLOATS[:0], torch.empty(0), []):
        made = own(train_inputs=empty, train_targets=[])
        with pytest.raises(DataError, match=r"^train_inputs of own: it has no samples"):
            made.require_samples()
    with pytest.raises(DataError, match=r"^test_inputs of own: it has no samples"):
        own(test_inputs=FLOATS[:0], test_targets=CLASSES[:0]).require_samples()
    own().require_samples()


# What is refused.


def test_samples_of_another_number_than_targets() -> None:
    assert "7 for the 8 samples of train_inputs" in refused("train_targets", own, train_targets=CLASSES[:7])
    assert "8 for the 4 samples of test_inputs" in refused("test_targets", own, test_targets=CLASSES)
    assert "0 for the 8 samples" in refused("train_targets", own, train_targets=[])
    assert "8 for the 0 samples" in refused("train_targets", own, train_inputs=FLOATS[:0])


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (CLASSES + 1, "a target 3; classes 0..2, as class_count says, are wanted: count from 0"),
        (CLASSES * 2, "a target 4; classes 0..2"),
        (CLASSES.masked_fill(CLASSES == 1, -100), "a target -100; .* every sample counts and must have a class"),
        (CLASSES - 1, "a target -1"),
        (CLASSES.float(), r"torch.float32; whole numbers are wanted; give .long\(\)"),
        (CLASSES.numpy() + 0.5, "torch.float64"),
        (torch.eye(3)[CLASSES], r"shape is \[8, 3\]; one class a sample, \[8\], is wanted: take .argmax\(1\)"),
        (CLASSES.unsqueeze(1), r"shape is \[8, 1\]; .* take .squeeze\(1\)"),
        (CLASSES.expand(2, 2, 8), r"shape is \[2, 2, 8\]"),
        (torch.tensor(1), "a single number"),
        (["cat", "dog"] * 4, "of type list, which is no tensor"),
        (None, "None, which is no tensor"),
        (CLASSES.to(torch.complex64), "torch.complex64"),
    ],
)
def test_targets_that_are_not_one_class_a_sample(targets: Any, said: str) -> None:
    for part, count in (("train", 8), ("test", 4)):
        cut = targets if targets is None or getattr(targets, "ndim", 1) == 0 else targets[:count]
        changed = {f"{part}_targets": cut}
        line = refused(f"{part}_targets", own, **changed)
        if part == "train":
            assert re.search(said, line), line


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ("text", "of type str, which is no tensor"),
        ([[1.0], [2.0, 3.0]], "of type list, which is no tensor"),
        (object(), "of type object"),
        (numpy.array(["a"] * 8), "of type ndarray"),
        (numpy.ma.masked_array(FLOATS.numpy(), FLOATS.numpy() > 3), "some of its values are masked"),
        (FLOATS.to_sparse(), "torch.sparse_coo; a dense tensor"),
        (torch.empty(8, 3, device="meta"), "meta"),
        (torch.tensor(3.0), "a single number"),
        (FLOATS.numpy().astype(numpy.uint16), "torch.uint16, with which no layer of torch works; .float() is wanted"),
        (FLOATS.long().to(torch.uint32), "torch.uint32, with which no layer"),
    ],
    ids=["text", "ragged", "object", "words", "masked", "sparse", "meta", "number", "uint16", "uint32"],
)
def test_inputs_that_are_no_numbers_in_memory(inputs: Any, said: str) -> None:
    assert said in refused("train_inputs", own, train_inputs=inputs)
    assert said in refused("test_inputs", own, test_inputs=inputs)


def test_quantized_and_compressed_inputs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has its own to say of both
        quantized = torch.quantize_per_tensor(FLOATS, 1.0, 0, torch.quint8)
        compressed = FLOATS.to_sparse_csr()
    assert "quantized" in refused("train_inputs", own, train_inputs=quantized)
    assert "torch.sparse_csr; a dense tensor" in refused("train_inputs", own, train_inputs=compressed)


def test_parts_of_unlike_samples() -> None:
    line = refused("test_inputs", own, test_inputs=FLOATS[:4, :2])
    assert "the shape [2]; [3], that of train_inputs, is wanted" in line
    assert "torch.float64; torch.float32" in refused("test_inputs", own, test_inputs=FLOATS[:4].double())
    assert "torch.float32; torch.uint8" in refused("test_inputs", images, test_inputs=IMAGES[:4].float())


@pytest.mark.parametrize("shape", [(8, 8), (8, 2, 4), (8, 1, 2, 2, 2), (8,)])
def test_bytes_that_are_no_images(shape: tuple[int, ...]) -> None:
    data = torch.zeros(shape, dtype=torch.uint8)
    line = refused("train_inputs", own, train_inputs=data, test_inputs=data[:4])
    assert f"uint8 of the shape {list(shape)}" in line and ".long()" in line


def test_bytes_of_another_shape_are_normalized_where_that_is_asked_for() -> None:
    pixels = torch.tensor([[0, 51], [255, 102]], dtype=torch.uint8)
    made = Dataset("rows", pixels, [0, 1], pixels, [0, 1], 2, (0.2, 0.5), (0.1, 0.25))
    expected = torch.tensor([[-2.0, -1.2], [8.0, -0.4]], dtype=torch.float64)
    torch.testing.assert_close(made.normalize(pixels, torch.float64), expected, rtol=0, atol=1e-14)
    with pytest.raises(DataError, match="mean of rows: it has 1 for images of 2 channels"):
        Dataset("rows", pixels, [0, 1], pixels, [0, 1], 2, (0.2,), (0.1,))


@pytest.mark.parametrize("make", [own, images])
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("std", (0.0, 1.0), "> 0"),
        ("std", (1.0, -1.0), "> 0"),
        ("std", (1.0, math.inf), "finite"),
        ("mean", (math.nan, 0.0), "finite"),
        ("mean", "abc", "finite numbers"),
        ("mean", (0.5, None), "finite numbers"),
        ("class_count", 0, "a whole number of classes, at least 1"),
        ("class_count", -3, "a whole number"),
        ("class_count", 3.0, "it is 3.0"),
        ("class_count", True, "it is True"),
        ("class_count", None, "it is None"),
        ("class_count", "3", "it is '3'"),
        ("name", 3, "of type int; text is wanted"),
        ("source", None, "None; text is wanted"),
        ("source", b"file", "of type bytes"),
    ],
)
def test_what_is_beside_the_samples(make: Any, field: str, value: Any, said: str) -> None:
    assert said in refused(field, make, **{field: value})


@pytest.mark.parametrize(("field", "value"), [("mean", (0.5,)), ("std", (0.5,) * 3), ("mean", 0.5)])
def test_another_number_of_channels(field: str, value: Any) -> None:
    count = 3 if field == "std" else 1
    assert f"it has {count} for images of 2 channels" in refused(field, images, **{field: value})


def test_a_name_of_several_lines_stays_in_one() -> None:
    with pytest.raises(DataError) as error:
        own(name="two\nlines", class_count=0)
    assert str(error.value).startswith("class_count of two lines: it is 0")


def test_a_subset_is_checked_and_its_parts_stay_what_they_are() -> None:
    small = images(mean=(0.5, 0.5), train_targets=CLASSES.int()).subset(3, seed=1, test_size=2)
    assert (len(small.train_inputs), len(small.test_inputs), small.mean) == (3, 2, (0.5, 0.5))
    assert small.train_targets.dtype == torch.int64


def test_models_by_name_want_images() -> None:
    assert images().image_shape == (2, 2, 2)
    with pytest.raises(DataError, match=r"train_inputs of own: its samples have the shape \[3\]; images \[C, H, W\]"):
        _ = own().image_shape
