"""Every model by name, as users get it but smaller, for every task that it is made for.

Nothing is left to chance: dropout is 0, and BatchNorm is in eval mode. Its statistics are those of one batch, for with
the initial ones a deep network's outputs grow from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from torch_parallel.training.sampler import epoch_order
from torch_parallel.workloads.load import Choice, load_workload
from torch_parallel.workloads.models import convolutional, images, sizes, transformers
from torch_parallel.workloads.models.transformers import Stack
from torch_parallel.workloads.task import IGNORED
from torch_parallel.workloads.tree import Tree
from torch_parallel.workloads.workload import Workload

TRAIN_SIZE, TEST_SIZE, LENGTH, SIDE = 22, 7, 24, 8
WORKERS, BATCH, EPOCHS = 3, 5, 2
"""22 samples in batches of 5 are 5 steps an epoch, so 10 in all. The last has 2 samples: one of three workers has none.
"""
WORDS = (
    *("the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "and", "two", "dogs"),
    *("ran", "home", "over", "wet", "hills", "to", "eat", "their", "warm", "food", "alone"),
)


class Case(NamedTuple):
    """A model, and what it is trained on: images, or one of three kinds of texts.

    Transformers are trained by SGD: their key biases get no gradient but rounding, which Adam would magnify.
    """

    model: str
    data: str
    size: str | None = "tiny"
    optimizer: str = "sgd"
    lr: float = 0.05
    accumulate: int = 2


TEXT_CASES = {
    "bert of categories": Case("bert", "categories"),
    "bert of hidden tokens": Case("bert", "hidden tokens"),
    "distilbert of categories": Case("distilbert", "categories", accumulate=1),
    "distilbert of hidden tokens": Case("distilbert", "hidden tokens", accumulate=1),
    "gpt2 of next tokens": Case("gpt2", "next tokens"),
    "gpt2 of categories": Case("gpt2", "categories", accumulate=1),
}
IMAGE_CASES = {
    "mlp": Case("mlp", "images", None, "adamw", 0.001),
    "cnn": Case("cnn", "images", None),
    "mobilenet_v2": Case("mobilenet_v2", "images", "tiny", "adamw", 0.001),
    "vgg16": Case("vgg16", "images", "tiny", "adamw", 0.001, accumulate=1),
    "resnet50": Case("resnet50", "images", lr=0.001),
    "torchvision_vit": Case("torchvision_vit", "images", None),
    "vit": Case("vit", "images", accumulate=1),
}
CASES = {**TEXT_CASES, **IMAGE_CASES}


@contextmanager
def smaller() -> Iterator[None]:
    """Meanwhile the sizes "tiny" are smaller still, and so is torchvision's vision transformer."""
    tiny = {"bert": Stack(2, 16, 2), "distilbert": Stack(1, 16, 2), "gpt2": Stack(2, 16, 2, 32), "vit": Stack(2, 16, 2)}
    with ExitStack() as changed:
        for name, stack in tiny.items():
            changed.enter_context(mock.patch.dict(transformers.FAMILIES[name].stacks, tiny=stack))
        changed.enter_context(mock.patch.dict(convolutional.VGG_DIVISORS, tiny=32))
        changed.enter_context(mock.patch.dict(convolutional.RESNET_WIDTHS, tiny=8))
        changed.enter_context(mock.patch.dict(convolutional.MOBILENET_MULTIPLIERS, tiny=0.1))
        changed.enter_context(mock.patch("torchvision.models.resnet.Bottleneck.expansion", 1))  # not 4
        changed.enter_context(mock.patch.dict(sizes.IMAGE_SIDES, tiny=SIDE))
        changed.enter_context(mock.patch.multiple(images, VIT_LAYERS=1, VIT_WIDTH=24))
        yield


def small_workload(case: Case, folder: Path) -> Workload:
    """What `load_workload` gives for the names and files, with another `make_model`, and targets spread unevenly."""
    write_texts(folder)
    files = {"images": "digits", "categories": "table.csv", "hidden tokens": "text.txt", "next tokens": "text.txt"}
    dataset = "digits" if case.data == "images" else str(folder / files[case.data])
    with smaller():
        choice = Choice(case.model, dataset, None, TRAIN_SIZE, TEST_SIZE, 0, case.size)
        workload, _ = load_workload(choice if case.data == "images" else replace(choice, length=LENGTH))
    make_model = partial(workload.make_model, dropout=0.0)  # type: ignore[call-arg]
    workload = replace(workload, make_model=partial(left_to_no_chance, make_model, statistics_of(make_model, workload)))
    samples = workload.samples
    return replace(workload, samples=replace(samples, train=unevenly(case.data, samples.train)))


def write_texts(folder: Path) -> None:
    """A table of texts of 1 to 23 words in three categories, and a running text."""
    lines = [" ".join(WORDS[: 1 + 7 * k % 23]) for k in range(120)]
    table = "".join(f"{('sport', 'news', 'tech')[k % 3]},{line} {k}\n" for k, line in enumerate(lines))
    for name, content in (("table.csv", f"category,text\n{table}"), ("text.txt", "\n".join(lines))):
        if not (folder / name).exists():
            (folder / name).write_text(content, encoding="utf-8")


def unevenly(data: str, part: Tree) -> Tree:
    """Some samples lose all or most of their targets. In the first step the first of three workers has none."""
    none = epoch_order(TRAIN_SIZE, 0, 1)[: -(-BATCH // WORKERS)]
    if data == "next tokens":
        count = torch.arange(TRAIN_SIZE) * 5 % (LENGTH + 1)
        return {**part, "count": count.index_fill(0, none, 0)}
    if data == "hidden tokens":
        return {**part, "targets": part["targets"].index_fill(0, none, IGNORED)}
    return part


def statistics_of(make_model: Callable[[], nn.Module], workload: Workload) -> dict[str, Tensor]:
    """Of each BatchNorm of a model, by the buffers' names: mean and variance of what the training images come to."""
    with smaller(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model().to(torch.float64).train()
    layers = batch_norms(model)
    for layer in layers.values():
        layer.momentum = 1.0
    if layers:
        model(workload.task.prepare(workload.samples.train, torch.float64)["inputs"])
    for layer in layers.values():  # where a channel is nothing but zeros, it would be magnified by hundreds
        layer.running_var.clamp_(min=0.1)
    return {f"{name}.{key}": each for name, layer in layers.items() for key, each in layer.named_buffers()}


def batch_norms(model: nn.Module) -> dict[str, nn.BatchNorm2d]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)}


def left_to_no_chance(make_model: Callable[[], nn.Module], statistics: dict[str, Tensor]) -> nn.Module:
    """The model with these statistics, in training mode but for BatchNorm."""
    with smaller():
        model = make_model().train()
    missing = model.load_state_dict(statistics, strict=False)
    assert not missing.unexpected_keys
    for layer in batch_norms(model).values():
        layer.eval()
    return model


def options(case: Case) -> dict[str, Any]:
    """The flags of a run of it."""
    return {"optimizer": case.optimizer, "lr": case.lr, "batch_size": BATCH, "epochs": EPOCHS, "dtype": "float64"}
