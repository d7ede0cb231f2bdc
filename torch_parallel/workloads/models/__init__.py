"""Every model, by name: networks for images, and transformers for texts and images.

Parameters for MNIST's [1, 28, 28] and ten classes:

    mlp                 235,146     three linear layers, two of which hold nearly everything
    cnn                 107,786     LeNet: a few tensors of very different sizes, the usual example
    mobilenet_v2      2,236,106     158 small tensors, with BatchNorm and dropout: what exchanging in buckets is for
    torchvision_vit 113,467,402     a transformer: large layers, all alike; for GPUs and images as large as ImageNet's

These and others come in the sizes tiny, small, base and large: see `convolutional.py` and `transformers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from torch_parallel.workloads.forms import Form, ImageForm, TextForm
from torch_parallel.workloads.models.convolutional import mobilenet_v2, resnet50, vgg16
from torch_parallel.workloads.models.images import ImageShape, cnn, mlp, torchvision_vit
from torch_parallel.workloads.models.pretrained import load_pretrained
from torch_parallel.workloads.models.sizes import IMAGE_SIDES, SIZES, SIZES_WITHOUT_LARGE
from torch_parallel.workloads.models.transformers import FAMILIES, build_transformer, check_dropout

MIN_SIDE = 4  # pixels; cnn halves the image twice
IMAGES = "images"


@dataclass(frozen=True)
class Model:
    """How a model is built of the data's form, a size and a dropout; its sizes; and images, or the tasks it is for."""

    build: Callable[[Form, str | None, float | None], nn.Module]
    sizes: tuple[str, ...] = ()
    takes: tuple[str, ...] = (IMAGES,)


def of_images(build: Callable[..., nn.Module], sizes: tuple[str, ...] = ()) -> Model:
    """A model that is a function of (channels, height, width) and the classes, and of the size if there are any."""
    return Model(partial(_build_for_images, build), sizes)


def _build_for_images(
    build: Callable[..., nn.Module], form: ImageForm, size: str | None, dropout: float | None
) -> nn.Module:
    shape = (form.channels, form.height, form.width)
    model = build(shape, form.class_count) if size is None else build(shape, form.class_count, size)
    if dropout is not None:
        _set_dropout(model, dropout, build.__name__)
    return model


def _set_dropout(model: nn.Module, dropout: float, name: str) -> None:
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Dropout)]
    if not layers and dropout:
        raise ValueError(f"dropout is {dropout}, but {name} has none; leave it out, or take 0")
    for layer in layers:
        layer.p = dropout
    for attention in model.modules():
        if isinstance(attention, nn.MultiheadAttention):
            attention.dropout = dropout


def _of_family(name: str) -> Model:
    takes = (IMAGES,) if name == "vit" else tuple(FAMILIES[name].classes)
    return Model(partial(build_transformer, name), tuple(FAMILIES[name].stacks), takes)


MODELS: dict[str, Model] = {
    "mlp": of_images(mlp),
    "cnn": of_images(cnn),
    "mobilenet_v2": of_images(mobilenet_v2, SIZES),
    "vgg16": of_images(vgg16, SIZES_WITHOUT_LARGE),
    "resnet50": of_images(resnet50, SIZES),
    "torchvision_vit": of_images(torchvision_vit),
    "vit": _of_family("vit"),
    "bert": _of_family("bert"),
    "distilbert": _of_family("distilbert"),
    "gpt2": _of_family("gpt2"),
}


def build_model(
    name: str,
    form_or_image_shape: Form | ImageShape,
    class_count: int | None = None,
    size: str | None = None,
    dropout: float | None = None,
) -> nn.Module:
    """A freshly initialised model for data of this form: an `ImageForm`, a `TextForm`, or (C, H, W) with `class_count`.

    Networks for images map [b, C, H, W] to [b, class_count] logits. The transformers vit, bert, distilbert and gpt2
    give an output with `.logits`: [b, class_count], or [b, length, vocabulary_size] for next_token and masked.
    `size` is tiny, small, base or large; without one, the published model. `dropout` replaces all its probabilities.

    The weights come from torch's global generator: seed it first. Raises ValueError, in one line, for an unknown name,
    a size that the model has not, data that it cannot take, and a dropout outside 0..1.
    """
    form = _form_of(form_or_image_shape, class_count)
    model = _model_of_size(name, size)
    _check_takes(name, form)
    _check_numbers(form)
    check_dropout(dropout)
    return model.build(form, size, dropout)


def image_side(name: str, size: str | None) -> int | None:
    """Pixels of the sides to which images are resized for a model of this size; None: they stay as they are.

    Raises ValueError for an unknown name and for a size that the model has not.
    """
    model = _model_of_size(name, size)
    return None if size is None or IMAGES not in model.takes else IMAGE_SIDES[size]


def _model_of_size(name: str, size: str | None) -> Model:
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; choose from {', '.join(MODELS)}")
    sizes = MODELS[name].sizes
    if size is None or size in sizes:
        return MODELS[name]
    if not sizes:
        raise ValueError(f"size is {size!r}, but {name} comes in one size only; leave it out")
    raise ValueError(f"size is {size!r}, but there is no such {name}; choose from {', '.join(sizes)}")


def _form_of(given: Form | ImageShape, class_count: int | None) -> Form:
    if isinstance(given, ImageForm | TextForm):
        if class_count is not None:
            raise ValueError(f"class_count is {class_count}, but {given} has one already; leave it out")
        return given
    try:
        channels, height, width = given
    except (TypeError, ValueError):
        found = f"the data's form is {given!r}"
        raise ValueError(f"{found}; an ImageForm, a TextForm or (channels, height, width) is wanted") from None
    if class_count is None:
        raise ValueError(f"class_count is missing; give the number of classes of the images {tuple(given)}")
    return ImageForm(channels, height, width, class_count)


def _check_takes(name: str, form: Form) -> None:
    kind = IMAGES if isinstance(form, ImageForm) else form.task
    if kind in MODELS[name].takes:
        return
    able = ", ".join(other for other in MODELS if kind in MODELS[other].takes)
    if not able:
        tasks = dict.fromkeys(task for model in MODELS.values() for task in model.takes if task != IMAGES)
        raise ValueError(f"there is no task {kind!r}; choose from {', '.join(tasks)}")
    data = "images" if kind == IMAGES else f"texts with the task {kind}"
    raise ValueError(f"{name} cannot take {data}; choose from {able}")


def _check_numbers(form: Form) -> None:
    if isinstance(form, ImageForm):
        shape = (form.channels, form.height, form.width)
        if min(form.height, form.width) < MIN_SIDE or form.channels < 1 or form.class_count < 1:
            raise ValueError(
                f"no model for {form.class_count} classes of images {shape} (channels, height, width); sides of "
                f"{MIN_SIDE} pixels, 1 channel and 1 class are the least"
            )
        return
    classes = form.class_count if form.task == "classification" else 1
    if min(form.vocabulary_size, form.length, classes) < 1:
        raise ValueError(f"no model for {form}; 1 token in the vocabulary, length 1 and 1 class are the least")


__all__ = [
    "MIN_SIDE",
    "MODELS",
    "ImageShape",
    "Model",
    "build_model",
    "cnn",
    "image_side",
    "load_pretrained",
    "mlp",
    "mobilenet_v2",
    "of_images",
    "resnet50",
    "torchvision_vit",
    "vgg16",
]
