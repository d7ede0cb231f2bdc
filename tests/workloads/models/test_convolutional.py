"""Convolutional networks with sizes: the published counts, torchvision's shapes and results, and small images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_parallel.workloads import ImageForm, build_model

NAMES = ["mobilenet_v2", "vgg16", "resnet50"]
MULTIPLIERS = {"tiny": 0.35, "small": 0.5, "base": 1.0, "large": 1.4}


pytestmark = pytest.mark.usefixtures("one_thread")


def on_meta(name: str, side: int, classes: int, size: str | None, channels: int = 3) -> nn.Module:
    with torch.device("meta"):
        return build_model(name, ImageForm(channels, side, side, classes), size=size)


def counts(model: nn.Module) -> tuple[int, int]:
    """Parameters, and the tensors that they are in."""
    return sum(parameter.numel() for parameter in model.parameters()), len(list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "size", "count", "tensors"),
    [
        ("vgg16", "base", 138_357_544, 32),
        ("resnet50", "base", 25_557_032, 161),
        ("resnet50", "large", 68_883_240, 161),  # wide_resnet50_2
        ("mobilenet_v2", "base", 3_504_872, 158),
    ],
)
def test_published_counts(name: str, size: str, count: int, tensors: int) -> None:
    assert counts(on_meta(name, 224, 1000, size)) == (count, tensors)
    if size == "base":
        assert counts(on_meta(name, 224, 1000, None)) == (count, tensors)


def vgg16_count(divisor: int, channels: int, classes: int) -> int:
    widths = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    count, inputs = 0, channels
    for width in (width // divisor for width in widths):
        count += (9 * inputs + 1) * width
        inputs = width
    hidden = 4096 // divisor
    return count + (49 * inputs + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * classes


def resnet50_count(middle: int, kernel: int, channels: int, classes: int) -> int:
    """A block narrows, convolves, widens, each with BatchNorm; the first of a stage has a fourth way around it."""
    count, inputs = kernel**2 * channels * 64 + 2 * 64, 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        width, outputs = middle * 2**stage, 256 * 2**stage
        for block in range(blocks):
            count += inputs * width + 9 * width**2 + width * outputs + 2 * (width + width + outputs)
            count += (inputs * outputs + 2 * outputs) * (block == 0)
            inputs = outputs
    return count + (inputs + 1) * classes


def in_eights(channels: float) -> int:
    """The nearest multiple of eight, but not less than nine tenths of it: a rule of MobileNet's authors."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def mobilenet_v2_count(multiplier: float, channels: int, classes: int) -> int:
    stages = [(1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)]
    inputs = in_eights(32 * multiplier)
    last = in_eights(1280 * max(1.0, multiplier))
    count = 9 * channels * inputs + 2 * inputs
    for expansion, published, blocks in stages:
        outputs = in_eights(published * multiplier)
        for _ in range(blocks):
            wide = expansion * inputs
            count += (inputs * wide + 2 * wide) * (expansion != 1) + 9 * wide + 2 * wide + wide * outputs + 2 * outputs
            inputs = outputs
    return count + inputs * last + 2 * last + (last + 1) * classes


@pytest.mark.parametrize(("channels", "side", "classes"), [(3, 32, 10), (1, 64, 1000)])
def test_counts_of_all_sizes_by_formula(channels: int, side: int, classes: int) -> None:
    for size, divisor in {"tiny": 8, "small": 4, "base": 1}.items():
        assert counts(on_meta("vgg16", side, classes, size, channels))[0] == vgg16_count(divisor, channels, classes)
    for size, middle in {"tiny": 8, "small": 16, "base": 64, "large": 128}.items():
        expected = resnet50_count(middle, 7 if side >= 64 else 3, channels, classes)
        assert counts(on_meta("resnet50", side, classes, size, channels)) == (expected, 161)
    for size, multiplier in MULTIPLIERS.items():
        expected = mobilenet_v2_count(multiplier, channels, classes)
        assert counts(on_meta("mobilenet_v2", side, classes, size, channels)) == (expected, 158)


@pytest.mark.parametrize(
    ("name", "size", "published"),
    [
        ("vgg16", "base", "vgg16"),
        ("resnet50", "base", "resnet50"),
        ("resnet50", "large", "wide_resnet50_2"),
        ("mobilenet_v2", "base", "mobilenet_v2"),
    ],
)
def test_names_and_shapes_are_torchvisions(name: str, size: str, published: str) -> None:
    from torchvision.models import get_model

    with torch.device("meta"):
        theirs = get_model(published, weights=None).state_dict()
    ours = on_meta(name, 224, 1000, size).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}


@pytest.mark.parametrize(("name", "size"), [("mobilenet_v2", "base"), ("mobilenet_v2", "tiny"), ("resnet50", "tiny")])
def test_with_torchvisions_weights_it_gives_torchvisions_results(name: str, size: str) -> None:
    """From 64 pixels on nothing differs."""
    from torchvision.models import MobileNetV2, ResNet
    from torchvision.models.resnet import Bottleneck

    torch.manual_seed(0)
    theirs: nn.Module
    if name == "resnet50":
        theirs = ResNet(Bottleneck, [3, 4, 6, 3], num_classes=7, width_per_group=8).double().eval()
    else:
        theirs = MobileNetV2(num_classes=7, width_mult=MULTIPLIERS[size]).double().eval()
    ours = build_model(name, ImageForm(3, 64, 64, 7), size=size).double().eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "size", "side", "last"),
    [
        *(("vgg16", "tiny", side, last) for side, last in [(4, 1), (8, 1), (28, 1), (32, 1), (64, 2), (224, 7)]),
        *(("resnet50", "tiny", side, last) for side, last in [(4, 2), (8, 2), (28, 4), (32, 4), (64, 2)]),
        *(("mobilenet_v2", "tiny", side, last) for side, last in [(8, 2), (28, 4), (64, 2)]),
        ("mobilenet_v2", None, 64, 8),
    ],
)
def test_how_often_an_image_is_halved(name: str, size: str | None, side: int, last: int) -> None:
    model = on_meta(name, side, 10, size)
    seen: list[torch.Size] = []
    layer = "layer4" if name == "resnet50" else "features"
    model.get_submodule(layer).register_forward_hook(lambda module, inputs, output: seen.append(output.shape[2:]))
    assert model(torch.empty(2, 3, side, side, device="meta")).shape == (2, 10)
    assert seen == [(last, last)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 5, 7)])
def test_every_parameter_gets_a_gradient_from_one_sample(name: str, shape: tuple[int, int, int]) -> None:
    """In training mode, where BatchNorm raises for one value a channel."""
    torch.manual_seed(0)
    model = build_model(name, ImageForm(*shape, 10), size="tiny", dropout=0.0).double()
    model(torch.rand(1, *shape, dtype=torch.float64)).square().sum().backward()
    assert [
        key for key, value in model.named_parameters() if value.grad is None or not value.grad.isfinite().all()
    ] == []
    assert next(model.parameters()).grad.any()  # type: ignore[union-attr]


def test_narrow_vgg_begins_with_outputs_as_large_as_those_of_the_published_widths() -> None:
    """A linear layer's output varies as its inputs times their number times the weights' variance: that must stay."""
    torch.manual_seed(0)
    for size, divisor in (("tiny", 8), ("small", 4)):
        model = build_model("vgg16", ImageForm(3, 32, 32, 10), size=size)
        for layer, inputs in (("classifier.0", 25088), ("classifier.3", 4096)):
            weight = model.get_parameter(f"{layer}.weight")
            assert weight.shape[1] == inputs // divisor
            gain, published = weight.shape[1] * weight.var().item(), inputs * 0.01**2
            assert abs(gain / published - 1) < 0.01
        first = model.get_parameter("features.0.weight")
        assert abs(first.std().item() / (2 / (9 * len(first))) ** 0.5 - 1) < 0.15  # He et al., fan out; few weights
        assert all(not value.any() for key, value in model.named_parameters() if key.endswith("bias"))


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_weights(name: str) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build_model(name, ImageForm(1, 28, 28, 10), size="tiny").state_dict())
    first, again, other = states
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(next(iter(first.values())), next(iter(other.values())))
