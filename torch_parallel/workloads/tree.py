"""Samples and batches are trees of tensors: a tensor, or a dict, list or tuple of trees.

All tensors of one tree have as many rows, one a sample. So whatever a model is fed with, images or token ids and their
mask, samples are taken out of it, cut, copied and shared in one way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_parallel.workloads.errors import DataError

# Tensor | dict[str, Tree] | list[Tree] | tuple[Tree, ...]; where a tree is described, its leaves are other things
Tree = Any


def leaves(tree: Tree, path: str = "") -> dict[str, Any]:
    """The leaves by their paths, such as "words/0", in the order of the tree.

    Raises DataError where two have the same, as those of "a/b" and of {"a": {"b": ...}}.
    """
    if isinstance(tree, dict):
        children = [(str(key), child) for key, child in tree.items()]
    elif isinstance(tree, list | tuple):
        children = [(str(index), child) for index, child in enumerate(tree)]
    else:
        return {path: tree}
    found: dict[str, Any] = {}
    for name, child in children:
        more = leaves(child, f"{path}/{name}" if path else name)
        if twice := next((each for each in more if each in found), None):
            raise DataError(f"two tensors of the samples have the path {twice}; rename one of the keys that make it")
        found |= more
    return found


def rebuilt(like: Tree, values: list[Any]) -> Tree:
    """A tree as `like`, with these leaves in their order."""
    rest = iter(values)
    return map_tree(lambda _: next(rest), like)


def map_tree(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The tree of what `function` makes of each leaf."""
    if isinstance(tree, dict):
        return {key: map_tree(function, child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        made = [map_tree(function, child) for child in tree]
        if isinstance(tree, list):
            return made
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    return function(tree)


def rows(tree: Tree, which: slice | Tensor, device: torch.device | None = None) -> Tree:
    """The samples at these rows, on `device` where one is given."""
    if device is None:
        return map_tree(lambda leaf: leaf[which], tree)
    return map_tree(lambda leaf: leaf[which].to(device), tree)


def to(tree: Tree, device: torch.device | None, copy: bool = False) -> Tree:
    """The tree on a device."""
    return map_tree(lambda leaf: leaf.to(device, copy=copy), tree)


def first_nan(tree: Tree, which: Tensor) -> tuple[int, str] | None:
    """Of the samples at these rows, int64 [b], the first that has a NaN, and the path of the tensor; None if none."""
    for path, leaf in leaves(tree).items():
        if leaf.is_floating_point() or leaf.is_complex():
            has_nan = leaf[which].flatten(1).isnan().any(1) if leaf.dim() > 1 else leaf[which].isnan()
            if has_nan.any():
                return int(which[has_nan.to(which.device)][0]), path
    return None


def count(tree: Tree) -> int:
    """The samples of a tree: the rows of its first tensor. 0 for a tree without any."""
    first = next(iter(leaves(tree).values()), None)
    return len(first) if isinstance(first, Tensor) else 0


def nbytes(tree: Tree) -> int:
    """Bytes of all its tensors."""
    return sum(leaf.nbytes for leaf in leaves(tree).values())
