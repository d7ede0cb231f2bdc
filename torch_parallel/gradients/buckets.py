"""Gradients that are exchanged together lie together: flat buffers that peers can read, with every `.grad` a view.

Autograd makes each gradient in memory of its own; it is copied into its view, and what further micro-batches bring is
added there, which is cheaper than to let autograd add to zeros. A processor copies a large one at once, while it is in
its caches. Others are left where they are until those of the whole bucket are there, and then copied together: it costs
more to launch a copy than to make it. So after backward a bucket is ready to be exchanged as it is; nothing is packed.

Behind the gradients a bucket has one element for each parameter, 1 where this rank used it in this step. The exchange
sums these too, so every rank learns, at no extra message, which parameters nobody used: those have `grad = None` at the
update, as in one process, and not a zero that weight decay or momentum would act on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from torch_parallel.gradients.layout import NamedParameters, views_of
from torch_parallel.transport.buffer import SharedBuffer

Share = Callable[[int, torch.dtype], SharedBuffer]


COPIED_TOGETHER_BYTES = {"cpu": 1 << 20, "cuda": sys.maxsize}
"""Gradients of at most this size are. On GPUs all: around each copy of memory alone the kernels pause for 3 us."""
SMALLER_LAST = 8
"""How many times smaller the last bucket is."""


_HOOKS: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()
"""By parameter what leads its gradients to its bucket, the last that was made: a model may get a new strategy."""


class Bucket:
    """Some parameters of one dtype and device, and the flat buffer of their gradients.

    `shared` holds [numel + len(parameters)] elements that peers reach: gradients, then use marks. The `.grad`s are
    views of it. Only where GPUs exchange through the host's memory it lies there (`staged`); then the `.grad`s are
    views of `flat`, a buffer of the same shape on the GPU, and `publish` and `collect` copy between the two.

    The exchange puts the sums into `result`: `shared` again, where it works in place, or memory of the same shape. Then
    the `.grad`s are views of that, until the next step begins.

    `before_first` is called in backward, before the first gradient of a step is written over the last step's.
    """

    def __init__(
        self,
        index: int,
        parameters: NamedParameters,
        share: Share,
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = index
        self._before_first = before_first
        self.parameters = parameters
        self.numel = sum(parameter.numel() for _, parameter in parameters)
        first = parameters[0][1]
        self.shared = share(self.numel + len(parameters), first.dtype)
        self.result = self.shared.local
        self.staged = self.shared.local.device != first.device
        self.flat = torch.zeros_like(self.shared.local, device=first.device) if self.staged else self.shared.local
        self._cut: dict[int, tuple[list[Tensor], Tensor, Tensor]] = {}  # each memory that was used, by its address
        self._hold(self.flat)
        self._used: set[int] = set()
        self._together_bytes = COPIED_TOGETHER_BYTES[first.device.type]
        self._loose: dict[int, Tensor] = {}  # gradients, by position, that are not in their views yet
        self._awaited: set[int] = set()  # positions whose gradients the last backward of the step has not made yet
        self._on_complete: Callable[[Bucket], None] | None = None
        self._has_left = False
        self._closed = False
        self.renew: Callable[[Bucket], bool] | None = None
        """Called for a gradient that comes when the bucket has left. If that has begun a new step it is true, and
        `zero` has been called."""
        for position, (_, parameter) in enumerate(parameters):
            if parameter in _HOOKS:
                _HOOKS[parameter].remove()
            _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(partial(self._accumulated, position))

    def _hold(self, memory: Tensor) -> None:
        """From now on the gradients are those in `memory`, [numel + len(parameters)]."""
        if memory.data_ptr() not in self._cut:  # once, not once a step
            views = list(views_of(memory, self.parameters))
            self._cut[memory.data_ptr()] = views, memory[: self.numel], memory[self.numel :]
        self.views, self.gradients, self._marks = self._cut[memory.data_ptr()]
        """Wherever the gradients are now: one view for each, all of them flat, [numel], and the use marks."""

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and gradient."""
        return ((name, view) for (name, _), view in zip(self.parameters, self.views, strict=True))

    def move_to(self, shared: SharedBuffer) -> None:
        """From the next `zero()` on the gradients lie there: a buffer like the first, which peers may go on reading."""
        self.shared, self.result = shared, shared.local
        if not self.staged:
            self.flat = shared.local

    def zero(self) -> None:
        """Ready for a new step: no parameter has a gradient. The transport must be settled: peers read this memory."""
        self._used.clear()
        self._loose.clear()
        self._on_complete, self._has_left, self._closed = None, False, False
        self._hold(self.flat)
        for _, parameter in self.parameters:
            parameter.grad = None

    def await_gradients(self, on_complete: Callable[[Bucket], None]) -> None:
        """`on_complete` is called, in the midst of the backward to come, when that has made every gradient."""
        self._on_complete, self._awaited = on_complete, set(range(len(self.parameters)))

    def leave(self) -> None:
        """It is complete, and from now on, until `zero`, no gradient may come: it is being exchanged."""
        self.complete()
        self._on_complete, self._has_left = None, True

    def close(self, still_read: bool) -> None:
        """The step is over: gradients that come before the next `zero` are nobody's, as in torch before `zero_grad`.

        Where peers may go on reading the memory of the `.grad`s, they are taken out of it: autograd would add to them.
        """
        self._closed = True
        if still_read:
            for _, parameter in self.parameters:
                parameter.grad = None

    def reopen(self) -> None:
        """A new step has begun, and the last one's gradients are still being exchanged."""
        self._closed = False
        for _, parameter in self.parameters:
            parameter.grad = None

    @property
    def has_left(self) -> bool:
        return self._has_left

    def complete(self) -> None:
        """All gradients are in their views; what this rank has not used has zeros, and not the last step's."""
        self._copy_together()
        if not self._used_all:
            for position, view in enumerate(self.views):
                if position not in self._used:
                    view.zero_()

    def publish(self) -> None:
        """The gradients of this rank are complete: marks what it used and lets peers see it."""
        self.complete()
        if self._used_all:
            self._marks.fill_(1.0)  # a GPU fills them by itself; anything else it has to be sent
        else:
            marks = [float(position in self._used) for position in range(len(self.parameters))]
            self._marks.copy_(torch.tensor(marks, dtype=self.flat.dtype, device="cpu"))
        if self.staged:
            self.shared.local.copy_(self.flat)

    def collect(self, copy: bool = False) -> None:
        """The sums have arrived: `.grad` is the sum over all workers, or None where no worker used the parameter.

        With `copy` they are this rank's own, to be changed as it likes: a common result is not to be written.
        """
        in_place = not self.staged and not copy
        if not in_place and self.flat is not self.result:
            self.flat.copy_(self.result)
        self._hold(self.result if in_place else self.flat)
        # What this rank used counts, whatever the others did: then nobody has to wait for a GPU to say so.
        marks = [1.0] * len(self.parameters) if self._used_all else self.result[self.numel :].tolist()
        for (_, parameter), view, mark in zip(self.parameters, self.views, marks, strict=True):
            parameter.grad = view if mark else None

    @property
    def _used_all(self) -> bool:
        return len(self._used) == len(self.parameters)

    def _copy_together(self) -> None:
        if self._loose:
            dense = [gradient.to_dense() for gradient in self._loose.values()]
            torch._foreach_copy_([self.views[position] for position in self._loose], dense)
            for position in self._loose:
                self.parameters[position][1].grad = self.views[position]
            self._loose.clear()

    def _is_of_next_step(self, parameter: Tensor) -> bool:
        gradient = parameter.grad
        renewed = self.renew is not None and self.renew(self)
        parameter.grad = gradient  # which `zero` has taken away
        return renewed

    def _accumulated(self, position: int, parameter: Tensor) -> None:
        """What autograd made anew, in a step's first micro-batch and where somebody cleared .grad, goes to the view."""
        if self._closed:
            return
        if self._has_left and not self._is_of_next_step(parameter):
            instead = "--no_overlap, or overlap=False" if self.renew is None else "leave --schedule out"
            raise RuntimeError(
                f"parameter {self.parameters[position][0]} got a gradient twice in one backward, after the first had "
                f"been sent to the other ranks: exchange when backward is over ({instead})"
            )
        if not self._used:
            self._before_first()
        view, gradient = self.views[position], parameter.grad
        if gradient is not view and gradient is not self._loose.get(position):
            assert gradient is not None
            if position in self._loose:
                parameter.grad = self._loose[position] = self._loose[position] + gradient
            elif position in self._used:
                view.add_(gradient)
                parameter.grad = view
            elif view.nbytes <= self._together_bytes:
                self._loose[position] = gradient
            else:
                view.copy_(gradient.to_dense())
                parameter.grad = view
        self._used.add(position)
        if self._used_all:
            self._copy_together()  # so backward makes no more than one bucket's gradients beside the buckets
        if self._on_complete is not None:
            self._awaited.discard(position)
            if not self._awaited:
                self._on_complete(self)


def cut_into_buckets(named_parameters: Iterable[tuple[str, Parameter]], bucket_bytes: int) -> list[NamedParameters]:
    """The trainable parameters, each once, the last one first, in groups of one dtype and at most `bucket_bytes`.

    They come as the model has registered them, which is mostly the order of use. Where neighbours are used far apart
    their bucket is complete late in backward, and less of its exchange lies beside it; results are the same.

    Where they are too many for one group, the last one, of the parameters registered first, has at most an eighth of
    that: when backward has made their gradients it is over, and nothing is left to exchange them beside. A parameter
    larger than a group is a group of its own. Raises ValueError where nothing is trainable.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, str, Parameter]]] = {}
    for place, (name, parameter) in enumerate(named_parameters):
        if parameter.requires_grad:
            kinds.setdefault((parameter.dtype, parameter.device), []).append((place, name, parameter))
    if not kinds:
        raise ValueError("the model has no trainable parameter: all are frozen (requires_grad=False), or there is none")
    groups = [group for of_kind in kinds.values() for group in _cut(of_kind, bucket_bytes)]
    groups.sort(key=lambda group: group[-1][0], reverse=True)  # by what each has of the last registered
    return [[(name, parameter) for _, name, parameter in reversed(group)] for group in groups]


def _cut(parameters: list[tuple[int, str, Parameter]], most_bytes: int) -> Iterator[list[tuple[int, str, Parameter]]]:
    """In the order given, the first group a small one, if there are several."""
    total = sum(parameter.nbytes for *_, parameter in parameters)
    limit = most_bytes if total <= most_bytes else most_bytes // SMALLER_LAST
    group: list[tuple[int, str, Parameter]] = []
    size = 0
    for each in parameters:
        if group and size + each[2].nbytes > limit:
            yield group
            group, size, limit = [], 0, most_bytes
        group.append(each)
        size += each[2].nbytes
    yield group
