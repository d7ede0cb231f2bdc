"""What a model gives for a batch is held to what the loss and the accuracy take it for, in every forward.

Cross entropy takes [b, k, ...] too, and an argmax over the wrong dimension counts: a model that gives something else
would train, to losses and accuracies that mean nothing. A few comparisons of shapes cost nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class OutputMisfit(TypeError):
    """What a model gives is not one row of logits a sample. One line."""

    headline_suffices = True  # see mailbox.Failure


def logits_of(output: Any) -> Any:
    """The logits in what a model gives: itself, the part of that name, or the first of a tuple."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output.get("logits", output)
    if hasattr(output, "logits"):
        return output.logits
    return output[0] if isinstance(output, tuple | list) and output else output


def fitting(output: Any, samples: int, class_count: int) -> Tensor:
    """The logits in `output`, if they are one tensor [samples, k] of floats with k >= class_count.

    Else raises OutputMisfit.
    """
    output = logits_of(output)
    if not isinstance(output, Tensor):
        found = f"a {type(output).__name__}"
    elif output.dim() == 2 and len(output) == samples and output.shape[1] >= class_count and output.is_floating_point():
        return output
    else:
        found = f"a tensor {list(output.shape)} of {output.dtype}"
    raise OutputMisfit(
        f"the model gives {found} for a batch of {samples}; one tensor [{samples}, k] of floats is wanted, the logits "
        f"of k classes, with k at least {class_count}, the data's class_count"
    )
