"""Operations of a step, worked out by hand: 2 a number of the weight and a row, three times in forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_parallel.workloads import ImageForm, TextForm, build_model
from torch_parallel.workloads.flops import arithmetic, flops_of_step
from torch_parallel.workloads.samples import Samples
from torch_parallel.workloads.task import Classification, MaskedTokens, NextToken, Task, TextClassification
from torch_parallel.workloads.tree import Tree
from torch_parallel.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH, VOCABULARY = 10, 50


def of(model: Callable[[], nn.Module], inputs: Tensor, task: Task | None = None) -> Workload:
    batch = {"inputs": inputs, "targets": torch.zeros(len(inputs), dtype=torch.int64)}
    return Workload(model, task or Classification(3), Samples("ours", batch, batch))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def of_two_layers(rows: int) -> int:
    """The first layer's inputs are data, and need no gradient."""
    return 2 * 2 * rows * 8 * 5 + 3 * 2 * rows * 5 * 3


def test_linear_layers_of_a_batch_larger_than_the_samples_and_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    assert flops_of_step(of(two_layers, torch.zeros(2, 8)), 7) == of_two_layers(7)
    assert torch.equal(torch.get_rng_state(), before)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 8, 5, groups=8, padding=2),
        nn.Conv2d(8, 12, 1, stride=2, groups=2),
        nn.ConvTranspose2d(12, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 3),
    )


def test_convolutions_also_of_channels_apart() -> None:
    """A number of the weight for each of the 6 x 6 pixels of what comes out, or 3 x 3; transposed, of what goes in."""
    first = 2 * (36 * 8 * 3 * 9)  # no gradient of the image
    later = 3 * (36 * 8 * 1 * 25 + 9 * 12 * 4 * 1 + 9 * 12 * 4 * 4 + 144 * 3)
    images = of(convolutions, torch.zeros(2, 3, 6, 6, dtype=torch.uint8), Classification(3, (0.5,) * 3, (1.0,) * 3))
    assert flops_of_step(images, 5) == 5 * 2 * (first + later)


@pytest.mark.parametrize(
    ("name", "published", "first"),
    [("resnet50", 4.089e9, 112**2 * 64 * 3 * 7**2), ("vgg16", 15.470e9, 224**2 * 64 * 3 * 3**2)],
)
def test_networks_of_images_as_torchvision_publishes_them(name: str, published: float, first: int) -> None:
    """Multiplications with additions of forward for one image; the gradient of the image is left out."""
    model = partial(build_model, name, ImageForm(3, 224, 224, 1000), size="base")
    images = of(model, torch.zeros(1, 3, 224, 224), Classification(1000))
    assert flops_of_step(images, 1) == pytest.approx(2 * (3 * published - first), rel=1e-3)


def of_layers(rows: int, layers: int, width: int) -> int:
    """Of a text each token: 4 * width**2 weights of attention, 8 * width**2 of the MLP, and two products of tokens.

    Tokens are embedded, and the embeddings are learnt: the first layer's inputs need a gradient too.
    """
    weights, products = 12 * width**2, 2 * LENGTH * width
    return 6 * rows * LENGTH * layers * (weights + products)


def texts(name: str, task: Any, kind: Any) -> Workload:
    tokens = torch.zeros(2, LENGTH + (kind == "next_token"), dtype=torch.int32)
    batch: Tree = {"tokens": tokens, "mask": torch.ones(2, LENGTH, dtype=torch.bool)}
    batch["targets"] = torch.zeros((2,) if kind == "classification" else (2, LENGTH), dtype=torch.int64)
    if kind == "next_token":
        batch = {"tokens": tokens, "count": torch.full((2,), LENGTH)}
    model = partial(build_model, name, TextForm(VOCABULARY, LENGTH, 3, kind), size="tiny")
    return Workload(model, task, Samples("ours", batch, batch))


def test_transformers_of_texts() -> None:
    """tiny: bert has 2 layers of width 128, distilbert 1, and gpt2 4 of width 256.

    Hidden tokens are told by a layer [width, width] and one [width, vocabulary], classes of one token by two such.
    """
    rows = 3
    head = 6 * rows * LENGTH * (128**2 + 128 * VOCABULARY)
    masked = MaskedTokens(VOCABULARY)
    assert flops_of_step(texts("bert", masked, "masked"), rows) == of_layers(rows, 2, 128) + head
    assert flops_of_step(texts("distilbert", masked, "masked"), rows) == of_layers(rows, 1, 128) + head
    classes = 6 * rows * (128**2 + 128 * 3)
    workload = texts("bert", TextClassification(3), "classification")
    assert flops_of_step(workload, rows) == of_layers(rows, 2, 128) + classes
    head = 6 * rows * LENGTH * 256 * VOCABULARY
    workload = texts("gpt2", NextToken(VOCABULARY), "next_token")
    assert flops_of_step(workload, rows) == of_layers(rows, 4, 256) + head


class Asking(nn.Module):
    """Looks at its numbers, which it cannot do without any."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.layers, self.refuses = two_layers(), refuses

    def forward(self, inputs: Tensor) -> Tensor:
        if self.refuses or inputs.sum() != 0:
            raise RuntimeError("no")
        output: Tensor = self.layers(inputs)
        return output


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_model_that_looks_at_its_numbers_is_counted_on_a_few_samples(samples: int) -> None:
    assert flops_of_step(of(Asking, torch.zeros(samples, 8)), 7) == of_two_layers(7)


def test_what_cannot_be_counted() -> None:
    assert flops_of_step(of(partial(Asking, True), torch.zeros(2, 8)), 7) is None
    with pytest.raises(ValueError, match=r"^batch_size is 0; a whole number of at least 1 is wanted$"):
        flops_of_step(of(two_layers, torch.zeros(2, 8)), 0)


class Fixed(nn.Module):
    """A model of weights that are there already, as of a file."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 5, device="cpu"), nn.Linear(5, 3, device="cpu")
        with torch.no_grad():
            self.first.weight.copy_(weight)  # which cannot be read on the device without memory

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(inputs))
        return output


@dataclass
class Made:
    calls: int = 0

    def __call__(self) -> nn.Module:
        self.calls += 1
        return Fixed(torch.ones(5, 8))


def test_a_model_that_needs_its_weights_is_made_with_them_and_counted_without() -> None:
    made = Made()
    assert flops_of_step(of(made, torch.zeros(2, 8)), 7) == of_two_layers(7)
    assert made.calls == 2


def test_what_products_are_computed_in() -> None:
    """torch's defaults: convolutions may have tf32, matrix multiplications may not."""
    assert arithmetic(two_layers(), "full") == arithmetic(nn.Conv2d(3, 8, 4), "full") == "full"
    assert arithmetic(convolutions(), "full") == "tf32"
    assert arithmetic(convolutions(), "bf16") == "bf16"
