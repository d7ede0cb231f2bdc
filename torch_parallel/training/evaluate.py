"""What train.py and the controls measure alike.

Exact evaluation: every sample once, whatever the number of workers; counts are summed, ratios never averaged. What is
not finite after an epoch. And, for the controls, when a device gets somewhere: theirs may not be the stopwatch of what
they are compared with.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torch_parallel.workloads.task import Sums, Task, counts_of, loss_sum_of, metric_sums_of, metrics_of
from torch_parallel.workloads.tree import Tree, count, rows, to
from torch_parallel.workloads.whole_model import modes_of, set_modes

EVALUATION_BATCH = 500

Moment = float | torch.cuda.Event


@dataclass
class Evaluation:
    """What was counted of some test samples; parts of them add up."""

    loss_sum: float = 0.0
    targets: int = 0
    sums: Sums = field(default_factory=dict)
    """The task's own, on the CPU."""

    def __add__(self, other: Evaluation) -> Evaluation:
        return Evaluation(self.loss_sum + other.loss_sum, self.targets + other.targets, _added(self.sums, other.sums))

    @property
    def loss(self) -> float:
        """The mean over the targets."""
        return self.loss_sum / self.targets if self.targets else math.nan

    def metrics(self, task: Task) -> dict[str, float]:
        return metrics_of(task, self.sums, self.targets, self.loss)


def evaluate(
    model: nn.Module,
    task: Task,
    samples: Tree,
    dtype: torch.dtype,
    device: torch.device | None = None,
    on_batch: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Loss and counts of all `samples`, each once, on `device`.

    The model is given copies: it may write in them. Every module is left in the mode it was in. `on_batch` is called
    before each batch. Raises what the task raises for an output that does not fit.
    """
    modes = modes_of(model)
    model.eval()
    tested = Evaluation()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():  # not inference_mode: what a model keeps for later, training may use
        for start in range(0, count(samples), EVALUATION_BATCH):
            on_batch()
            stored = rows(samples, slice(start, start + EVALUATION_BATCH))
            batch = task.prepare(to(stored, device, copy=True), dtype)
            output = task.forward(model, batch)
            loss_sum += loss_sum_of(task, output, batch).double()
            tested.sums = _added(tested.sums, metric_sums_of(task, output, batch))
    set_modes(modes)
    counts = counts_of(task, samples)
    tested.loss_sum, tested.targets = loss_sum.item(), count(samples) if counts is None else int(counts.sum())
    tested.sums = {name: each.cpu() for name, each in tested.sums.items()}
    return tested


def _added(some: Sums, others: Sums) -> Sums:
    both = {name: some[name] + others[name] for name in some.keys() & others.keys()}
    return {**some, **others, **both}


def tested_words(accuracy: float, loss: float) -> str:
    """For a line on the screen: accuracy, or the mean loss where the task has none."""
    return f"test loss {loss:.4f}" if math.isnan(accuracy) else f"test accuracy {100 * accuracy:.2f} %"


OF_CLASSES = ("precision", "recall", "f1")
METRICS = (*OF_CLASSES, "perplexity")


def metric_columns(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Figures of the test samples by the names of `results.COLUMNS`; accuracy is not among them."""
    known = {name: value for name, value in metrics.items() if name in METRICS}
    others = {name: value for name, value in metrics.items() if name not in (*METRICS, "accuracy")}
    return {**known, **({"metrics": json.dumps(others)} if others else {})}


def step_targets(task: Task, samples: Tree, order: Tensor, batch_size: int) -> list[int]:
    """How many targets each step of an epoch has, whose samples come in this `order`, int64 [n] on the CPU."""
    counts = counts_of(task, samples)
    return [len(step) if counts is None else int(counts[step].sum()) for step in order.split(batch_size)]


def moment(device: torch.device) -> Moment:
    """When `device` gets this far: a GPU does so later than the host, and another GPU event tells by how much."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device.index))  # which it would find by itself, but more slowly
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Between two moments of one device, which has come so far: on a GPU somebody has waited for it."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3


class Diverged(ArithmeticError):
    """Something is NaN or infinite after an epoch. One line: what, and in which epoch."""

    def __init__(self, what: str, epoch: int) -> None:
        super().__init__(f"{what} is NaN or infinite after epoch {epoch}; a smaller --lr may help")
        self.what, self.epoch = what, epoch

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.epoch), vars(self)


Optimized = Iterable[tuple[Sequence[tuple[str, Tensor]], Optimizer]]
"""Named parameters, each with the optimizer that updates them."""


class FromTheStart:
    """What of a model is infinite when it is made, such as a mask of -inf, and what of its buffers is NaN, may stay so:
    those very elements, for as long as they do. A parameter that is NaN may not."""

    def __init__(self, model: nn.Module) -> None:
        self._kinds = {name: _kinds(tensor) for name, tensor in not_finite(model).items()}
        for name, _ in model.named_parameters():
            if (kinds := self._kinds.get(f"the parameter {name}")) is not None:
                kinds[kinds == NAN] = 0

    def excuses(self, found: dict[str, Tensor]) -> list[str]:
        """Which of what was found not to be finite has been so from the start. What is finite now has lost that."""
        excused = []
        for name, kinds in list(self._kinds.items()):
            now = _kinds(found[name]) if name in found else None
            if now is None or now.shape != kinds.shape:
                del self._kinds[name]
                continue
            if not (now.bool() & (now != kinds)).any():
                excused.append(name)
            self._kinds[name] = kinds * (now == kinds)
        return excused


NAN = 3


def _kinds(tensor: Tensor) -> Tensor:
    """By element 0 where it is finite, 1 for inf, 2 for -inf, NAN; int8, of the shape of the tensor's real parts."""
    values = _values(tensor)
    if values is None:
        return torch.zeros((), dtype=torch.int8, device="cpu")
    kinds = torch.zeros(values.shape, dtype=torch.int8, device=values.device)
    return kinds + torch.isposinf(values) + 2 * torch.isneginf(values) + NAN * torch.isnan(values)


def first_not_finite(
    model: nn.Module,
    optimized: Optimized = (),
    losses: Mapping[str, float | Tensor] | None = None,
    except_for: FromTheStart | None = None,
) -> str | None:
    """What is NaN or infinite, in words, such as "the buffer 2.running_mean"; None where all is finite.

    Looks at the parameters and buffers of `model`, at the state of its optimizers, then at `losses` by name, but
    `except_for` what was so from the start. It is for the end of an epoch: it reads every tensor, and waits for a GPU
    once.
    """
    found = not_finite(model, optimized, losses)
    excused = except_for.excuses(found) if except_for is not None else []
    return next((name for name in found if name not in excused), None)


def not_finite(
    model: nn.Module, optimized: Optimized = (), losses: Mapping[str, float | Tensor] | None = None
) -> dict[str, Tensor]:
    """All that is NaN or infinite, by what it is in words, and in the order of `first_not_finite`."""
    named = [*_of_model(model), *_states(optimized)]
    named += [
        (f"the {name}", torch.as_tensor(loss, device=None if isinstance(loss, Tensor) else "cpu"))
        for name, loss in (losses or {}).items()
    ]
    answers = [_is_finite(tensor) for _, tensor in named]
    known: dict[torch.device, Iterator[bool]] = {
        device: iter(torch.stack([answer for answer in answers if answer.device == device]).tolist())
        for device in {answer.device for answer in answers}
    }
    return {name: each for (name, each), answer in zip(named, answers, strict=True) if not next(known[answer.device])}


def _of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"the parameter {name}", parameter) for name, parameter in model.named_parameters())
    yield from ((f"the buffer {name}", buffer) for name, buffer in model.named_buffers())


def _states(optimized: Optimized) -> Iterator[tuple[str, Tensor]]:
    for parameters, optimizer in optimized:
        for name, parameter in parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"the optimizer's {key} of {name}", value


def _is_finite(tensor: Tensor) -> Tensor:
    """A boolean [], where the tensor is; True for what holds whole numbers, or nothing yet."""
    values = _values(tensor)
    return torch.tensor(True, device="cpu") if values is None else torch.isfinite(values).all()


def _values(tensor: Tensor) -> Tensor | None:
    """Its real numbers; None for what holds whole numbers, or nothing yet."""
    if is_lazy(tensor) or tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float32) if tensor.itemsize == 1 else tensor  # of eight bits torch has no such test
