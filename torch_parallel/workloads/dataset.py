"""A data set is four tensors and what is needed to feed them to a model.

The images stay as they are stored, one byte a pixel, and become floats a batch at a time: MNIST then takes 55 MB
instead of 220 MB, and one copy in shared memory serves all workers, whatever dtype and device each of them uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


class DataError(Exception):
    """The data asked for cannot be had or cannot be trusted. The message is one line: what, where, and what helps."""


class DataNotFound(DataError):
    """No file of it was found and none could be downloaded. What was found but is damaged is a plain `DataError`."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with a class each, split into training and test samples.

    `train_inputs` [n, C, H, W] and `test_inputs` [m, C, H, W] are uint8 (0..255), or floats that need no normalizing;
    `train_targets` [n] and `test_targets` [m] are int64 in 0..class_count-1. `mean` and `std` have one number a
    channel, for pixels in 0..1. `source` says where the files came from.
    """

    name: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    class_count: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image, as `build_model` wants it."""
        _, channels, height, width = self.train_inputs.shape
        return channels, height, width

    def normalize(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """What the model is fed for a batch `inputs` [b, C, H, W]: same shape and device, in `dtype`.

        uint8 becomes (x / 255 - mean) / std per channel, in a new tensor. Floats are taken as ready and only cast (the
        same tensor if they have `dtype` already). Raises ValueError if the batch has another number of channels.
        """
        if inputs.dtype != torch.uint8:
            return inputs.to(dtype)
        # At least float32 until the end, so that bfloat16 and float16 round each pixel once.
        scaled = inputs.to(torch.promote_types(dtype, torch.float32)).div_(255)
        # Python numbers, not tensors of mean and std: these would be copied to the GPU, and waited for, at every batch.
        for plane, mean, std in zip(scaled.unbind(1), self.mean, self.std, strict=True):
            plane.sub_(mean).div_(std)
        return scaled.to(dtype)

    def subset(self, train_size: int | None, seed: int, test_size: int | None = None) -> Dataset:
        """The same data with `train_size` of the training samples and `test_size` of the test samples; None is all.

        They are drawn without repeats, by `seed` only. The samples keep their order, so the subset of all n is the data
        set itself. Raises DataError unless sizes lie in 1..n.
        """
        train = self._chosen("train", train_size, len(self.train_targets), seed)
        test = self._chosen("test", test_size, len(self.test_targets), seed)
        return replace(
            self,
            train_inputs=self.train_inputs[train],
            train_targets=self.train_targets[train],
            test_inputs=self.test_inputs[test],
            test_targets=self.test_targets[test],
        )

    def _chosen(self, part: str, size: int | None, count: int, seed: int) -> Tensor | slice:
        if size is None:
            return slice(None)
        if not 1 <= size <= count:
            raise DataError(f"{part}_size is {size}, but {self.name} has {count} {part} samples ({self.source})")
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(count, generator=generator)[:size].sort().values
