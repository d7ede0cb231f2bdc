"""Sees each parameter's first use in a forward: to know in which order layers need theirs, and to wait for them there.

It looks at what torch's functions are given while it is entered, so it sees a parameter wherever it is used: in its own
layer, tied to another one, or taken out of its layer by somebody else's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.nn import Parameter
from torch.overrides import TorchFunctionMode


class FirstUse(TorchFunctionMode):
    """Calls `used(key)` before the first use of a parameter with this key since `watch`; each key once."""

    def __init__(self, used: Callable[[int], None]) -> None:
        super().__init__()
        self._used = used
        self._keys: dict[int, int] = {}  # of parameters that were not used yet, by id

    def watch(self, keys: Iterable[tuple[Parameter, int]]) -> None:
        self._keys = {id(parameter): key for parameter, key in keys}

    @property
    def is_watching(self) -> bool:
        return bool(self._keys)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._keys:
            self._look(args)
            if kwargs:
                self._look(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _look(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Parameter):
                key = self._keys.pop(id(value), None)
                if key is not None:
                    self._used(key)
            elif isinstance(value, list | tuple):
                self._look(value)
