"""A data set is four tensors and what is needed to feed them to a model.

The images stay as they are stored, one byte a pixel, and become floats a batch at a time: MNIST then takes 55 MB
instead of 220 MB, and one copy in shared memory serves all workers, whatever dtype and device each of them uses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from torch_parallel.workloads.checks import checked
from torch_parallel.workloads.errors import DataError, DataNotFound
from torch_parallel.workloads.samples import Samples, drawn
from torch_parallel.workloads.task import Classification


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples with a class each, split into a training and a test part. Raises DataError for a field that is wrong.

    `train_inputs` [n, ...] and `test_inputs` [m, ...] are images [n, C, H, W] of uint8 (0..255), floats of any shape
    that need no normalizing, or whole numbers of another type, which the model gets as they are. Both have samples of
    one shape and type. `train_targets` [n] and `test_targets` [m] are one class a sample, whole numbers in
    0..class_count-1; they are kept as int64. NumPy arrays, and what NumPy takes for one, do as well as tensors.

    `mean` and `std` have one number a channel, for pixels in 0..1, and are for images of uint8 alone; without them
    pixels become x / 255. `source` says where the data came from.
    """

    name: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    class_count: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    source: str = "memory"
    built_in: bool = False
    """Whether it is the data set of that name that comes with the package."""

    def __post_init__(self) -> None:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in checked(given).items():
            object.__setattr__(self, name, value)

    @property
    def task(self) -> Classification:
        """All but the samples."""
        return Classification(self.class_count, self.mean, self.std)

    @property
    def samples(self) -> Samples:
        """The samples as a task has them."""
        train = {"inputs": self.train_inputs, "targets": self.train_targets}
        test = {"inputs": self.test_inputs, "targets": self.test_targets}
        return Samples(self.name, train, test, self.source, self.built_in)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image, as `build_model` wants it. Raises DataError for samples that are no images."""
        if self.train_inputs.dim() != 4:
            raise DataError(
                f"train_inputs of {self.name}: its samples have the shape {list(self.train_inputs.shape[1:])}; images "
                "[C, H, W] are wanted by the models that go by a name, so give a model of your own (make_model)"
            )
        if self.train_inputs.is_complex():
            raise DataError(
                f"train_inputs of {self.name}: it is {self.train_inputs.dtype}; real numbers are wanted by the models "
                "that go by a name: give .abs(), or real and imaginary parts as channels, or a model of your own"
            )
        _, channels, height, width = self.train_inputs.shape
        return channels, height, width

    def normalize(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """What the model is fed for a batch: see `Classification.normalize`."""
        return self.task.normalize(inputs, dtype)

    def require_samples(self) -> None:
        """Raises DataError, which names the field, where there is nothing to train on or to test with."""
        for part, what in (("train_inputs", "to train on"), ("test_inputs", "to test with")):
            if not len(getattr(self, part)):
                raise DataError(f"{part} of {self.name}: it has no samples; at least 1 is wanted {what}")

    def subset(self, train_size: int | None, seed: int, test_size: int | None = None) -> Dataset:
        """The same data with `train_size` of the training samples and `test_size` of the test samples; None is all.

        They are drawn without repeats, by `seed` only. The samples keep their order, so the subset of all n is the data
        set itself. Raises DataError unless sizes lie in 1..n.
        """
        train = drawn(self, "train", train_size, len(self.train_targets), seed)
        test = drawn(self, "test", test_size, len(self.test_targets), seed)
        return replace(
            self,
            train_inputs=self.train_inputs[train],
            train_targets=self.train_targets[train],
            test_inputs=self.test_inputs[test],
            test_targets=self.test_targets[test],
        )


__all__ = ["DataError", "DataNotFound", "Dataset"]
