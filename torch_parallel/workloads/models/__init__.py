"""Every model, by name: four sizes of image classifier. All but vit work for any image of 4 x 4 pixels or more.

Parameters for MNIST's [1, 28, 28] and ten classes:

    mlp             235,146     three linear layers, two of which hold nearly everything
    cnn             107,786     LeNet: a few tensors of very different sizes, the usual example
    mobilenet_v2  2,236,106     158 small tensors, with BatchNorm and dropout: what exchanging in buckets is for
    vit         113,467,402     a transformer: large layers, all alike; for GPUs and images as large as ImageNet's
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from torch_parallel.workloads.models.images import ImageShape, cnn, mlp, mobilenet_v2, vit

MIN_SIDE = 4  # cnn halves the image twice

MODELS: dict[str, Callable[[ImageShape, int], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "mobilenet_v2": mobilenet_v2,
    "vit": vit,
}


def build_model(name: str, image_shape: ImageShape, class_count: int) -> nn.Module:
    """A freshly initialised model that maps [b, C, H, W] to [b, class_count] logits; `image_shape` is (C, H, W).

    The weights come from torch's global generator: seed it first. Raises ValueError for an unknown name, an image with
    a side below 4 pixels, no channel or class, and an image that vit cannot cut into patches.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; choose from {', '.join(MODELS)}")
    channels, height, width = image_shape
    if min(height, width) < MIN_SIDE or channels < 1 or class_count < 1:
        raise ValueError(f"no model for {class_count} classes of images {image_shape} (channels, height, width)")
    return MODELS[name](image_shape, class_count)


__all__ = ["MIN_SIDE", "MODELS", "ImageShape", "build_model", "cnn", "mlp", "mobilenet_v2", "vit"]
