"""A task is all that training knows of what is trained: what the model is fed, the loss, and what is counted.

The loop, the feeder, evaluation, the controls and the benches see batches, which are trees of tensors, and ask it:

  batch = task.prepare(batch, dtype)          what was stored becomes what the model takes
  output = task.forward(model, batch)
  loss = task.loss_sum(output, batch)         the sum over the batch's targets, never a mean
  sums = task.metric_sums(output, batch)      sums again: they add up over batches and over ranks
  task.metrics(sums)                          figures, from sums over everything

A sum of losses is divided by the targets of the whole step, of all workers. A sample has one target, a class, or many,
such as its tokens; `target_counts` says how many, for all samples at once and before training. So every rank knows each
step's divisor without a message, and the mean is exact however targets are spread over samples and workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

from torch_parallel.workloads.checks import as_tensor
from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.outputs import OutputMisfit, fitting, logits_of
from torch_parallel.workloads.tree import Tree, count, map_tree

Sums = dict[str, Tensor]
"""By name, of any shape; those of one name are added."""


class Task:
    """To be subclassed: `loss_sum` is needed, all else has defaults. Tasks are sent to worker processes by pickle."""

    def prepare(self, batch: Tree, dtype: torch.dtype) -> Tree:
        """What the model is fed, of samples as they are stored, on its device. Here floats become `dtype`."""
        return map_tree(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch)

    def forward(self, model: Callable[..., Any], batch: Tree) -> Any:
        """Calls the model on a batch that is prepared. Raises OutputMisfit for a dict without "inputs".

        Here on the whole where that is one tensor, on its part "inputs", or on the first of a list or tuple.
        """
        if isinstance(batch, Tensor):
            return model(batch)
        if isinstance(batch, dict) and "inputs" not in batch:
            raise OutputMisfit(
                f"a batch has the parts {', '.join(map(str, batch))}, and {type(self).__name__} gives the "
                'model its part "inputs"; name one so, or give the task a method forward(model, batch)'
            )
        return model(batch["inputs"] if isinstance(batch, dict) else batch[0])

    def loss_sum(self, output: Any, batch: Tree) -> Tensor:
        """The sum of the losses of all targets of a batch, []. It must be 0 where there are none."""
        raise NotImplementedError(f"{type(self).__name__} needs a method loss_sum(output, batch)")

    def target_counts(self, samples: Tree) -> Any:
        """How many targets each sample has, whole numbers [n], of samples as they are stored; None for one each.

        An array or a list does as well as a tensor.
        """
        return None

    def token_counts(self, samples: Tree) -> Tensor | None:
        """How many tokens of each sample the model reads, padding left out, [n]; None for what is no text."""
        return None

    def metric_sums(self, output: Any, batch: Tree) -> Mapping[str, Any]:
        """What is counted of a batch of the test part, beside its loss and its targets: tensors or numbers by name."""
        return {}

    def metrics(self, sums: Sums, targets: int, loss: float) -> Mapping[str, Any]:
        """Figures of all test samples: of their added sums, how many targets they have, and the mean loss of these.

        Numbers, or tensors of one element, by name.
        """
        return {}


@dataclass(frozen=True)
class OneClass(Task):
    """One class a sample: a batch has "targets", int64 [b] in 0..class_count-1."""

    class_count: int

    def loss_sum(self, output: Any, batch: Tree) -> Tensor:
        targets = batch["targets"]
        loss: Tensor = cross_entropy(fitting(output, len(targets), self.class_count), targets, reduction="sum")
        return loss

    def metric_sums(self, output: Any, batch: Tree) -> Sums:
        return counts_by_class(logits_of(output).argmax(1), batch["targets"], self.class_count)

    def metrics(self, sums: Sums, targets: int, loss: float) -> dict[str, float]:
        return class_metrics(sums, targets)


@dataclass(frozen=True)
class Classification(OneClass):
    """Of images, or of what is fed as it is: a batch has "inputs" [b, ...] too."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    side: int | None = None
    """Pixels to which images are resized, where the model wants other ones."""
    repeated: int = 1
    """How often grey images are repeated, for a model of so many channels."""

    def prepare(self, batch: Tree, dtype: torch.dtype) -> Tree:
        inputs = self.normalize(batch["inputs"], dtype)
        if self.side is not None and inputs.shape[2:] != (self.side, self.side):
            inputs = interpolate(inputs, (self.side, self.side), mode="bilinear", antialias=True)
        if self.repeated > 1:
            inputs = inputs.repeat(1, self.repeated, 1, 1)
        return {**batch, "inputs": inputs}

    def normalize(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """What the model is fed for a batch `inputs` [b, ...]: same shape and device.

        uint8 becomes (x / 255 - mean) / std per channel, in `dtype` and a new tensor. Floats are taken as ready and
        only cast to `dtype` (the same tensor if they have it already). Whatever else, such as the numbers of tokens, is
        fed as it is. Raises ValueError if a batch of images has another number of channels.
        """
        if inputs.is_floating_point():
            return inputs.to(dtype)
        if inputs.dtype != torch.uint8:
            return inputs
        # At least float32 until the end, so that bfloat16 and float16 round each pixel once.
        scaled = inputs.to(torch.promote_types(dtype, torch.float32)).div_(255)
        # Python numbers, not tensors of mean and std: these would be copied to the GPU, and waited for, at every batch.
        for plane, mean, std in zip(scaled.unbind(1), self.mean, self.std, strict=True):
            plane.sub_(mean).div_(std)
        return scaled.to(dtype)


class WithMask(Task):
    """A text of tokens and the mask of those that are there: a batch has "tokens" and "mask", both [b, length]."""

    def prepare(self, batch: Tree, dtype: torch.dtype) -> Tree:
        return {**batch, "tokens": batch["tokens"].long()}

    def forward(self, model: Callable[..., Any], batch: Tree) -> Any:
        return model(batch["tokens"], attention_mask=batch["mask"])

    def token_counts(self, samples: Tree) -> Tensor | None:
        counts: Tensor = samples["mask"].sum(1)
        return counts


class TextClassification(WithMask, OneClass):
    """One class a text."""


@dataclass(frozen=True)
class TokensToTell(Task):
    """Many tokens a sample: a batch that is prepared has "targets", int64 [b, length], IGNORED where there is none.

    Losses are in nats.
    """

    vocabulary_size: int

    def loss_sum(self, output: Any, batch: Tree) -> Tensor:
        return token_loss_sum(output, batch["targets"], self.vocabulary_size)

    def metric_sums(self, output: Any, batch: Tree) -> Sums:
        return {"correct": correct_tokens(output, batch["targets"])}

    def metrics(self, sums: Sums, targets: int, loss: float) -> dict[str, float]:
        return {"accuracy": _ratio(sums["correct"], targets), "perplexity": _exponential(loss)}


class NextToken(TokensToTell):
    """Every token from those before it: a batch has "tokens" [b, length + 1] of whole numbers, and "count" [b].

    The model gets tokens[:, :-1] and is to predict tokens[:, 1:], of which the first `count` of a sample are targets.
    """

    def prepare(self, batch: Tree, dtype: torch.dtype) -> Tree:
        tokens = batch["tokens"].long()
        places = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        counts = places < batch["count"].unsqueeze(1)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:].masked_fill(~counts, IGNORED)}

    def target_counts(self, samples: Tree) -> Tensor | None:
        counts: Tensor = samples["count"]
        return counts

    def token_counts(self, samples: Tree) -> Tensor | None:
        return self.target_counts(samples)


class MaskedTokens(WithMask, TokensToTell):
    """The tokens that were hidden, as BERT is trained. A sample may have none."""

    def target_counts(self, samples: Tree) -> Tensor | None:
        counts: Tensor = (samples["targets"] != IGNORED).sum(1)
        return counts


IGNORED = -100
"""In place of a target: nothing is to be predicted here. As cross_entropy's own."""


def loss_sum_of(task: Task, output: Any, batch: Tree) -> Tensor:
    """What the task says. Raises OutputMisfit where that is no sum of losses, or nothing can be learnt from it."""
    loss = task.loss_sum(output, batch)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        found = f"a tensor {list(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise OutputMisfit(f"loss_sum of {type(task).__name__} gives {found}; one number, the sum of losses, is wanted")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise OutputMisfit(
            f"loss_sum of {type(task).__name__} does not depend on the model's parameters, so nothing can be learnt; "
            "make it of the output that it is given, without detach, item or argmax, and freeze not all parameters"
        )
    return loss


def metric_sums_of(task: Task, output: Any, batch: Tree) -> Sums:
    """What the task counts of a batch, as tensors. Raises OutputMisfit where it is something else."""
    sums = task.metric_sums(output, batch)
    who = f"metric_sums of {type(task).__name__}"
    if not isinstance(sums, Mapping):
        raise OutputMisfit(f"{who} gives {_what(sums)}; a dict of sums by name is wanted, or {{}}")
    tensors = {str(name): _number_or_tensor(f"{who} gives {name}", each) for name, each in sums.items()}
    return {name: each.long() if each.dtype == torch.bool else each for name, each in tensors.items()}


def metrics_of(task: Task, sums: Sums, targets: int, loss: float) -> dict[str, float]:
    """The task's figures, as numbers. Raises OutputMisfit where one is something else."""
    metrics = task.metrics(sums, targets, loss)
    who = f"metrics of {type(task).__name__}"
    if not isinstance(metrics, Mapping):
        raise OutputMisfit(f"{who} gives {_what(metrics)}; a dict of numbers by name is wanted, or {{}}")
    return {str(name): _number(f"{who} gives {name}", each) for name, each in metrics.items()}


def _what(value: Any) -> str:
    return "None" if value is None else f"something of type {type(value).__name__}"


def _number_or_tensor(which: str, value: Any) -> Tensor:
    try:
        return as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise OutputMisfit(f"{which}, {_what(value)}; a number or a tensor is wanted, to be added up") from None


def _number(which: str, value: Any) -> float:
    tensor = _number_or_tensor(which, value)
    if tensor.numel() != 1 or tensor.is_complex():
        raise OutputMisfit(f"{which}, a tensor {list(tensor.shape)} of {tensor.dtype}; one number is wanted")
    return float(tensor.item())


def target_counts(task: Task, name: str, samples: Tree) -> Tensor | None:
    """What the task says of samples of that name, int64 [n] on the CPU; None for one each.

    Raises DataError for what are no such counts, and where there is no target at all.
    """
    counts = counts_of(task, samples, f" for {name}")
    if counts is not None and not int(counts.sum()):
        raise DataError(f"{name} has no target: target_counts of {type(task).__name__} is 0 everywhere")
    return counts


def counts_of(task: Task, samples: Tree, of_what: str = "") -> Tensor | None:
    """The same of any samples; there may be no target among them. Tensors, arrays and lists will do."""
    given = task.target_counts(samples)
    if given is None:
        return None
    who = f"target_counts of {type(task).__name__}: it gives"
    wanted = f"{of_what}; [{count(samples)}] whole numbers, one a sample, are wanted"
    try:
        counts = as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise DataError(f"{who} {_what(given)}{wanted}") from None
    if counts.dim() != 1 or len(counts) != count(samples):
        found = list(counts.shape) if counts.dim() else f"one number, {counts}"
        raise DataError(f"{who} {found}{wanted}")
    if len(counts) and (counts.is_floating_point() or counts.is_complex()):
        raise DataError(f"{who} {counts.dtype}{wanted}; give .long() if they are")
    counts = counts.to("cpu", torch.int64)
    if len(counts) and int(counts.min()) < 0:
        raise DataError(f"{who} {counts.min()} for a sample{wanted}, none below 0")
    return counts


def token_loss_sum(output: Any, targets: Tensor, vocabulary_size: int) -> Tensor:
    """The sum of the losses, [], of logits [b, length, k] for `targets` [b, length], but where these are IGNORED."""
    logits = logits_of(output)
    rows = fitting(logits.flatten(0, 1) if logits.dim() == 3 else logits, targets.numel(), vocabulary_size)
    loss: Tensor = cross_entropy(rows, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss


def correct_tokens(output: Any, targets: Tensor) -> Tensor:
    """How many targets have the largest logit, []."""
    right: Tensor = logits_of(output).argmax(-1) == targets
    return right.sum()


def counts_by_class(predicted: Tensor, targets: Tensor, class_count: int) -> Sums:
    """Three counts a class, [class_count + 1] each; what is predicted beyond the data's classes is the last one."""
    predicted = predicted.clamp(max=class_count)

    def counts(classes: Tensor) -> Tensor:
        zeros = torch.zeros(class_count + 1, dtype=torch.int64, device=classes.device)
        return zeros.index_add_(0, classes, torch.ones_like(classes))

    right = predicted[predicted == targets]
    return {"right": counts(right), "predicted": counts(predicted), "actual": counts(targets)}


def class_metrics(sums: Sums, targets: int) -> dict[str, float]:
    """Accuracy, and precision, recall and F1 as means over the classes ("macro").

    As scikit-learn has them: over classes that were predicted or are there, and 0 where nothing is to be divided by.
    """
    right, predicted, actual = (sums[name].double() for name in ("right", "predicted", "actual"))
    there = predicted + actual > 0
    of_classes = {"precision": right / predicted, "recall": right / actual, "f1": 2 * right / (predicted + actual)}
    means = {name: float(each.nan_to_num(0.0)[there].mean()) for name, each in of_classes.items()}
    return {"accuracy": _ratio(right.sum(), targets), **means}


def _ratio(part: Tensor, whole: int) -> float:
    return float(part) / whole if whole else math.nan


def _exponential(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
