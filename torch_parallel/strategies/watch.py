"""Notices what happens to a model's parameters behind a strategy's back, and names the first that it happens to.

A strategy makes all ranks hold the same parameters, and the optimizer alone may change them. Where forward writes one
itself (weights that it clips, `Embedding(max_norm=...)`, a copy that follows slowly), ranks with other samples write
other values, one without samples writes nothing, and a server never sees it. A parameter that is made, replaced or
unfrozen after set-up is one that nobody exchanges.

In every step the versions are compared, which autograd counts up at each write, and the places in memory. A write
through `.data` changes neither, and the tree of modules is slow to walk: in some steps it is looked at closely, at the
bits and at the tree. These are fewer and fewer, and have no rhythm that a model could have too.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torch_parallel.gradients.layout import NamedParameters, without_gaps
from torch_parallel.strategies.model_check import UnsupportedModel

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By bytes of an element, what its bits are read as."""


class Watch:
    """Looks at the parameters of `model` before they are exchanged. Alone, one process may write what it likes."""

    def __init__(self, model: nn.Module, alone: bool) -> None:
        self._model = model
        self._alone = alone
        self._parameters = list(model.named_parameters())
        self._frozen = [(name, each) for name, each in self._parameters if not each.requires_grad]
        by_storage: dict[int, NamedParameters] = {}  # views of one tensor count their versions together
        for name, parameter in self._parameters:
            by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))
        self._beside = {id(one): views for views in by_storage.values() for _, one in views if len(views) > 1}
        self._counts: Counter[str] = Counter()
        self._doing = ""
        self._closely = False
        self._versions: dict[str, tuple[int, int]] = {}
        self._sums: dict[str, int] = {}
        self._exempt: set[str] = set()

    def begin_step(self) -> None:
        """Remembers the parameters as they are. Raises UnsupportedModel for one that was frozen and no longer is."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UnsupportedModel(
                    f"parameter {name} was frozen when the strategy was made and is trainable now: unfreeze it before, "
                    "or make a new strategy"
                )
        self.remember("forward or backward")

    def remember(self, doing: str) -> None:
        """Remembers the parameters as they are before `doing`, at whose end `look` comes."""
        self._counts[doing] += 1
        self._doing = doing
        self._closely = is_looked_at(self._counts[doing])
        self._exempt.clear()
        if not self._alone:
            self._versions = {name: _mark(parameter) for name, parameter in self._parameters}
            self._sums = _bit_sums(self._parameters) if self._closely else {}

    def look(self) -> None:
        """Raises UnsupportedModel for what was written, added or replaced since `remember`."""
        self.look_at(self._parameters)
        if self._closely:
            self.look_at_tree()

    def look_at(self, parameters: NamedParameters) -> None:
        """The same for some of them, and for writes alone."""
        if self._alone:
            return
        parameters = [each for each in parameters if each[0] not in self._exempt]
        written = [name for name, parameter in parameters if _mark(parameter) != self._versions.get(name)]
        if not written and self._sums:
            some = [(name, parameter) for name, parameter in parameters if name in self._sums]
            written = [name for name, total in _bit_sums(some).items() if total != self._sums[name]]
        if written and self._doing:
            raise UnsupportedModel(
                f"parameter {written[0]} was written during {self._doing}, which other ranks do not see: write "
                "it between two steps, on all ranks alike, make it a buffer, or leave it as it is and let forward work "
                "out what it needs (torch.nn.utils.parametrize)"
            )

    def exempt(self, parameters: NamedParameters) -> None:
        """The strategy writes these at any time until `accept`, in another thread."""
        for name, parameter in parameters:
            self._exempt.update(other for other, _ in self._beside.get(id(parameter), [(name, parameter)]))

    def accept(self, parameters: NamedParameters) -> None:
        """The strategy itself has just written these, in the midst of backward."""
        for name, parameter in parameters:
            self._sums.pop(name, None)
            for other, view in self._beside.get(id(parameter), [(name, parameter)]):
                self._exempt.discard(other)
                self._versions[other] = _mark(view)

    def look_at_tree(self) -> None:
        """Raises UnsupportedModel unless the model still has the parameters that the strategy was made with."""
        known = {name: id(parameter) for name, parameter in self._parameters}
        present = {name: id(parameter) for name, parameter in self._model.named_parameters()}
        for name in [*present, *known]:
            if present.get(name) != known.get(name):
                what = "was added" if name not in known else "was taken away" if name not in present else "was replaced"
                raise UnsupportedModel(
                    f"parameter {name} {what} after the strategy was made, so nobody would train it: make all "
                    "parameters in make_model (those that the first forward makes, by running a batch through it there)"
                )


def is_looked_at(step: int) -> bool:
    """Of N steps about twice the root of N: step k with the chance 1 / sqrt(k), which is drawn from k alone."""
    return zlib.crc32(b"%d" % step) < 2**32 / math.sqrt(step)


def _mark(parameter: Tensor) -> tuple[int, int]:
    """What a write changes, but for one through `.data`."""
    return parameter._version, parameter.data_ptr()


def _bit_sums(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """For each one number that a write changes: the sum of its bits, read as integers."""
    named = [(name, each.detach()) for name, each in parameters if each.numel()]
    if not named:
        return {}
    sums = [_in_a_row(each).view(INTEGERS[each.itemsize]).sum(dtype=torch.int64) for _, each in named]
    return dict(zip([name for name, _ in named], torch.stack(sums).tolist(), strict=True))


def _in_a_row(tensor: Tensor) -> Tensor:
    """Its elements, [numel], in any order that stays the same; without a copy where there are no gaps."""
    return tensor.as_strided((tensor.numel(),), (1,)) if without_gaps(tensor) else tensor.reshape(-1)
