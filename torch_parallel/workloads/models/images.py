"""Models for images that have no sizes. Each is a function of the images' shape and the number of classes."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from torch_parallel.workloads.models.imports import leaving_no_trace
from torch_parallel.workloads.models.sizes import square_patch_side

ImageShape = tuple[int, int, int]  # channels C, height H, width W


def mlp(image_shape: ImageShape, class_count: int) -> nn.Module:
    """C*H*W -> 256 -> 128 -> class_count with ReLU between.

    (C*H*W + 1) * 256 + 257 * 128 + 129 * class_count parameters.
    """
    channels, height, width = image_shape
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, class_count),
    )
    _initialise_for_relu(model)
    return model


def cnn(image_shape: ImageShape, class_count: int) -> nn.Module:
    """LeNet-5 (LeCun et al., 1998) as it is taught today: ReLU, max pooling, every layer connected to all channels.

    Both convolutions are padded, so that an image of 8 x 8 pixels is enough and [6, H/2, W/2], [16, H/4, W/4] follow.
    (25C + 1) * 6 + 2,416 + (16 * (H//4) * (W//4) + 1) * 120 + 10,164 + 85 * class_count parameters.
    """
    channels, height, width = image_shape
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5, padding=2),  # [6, H, W]
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),  # [6, H/2, W/2]
            conv2=nn.Conv2d(6, 16, 5, padding=2),  # [16, H/2, W/2]
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),  # [16, H/4, W/4]
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * (height // 4) * (width // 4), 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, class_count),
        )
    )
    _initialise_for_relu(model)
    return model


def _initialise_for_relu(model: nn.Module) -> None:
    """Weights whose outputs vary as much as their inputs do after a ReLU (He et al., 2015, arXiv:1502.01852).

    torch's own have a sixth of that variance. Through five layers little is left of what tells two images apart, and
    SGD then needs some hundred steps until the loss begins to fall.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


VIT_LAYERS, VIT_WIDTH = 16, 768


def torchvision_vit(image_shape: ImageShape, class_count: int) -> nn.Module:
    """torchvision's vision transformer (Dosovitskiy et al., 2021, arXiv:2010.11929): ViT-Base with 16 layers, not 12.

    Width 768, 12 heads, 3072 in the middle of each MLP, no dropout. An image is cut into patches of p x p pixels:
    p is 16 where a side has 64 pixels or more, 4 from 16 pixels on, and 2 below.
    113,408,256 + 768 * (p*p*C + (H/p)*(W/p) + 2) + 769 * class_count parameters: 114,919,144 for ImageNet's
    [3, 224, 224] and 1,000 classes. Raises ValueError for images that are not square or that p does not divide.
    """
    with leaving_no_trace():
        from torchvision.models import VisionTransformer  # here, because the import takes 2 s

    channels, _, width = image_shape
    patch = square_patch_side("torchvision_vit", image_shape)
    model: nn.Module = VisionTransformer(width, patch, VIT_LAYERS, 12, VIT_WIDTH, 3072, num_classes=class_count)
    if channels != 3:
        first = nn.Conv2d(channels, VIT_WIDTH, kernel_size=patch, stride=patch)
        nn.init.trunc_normal_(first.weight, std=math.sqrt(1 / (channels * patch**2)))  # as torchvision does for three
        nn.init.zeros_(first.bias)  # type: ignore[arg-type]
        model.register_module("conv_proj", first)
    return model
