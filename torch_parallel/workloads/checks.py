"""A data set is checked when it is made, field by field: what is wrong with it is told before anything is started.

A wrong length or a wrong class does not have to raise later: it may train, to another model. So each field is held to
what `Dataset` says of it. What can be read in one way only, such as NumPy arrays and small integers, is taken as that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from torch_parallel.workloads.errors import DataError

PARTS = ("train", "test")
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
IMAGES = "images [n, C, H, W] are wanted where inputs are uint8; give .float() for other numbers, .long() for tokens"


def checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Dataset` as it keeps them.

    Raises DataError, one line that names the field and the data set, what it is and what is wanted.
    """
    check = _Check(fields)
    kept: dict[str, Any] = {"name": check.text("name")}
    for part in PARTS:
        kept[f"{part}_inputs"] = check.inputs(f"{part}_inputs")
    check.alike(kept["train_inputs"], kept["test_inputs"])
    kept["class_count"] = check.class_count()
    for part in PARTS:
        kept[f"{part}_targets"] = check.targets(part, kept[f"{part}_inputs"], kept["class_count"])
    mean, std = check.numbers("mean"), check.numbers("std")
    check.positive("std", std)
    channels = check.channels(kept["train_inputs"], normalized=bool(mean and std))
    kept["mean"] = check.per_channel("mean", mean, channels, default=0.0)
    kept["std"] = check.per_channel("std", std, channels, default=1.0)
    kept["source"] = check.text("source")
    return kept


class _Check:
    """The checks of one data set, by field."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def wrong(self, field: str, found: str, wanted: str) -> DataError:
        return DataError(" ".join(f"{field} of {self.fields['name']}: {found}; {wanted}".split()))

    def text(self, field: str) -> str:
        value = self.fields[field]
        if not isinstance(value, str):
            raise self.wrong(field, f"it is {kind(value)}", "text is wanted")
        return value

    def tensor(self, field: str) -> Tensor:
        """On the CPU, without history, by the same memory where it can be."""
        return dense(self.fields[field], partial(self.wrong, field))

    def inputs(self, field: str) -> Tensor:
        """Of a type with which layers can work."""
        inputs = self.tensor(field)
        if inputs.dtype in WIDE_UNSIGNED:
            wanted = ".float() is wanted for pixels and other numbers, .long() for tokens (of NumPy, .astype)"
            raise self.wrong(field, f"it is {inputs.dtype}, with which no layer of torch works", wanted)
        return inputs

    def alike(self, train: Tensor, test: Tensor) -> None:
        """An empty part is alike whatever its shape: `train` says that it is empty."""
        if not len(train) or not len(test):
            return
        if train.shape[1:] != test.shape[1:]:
            found = f"its samples have the shape {list(test.shape[1:])}"
            raise self.wrong("test_inputs", found, f"{list(train.shape[1:])}, that of train_inputs, is wanted")
        if train.dtype != test.dtype:
            raise self.wrong("test_inputs", f"it is {test.dtype}", f"{train.dtype}, as train_inputs, is wanted")

    def class_count(self) -> int:
        value = self.fields["class_count"]
        try:
            count = operator.index(value) if not isinstance(value, bool | numpy.bool_) else 0
        except TypeError:
            count = 0
        if count < 1:
            raise self.wrong("class_count", f"it is {value!r}", "a whole number of classes, at least 1, is wanted")
        return count

    def targets(self, part: str, inputs: Tensor, class_count: int) -> Tensor:
        """int64 [n]."""
        field, count = f"{part}_targets", len(inputs)
        targets = self.tensor(field)
        wanted = f"one class a sample, [{count}], is wanted"
        if not targets.numel():
            targets = targets.reshape(-1).to(torch.int64)
        if targets.dim() != 1:
            raise self.wrong(field, f"its shape is {list(targets.shape)}", wanted + remedy(targets))
        if len(targets) != count:
            raise self.wrong(field, f"it has {len(targets)} for the {count} samples of {part}_inputs", wanted)
        if targets.is_floating_point() or targets.is_complex():
            raise self.wrong(field, f"it is {targets.dtype}", "whole numbers are wanted; give .long() if they are")
        if targets.dtype == torch.bool and class_count != 2:
            found = f"it is {targets.dtype}, and class_count is {class_count}"
            raise self.wrong(field, found, "whole numbers are wanted, or two classes")
        targets = targets.to(torch.int64)
        if count:
            least, largest = targets.aminmax()
            self.classes(field, int(least), int(largest), class_count)
        return targets

    def classes(self, field: str, least: int, largest: int, class_count: int) -> None:
        classes = f"classes 0..{class_count - 1}, as class_count says, are wanted"
        if least < 0:
            why = f"{classes}: every sample counts and must have a class; leave out those that have none"
            raise self.wrong(field, f"it has a target {least}", why)
        if largest >= class_count:
            from_0 = ": count from 0" if least == 1 and largest == class_count else ""
            raise self.wrong(field, f"it has a target {largest}", classes + from_0)

    def channels(self, inputs: Tensor, normalized: bool) -> int | None:
        """Of images, dimension 1; None for what is fed as it is.

        Bytes of another shape are pixels too if they are `normalized`: without mean and std they may be tokens.
        """
        if inputs.dtype != torch.uint8 or not len(inputs):
            return None
        if inputs.dim() != 4 and not (normalized and inputs.dim() > 1):
            raise self.wrong("train_inputs", f"it is uint8 of the shape {list(inputs.shape)}", IMAGES)
        return inputs.shape[1]

    def numbers(self, field: str) -> tuple[float, ...]:
        """Finite ones, as many as are given."""
        value = self.fields[field]
        try:
            given = () if value is None else value
            numbers = tuple(float(each) for each in as_tensor(given).reshape(-1).tolist())
        except (TypeError, ValueError, RuntimeError, OverflowError):
            numbers = (math.nan,)
        if not all(map(math.isfinite, numbers)):
            raise self.wrong(field, f"it is {value!r}", "finite numbers, one a channel, are wanted")
        return numbers

    def per_channel(
        self, field: str, numbers: tuple[float, ...], channels: int | None, default: float
    ) -> tuple[float, ...]:
        """As many as there are channels; the `default` for each where none is given."""
        if channels is None:
            return numbers
        if numbers and len(numbers) != channels:
            found = f"it has {len(numbers)} for images of {channels} channels"
            raise self.wrong(field, found, "one number a channel is wanted, or none at all")
        return numbers or (default,) * channels

    def positive(self, field: str, numbers: tuple[float, ...]) -> None:
        if any(number <= 0 for number in numbers):
            raise self.wrong(field, f"it is {numbers}", "numbers > 0 are wanted")


def dense(value: Any, wrong: Callable[[str, str], DataError]) -> Tensor:
    """The rows of samples as a tensor on the CPU, without history, by the same memory where it can be.

    Raises what `wrong` makes of what was found and what is wanted.
    """
    try:
        tensor = as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        found = f"it is {kind(value)}, which is no tensor ({error})"
        raise wrong(found, "a tensor, or an array of numbers, is wanted") from None
    if what := unusual(tensor):
        raise wrong(f"it is {what}", "a dense tensor is wanted")
    if tensor.dim() == 0:
        raise wrong("it is a single number", "a tensor with one row a sample is wanted")
    return tensor.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg()


def as_tensor(value: Any) -> Tensor:
    """A tensor as it is; an array, or what NumPy takes for one, as a tensor on the same memory where torch can read it.

    Raises TypeError, ValueError, RuntimeError or OverflowError for what is no array of numbers.
    """
    if isinstance(value, Tensor):
        return value
    if numpy.ma.is_masked(value):
        raise ValueError("some of its values are masked")
    array = numpy.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch warns of the one and cannot read the other
    return torch.from_numpy(array)


def unusual(tensor: Tensor) -> str:
    """Why a tensor is not plain numbers in memory; "" where it is."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype})"
    return "a tensor of shapes alone (meta)" if tensor.is_meta else ""


def remedy(targets: Tensor) -> str:
    """For targets [n, ...] that have one class a sample in another form."""
    if targets.dim() == 2 and targets.shape[1] == 1:
        return ": take .squeeze(1)"
    return ": take .argmax(1) if they are one-hot" if targets.dim() == 2 else ""


def kind(value: Any) -> str:
    """The type of a value, for a message."""
    return "None" if value is None else f"of type {type(value).__name__}"
