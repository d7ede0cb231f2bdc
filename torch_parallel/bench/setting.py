"""What both sides of a comparison of training steps train: a model by name and size, on samples made on the spot.

What a step costs depends on the shapes of the samples and not on what they show, so no file is read. Images are random
numbers. Texts are random tokens and all of the same length; of bert's and distilbert's one of seven is hidden.

Dropout stays as the models have it. Before its steps each side seeds torch's generators alike, so both draw the same
masks, and their parameters may differ by rounding alone.
"""

from __future__ import annotations

import itertools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from torch_parallel.communicator import Communicator
from torch_parallel.gradients.layout import NamedParameters
from torch_parallel.strategies.shares import shard
from torch_parallel.training.compiling import compile_layers
from torch_parallel.training.optimizers import DEFAULT_LR, make_optimizer
from torch_parallel.workloads import MODELS, build_model, image_side
from torch_parallel.workloads.forms import Form, ImageForm, TextForm, TextTask
from torch_parallel.workloads.load import DEFAULT_LENGTH, LENGTH
from torch_parallel.workloads.models import IMAGES
from torch_parallel.workloads.samples import Samples
from torch_parallel.workloads.task import (
    IGNORED,
    Classification,
    MaskedTokens,
    NextToken,
    Task,
    TextClassification,
    target_counts,
)
from torch_parallel.workloads.tree import Tree, rows
from torch_parallel.workloads.workload import Workload

FEATURES, CLASSES = 784, 10
USUAL_SIDE = {"cnn": 28}
USUAL_CHANNELS = {"cnn": 1}
PUBLISHED_SIDE, PUBLISHED_CHANNELS = 224, 3
"""Pixels and channels of the images of models that are not in the two above, and have no size."""
VOCABULARY_SIZES = {"bert": 30522, "distilbert": 30522, "gpt2": 50257}
"""As published."""
HIDDEN_PART = 1 / 7


@dataclass(frozen=True)
class Setting:
    """What both sides train. None is what is usual for the model."""

    parameters: int  # of "mlp"
    batch_size: int  # of all workers together
    optimizer: str
    model: str = "mlp"
    image_side: int | None = None  # pixels
    precision: str = "full"
    compile: bool = False
    bucket_mb: float = 25.0
    ddp_bucket_mb: float = 25.0  # torch's own default
    model_size: str | None = None
    task: str | None = None  # of texts
    length: int | None = None  # tokens of a text
    vocabulary_size: int | None = None

    @property
    def is_text(self) -> bool:
        return self.model in VOCABULARY_SIZES

    @property
    def form(self) -> Form:
        """Of the samples, for models other than "mlp". Raises ValueError for a size that the model has not."""
        usual = image_side(self.model, self.model_size) or USUAL_SIDE.get(self.model, PUBLISHED_SIDE)
        if not self.is_text:
            side = usual if self.image_side is None else self.image_side
            return ImageForm(USUAL_CHANNELS.get(self.model, PUBLISHED_CHANNELS), side, side, CLASSES)
        length = LENGTH.get(self.model, DEFAULT_LENGTH) if self.length is None else self.length
        vocabulary = VOCABULARY_SIZES[self.model] if self.vocabulary_size is None else self.vocabulary_size
        return TextForm(vocabulary, length, CLASSES, cast(TextTask, self.task or usual_task(self.model)))

    @property
    def tokens(self) -> int | None:
        """Of a sample; None where it is no text."""
        return self.form.length if self.is_text and isinstance(self.form, TextForm) else None

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)

    def make_model(self, device: torch.device | None = None) -> nn.Module:
        torch.manual_seed(0)
        model = self.bare_model()
        model.to(device)
        if self.compile:
            compile_layers(model)
        return model

    def bare_model(self) -> nn.Module:
        return self._mlp() if self.model == "mlp" else build_model(self.model, self.form, size=self.model_size)

    def _mlp(self) -> nn.Module:
        """A multi-layer perceptron of about that many parameters, three quarters of them in its two square layers."""
        # 2 h^2 + (FEATURES + CLASSES + 3) h parameters
        linear = FEATURES + CLASSES + 3
        width = max(1, round((math.sqrt(linear**2 + 8 * self.parameters) - linear) / 4))
        sizes = (FEATURES, width, width, width, CLASSES)
        layers = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]
        return nn.Sequential(*(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1])

    def make_optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        return make_optimizer(parameters, self.optimizer, DEFAULT_LR[self.optimizer], momentum=0.9, weight_decay=0.0)

    def workload(self, sample_count: int) -> Workload:
        """The model, its task, and so many samples, the same ones in every process."""
        task, made = self._samples(sample_count, torch.Generator().manual_seed(1))
        return Workload(self.bare_model, task, Samples("made up", made, made), self.model)

    def batch(self, communicator: Communicator) -> tuple[Task, Tree, int]:
        """The task; this worker's part, prepared, of the batch that every step takes, empty on a server; and how many
        targets the whole batch has."""
        workload = self.workload(self.batch_size)
        whole, task = workload.samples.train, workload.task
        counts = target_counts(task, workload.samples.name, whole)
        mine = shard(self.batch_size, communicator.worker_index, communicator.worker_count)
        batch = task.prepare(rows(whole, mine, communicator.device), torch.float32)
        return task, batch, self.batch_size if counts is None else int(counts.sum())

    def _samples(self, count: int, generator: torch.Generator) -> tuple[Task, dict[str, Tensor]]:
        if self.is_text and isinstance(self.form, TextForm):
            return _texts(self.form, count, generator)
        form = self.form if self.model != "mlp" else None
        shape = (form.channels, form.height, form.width) if isinstance(form, ImageForm) else (FEATURES,)
        inputs = torch.randn(count, *shape, generator=generator)
        targets = torch.randint(0, CLASSES, (count,), generator=generator)
        return Classification(CLASSES), {"inputs": inputs, "targets": targets}

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()


def usual_task(model: str) -> str | None:
    """What a model is trained to do with running text, as `train.py` does; None for models for images."""
    takes = MODELS[model].takes
    return next((task for task in ("masked", "next_token") if task in takes), None) if IMAGES not in takes else None


def _texts(form: TextForm, count: int, generator: torch.Generator) -> tuple[Task, dict[str, Tensor]]:
    """Whole texts: nothing is filled up, and the mask shows all."""
    width = form.length + (form.task == "next_token")
    tokens = torch.randint(0, form.vocabulary_size, (count, width), generator=generator, dtype=torch.int32)
    if form.task == "next_token":
        return NextToken(form.vocabulary_size), {"tokens": tokens, "count": torch.full((count,), form.length)}
    fed = {"tokens": tokens, "mask": torch.ones(count, width, dtype=torch.bool)}
    if form.task == "classification":
        targets = torch.randint(0, form.class_count, (count,), generator=generator)
        return TextClassification(form.class_count), {**fed, "targets": targets}
    hidden = torch.rand(count, width, generator=generator) < HIDDEN_PART
    hidden[:, 0] = True  # so that every worker has a target
    targets = torch.randint(0, form.vocabulary_size, (count, width), generator=generator)
    return MaskedTokens(form.vocabulary_size), {**fed, "targets": targets.masked_fill(~hidden, IGNORED)}
