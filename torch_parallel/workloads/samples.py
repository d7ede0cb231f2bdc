"""The samples of a workload, for training and for testing: two trees of tensors alike, and where they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from torch_parallel.workloads.checks import dense
from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.tree import Tree, count, leaves, nbytes, rebuilt, rows


class Named(Protocol):
    """Data, whatever holds them."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Samples:
    """`train` and `test`: trees of tensors [n, ...] and [m, ...], a row a sample, alike in all but n and m.

    NumPy arrays, and what NumPy takes for one, do as well as tensors. `source` says where they came from. Raises
    DataError, one line that names the part, where something is wrong with them.
    """

    name: str
    train: Tree
    test: Tree
    source: str = "memory"
    built_in: bool = False
    """Whether they are those of the data set of that name that comes with the package."""

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            object.__setattr__(self, part, self._checked(part, getattr(self, part)))
        self._check_alike()

    @property
    def known_as(self) -> str:
        """The name by which training knows them and may have other defaults; "" for what a user calls so too."""
        return self.name if self.built_in else ""

    @property
    def train_size(self) -> int:
        return count(self.train)

    @property
    def test_size(self) -> int:
        return count(self.test)

    @property
    def nbytes(self) -> int:
        return nbytes(self.train) + nbytes(self.test)

    def require_some(self) -> None:
        """Raises DataError where there is nothing to train on or to test with."""
        for part, size, what in (("train", self.train_size, "train on"), ("test", self.test_size, "test with")):
            if not size:
                raise DataError(f"{part} of {self.name}: it has no samples; at least 1 is wanted to {what}")

    def subset(self, train_size: int | None, seed: int, test_size: int | None = None) -> Samples:
        """`train_size` and `test_size` of the samples, drawn without repeats by `seed` alone, in their order.

        None is all. Raises DataError unless sizes lie in 1..n.
        """
        train = drawn(self, "train", train_size, self.train_size, seed)
        test = drawn(self, "test", test_size, self.test_size, seed)
        return replace(self, train=rows(self.train, train), test=rows(self.test, test))

    def _wrong(self, where: str, found: str, wanted: str) -> DataError:
        return DataError(" ".join(f"{where} of {self.name}: {found}; {wanted}".split()))

    def _checked(self, part: str, tree: Tree) -> Tree:
        named = leaves(tree, part)
        if not named:
            raise self._wrong(part, "it holds no tensor", "a tensor, or a dict or tuple of tensors, is wanted")
        tensors = [dense(leaf, partial(self._wrong, path)) for path, leaf in named.items()]
        for path, tensor in zip(named, tensors, strict=True):
            if len(tensor) != len(tensors[0]):
                first = f"the {len(tensors[0])} of {next(iter(named))}"
                raise self._wrong(path, f"it has {len(tensor)} rows", f"as many as {first} are wanted, one a sample")
        return rebuilt(tree, tensors)

    def _check_alike(self) -> None:
        train, test = leaves(self.train), leaves(self.test)
        if list(train) != list(test):
            raise self._wrong("test", f"it has the parts {list(test)}", f"{list(train)}, those of train, are wanted")
        if not self.train_size or not self.test_size:  # an empty part is alike whatever its shape
            return
        for path, leaf in train.items():
            other = test[path]
            if leaf.shape[1:] != other.shape[1:] or leaf.dtype != other.dtype:
                found = f"its samples are {list(other.shape[1:])} of {other.dtype}"
                wanted = f"{list(leaf.shape[1:])} of {leaf.dtype}, as in train, are wanted"
                raise self._wrong(f"test/{path}".rstrip("/"), found, wanted)


def drawn(data: Named, part: str, size: int | None, of: int, seed: int) -> Tensor | slice:
    """The rows of a subset, in their order. Raises DataError, which names the part and the data."""
    if size is None:
        return slice(None)
    if not 1 <= size <= of:
        raise DataError(f"{part}_size is {size}, but {data.name} has {of} {part} samples ({data.source})")
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randperm(of, generator=generator, device="cpu")[:size].sort().values
