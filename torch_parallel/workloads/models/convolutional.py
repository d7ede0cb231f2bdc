"""Convolutional networks that have sizes: a size is a width of the layers, and the side of the images it is for.

`base` has the published widths, and so has a model that is given no size. Each is made for the side that the images
have, whatever its size: from 64 pixels on the strides are those published for ImageNet's 224, and below 64 the image
is halved less often, so that something is left of it. Dropout is as published.

Parameters for the images of the size (32, 64, 224 and 224 pixels), three channels and 1,000 classes:

                         tiny        small         base        large
    mobilenet_v2    1,677,128    1,968,680    3,504,872    6,108,776     widths x 0.35, 0.5, 1 and 1.4, as in the paper
    vgg16           2,612,368    9,418,936  138,357,544           no     widths x 1/8, 1/4 and 1
    resnet50        6,206,280    7,916,264   25,557,032   68,883,240     each block's middle x 1/8, 1/4, 1 and 2
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from torch_parallel.workloads.models.images import ImageShape
from torch_parallel.workloads.models.imports import leaving_no_trace

IMAGENET_SIDE = 64  # pixels; from here on strides are as published


MOBILENET_STAGES = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)
"""Table 2 of the paper, as torchvision wants it: expansion, channels, blocks, stride of the first block."""
MOBILENET_MULTIPLIERS = {"tiny": 0.35, "small": 0.5, "base": 1.0, "large": 1.4}


def mobilenet_v2(image_shape: ImageShape, class_count: int, size: str | None = None) -> nn.Module:
    """torchvision's MobileNetV2 (Sandler et al., 2018, arXiv:1801.04381), for small images less often halved.

    Below 64 pixels, and wherever no size is given, the first two halvings are left out. ImageNet's 224 x 224 pixels end
    as 7 x 7; 32 x 32 would end as 1 x 1, and end as 4 x 4 without those two, as 28 x 28 does. Dropout 0.2 before the
    last layer. 2,223,008 + 288C + 1,281 * class_count parameters for size base or none, whatever H and W.
    """
    with leaving_no_trace():
        from torchvision.models import MobileNetV2  # here, because the import takes 2 s

    channels, height, width = image_shape
    published = size is not None and min(height, width) >= IMAGENET_SIDE
    model: nn.Module = MobileNetV2(
        num_classes=class_count,
        width_mult=MOBILENET_MULTIPLIERS[size or "base"],
        inverted_residual_setting=MOBILENET_STAGES if published else _stages(min(height, width)),
    )
    first_width = model.get_parameter("features.0.0.weight").shape[0]
    stride = 2 if published else 1
    first = nn.Conv2d(channels, first_width, kernel_size=3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out")  # as torchvision does for the one that this replaces
    model.get_submodule("features.0").register_module("0", first)
    return model


def _stages(side: int) -> list[list[int]]:
    """The stages for small images, with the strides that their side allows."""
    stages = [list(stage) for stage in MOBILENET_STAGES]
    for index, stage in enumerate(stages):
        # Stop at 2 x 2: BatchNorm raises if a worker's shard is one sample of one pixel, and 8 x 8 would come to that.
        halve = index in (2, 3, 5) and side >= 4
        side = (side + 1) // 2 if halve else side
        stage[3] = 2 if halve else 1
    return stages


VGG_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and convolutions, each stage with a halving behind it: configuration D of the paper."""
VGG_DIVISORS = {"tiny": 8, "small": 4, "base": 1}


def vgg16(image_shape: ImageShape, class_count: int, size: str | None = None) -> nn.Module:
    """VGG16 (Simonyan and Zisserman, 2015, arXiv:1409.1556) with torchvision's names, shapes and initial weights.

    Sixteen layers without BatchNorm; nearly nine tenths of the parameters are in the three linear ones. The image is
    halved behind each stage while a pixel is left of it: 32 pixels five times, 28 four times. What is left is
    pooled, or repeated, to 7 x 7. Dropout 0.5 twice. It is built without torchvision's import.
    """
    channels, height, width = image_shape
    divisor = VGG_DIVISORS[size or "base"]
    last, hidden = 512 // divisor, 4096 // divisor
    model = nn.Sequential(
        OrderedDict(
            features=_vgg_features(channels, min(height, width), divisor),
            avgpool=nn.AdaptiveAvgPool2d(7),
            flatten=nn.Flatten(),
            classifier=nn.Sequential(
                *(nn.Linear(last * 7 * 7, hidden), nn.ReLU(inplace=True), nn.Dropout()),
                *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout()),
                nn.Linear(hidden, class_count),
            ),
        )
    )
    _initialise_vgg(model, divisor)
    return model


def _vgg_features(channels: int, side: int, divisor: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for published_width, convolutions in VGG_STAGES:
        width = published_width // divisor
        for inputs in (channels, *[width] * (convolutions - 1)):
            layers += [nn.Conv2d(inputs, width, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
        channels = width
        if side >= 2:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    return nn.Sequential(*layers)


def _initialise_vgg(model: nn.Module, divisor: int) -> None:
    """As torchvision does. Where layers are narrower, the linear ones' weights are larger by the root of that.

    A sum over fewer inputs varies less. So the outputs vary as much as those of the published widths.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01 * divisor**0.5)
        else:
            continue
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


RESNET_WIDTHS = {"tiny": 8, "small": 16, "base": 64, "large": 128}
"""Channels in the middle of the first stage's blocks. With 128 it is torchvision's wide_resnet50_2."""


def resnet50(image_shape: ImageShape, class_count: int, size: str | None = None) -> nn.Module:
    """torchvision's ResNet50 (He et al., 2016, arXiv:1512.03385), for small images with CIFAR's first layer.

    Below 64 pixels the image goes through a 3 x 3 convolution of stride 1 and is not pooled before the first block. The
    sizes differ in the width of each block's middle, where its 3 x 3 convolution is, as in Wide ResNet (Zagoruyko and
    Komodakis, 2016, arXiv:1605.07146); the outputs of the blocks have the published 256 to 2,048 channels.
    """
    with leaving_no_trace():
        from torchvision.models.resnet import Bottleneck, ResNet

    channels, height, width = image_shape
    side = min(height, width)
    middle = RESNET_WIDTHS[size or "base"]
    model: nn.Module = ResNet(Bottleneck, [3, 4, 6, 3], num_classes=class_count, width_per_group=middle)
    kernel, stride = (7, 2) if side >= IMAGENET_SIDE else (3, 1)
    first = nn.Conv2d(channels, 64, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
    model.register_module("conv1", first)
    if side < IMAGENET_SIDE:
        model.register_module("maxpool", nn.Identity())
        _halve_less(model, side)
    return model


def _halve_less(model: nn.Module, side: int) -> None:
    """Later stages of a ResNet stop halving at 2 x 2: BatchNorm raises for one sample of one pixel."""
    for stage in ("layer2", "layer3", "layer4"):
        if side >= 4:
            side = (side + 1) // 2
            continue
        for layer in ("conv2", "downsample.0"):
            convolution = model.get_submodule(f"{stage}.0.{layer}")
            assert isinstance(convolution, nn.Conv2d)
            convolution.stride = (1, 1)
