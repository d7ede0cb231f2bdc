"""Every model: shapes, parameter counts as its docstring says, and that it learns in float64 too.

torchvision_vit is too large to be trained here: its whole size is built of tensors without memory, and trained with one
layer.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_parallel import workloads
from torch_parallel.workloads import build_model
from torch_parallel.workloads.models import images

SMALL = ["mlp", "cnn", "mobilenet_v2"]
CASES = [((1, 8, 8), 10), ((1, 28, 28), 10), ((3, 32, 32), 10), ((2, 5, 7), 3), ((3, 4, 4), 1)]


pytestmark = pytest.mark.usefixtures("one_thread")


def linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def mlp_count(channels: int, height: int, width: int, classes: int) -> int:
    return linear(channels * height * width, 256) + linear(256, 128) + linear(128, classes)


def cnn_count(channels: int, height: int, width: int, classes: int) -> int:
    convolutions = linear(25 * channels, 6) + linear(25 * 6, 16)
    return convolutions + linear(16 * (height // 4) * (width // 4), 120) + linear(120, 84) + linear(84, classes)


def mobilenet_v2_count(channels: int, height: int, width: int, classes: int) -> int:
    """From table 2 of the paper: a block widens, filters each channel, narrows; two BatchNorm numbers a channel."""
    stages = [(1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)]
    count, inputs = 9 * channels * 32 + 2 * 32, 32
    for expansion, outputs, blocks in stages:
        for _ in range(blocks):
            wide = expansion * inputs
            count += (inputs * wide + 2 * wide) * (expansion != 1) + 9 * wide + 2 * wide + wide * outputs + 2 * outputs
            inputs = outputs
    return count + 320 * 1280 + 2 * 1280 + linear(1280, classes)


def vit_count(channels: int, height: int, width: int, classes: int, patch: int, layers: int = 16) -> int:
    """ViT-Base's parts: patches to vectors, a class token, positions, layers of attention and MLP, norms, the head."""
    norm, attention = 2 * 768, linear(768, 3 * 768) + linear(768, 768)
    layer = norm + attention + norm + linear(768, 3072) + linear(3072, 768)
    positions = (height // patch) * (width // patch) + 1
    return linear(channels * patch * patch, 768) + 768 + positions * 768 + layers * layer + norm + linear(768, classes)


COUNTS: dict[str, Callable[[int, int, int, int], int]] = {
    "mlp": mlp_count,
    "cnn": cnn_count,
    "mobilenet_v2": mobilenet_v2_count,
}


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("shape", "classes"), CASES)
@pytest.mark.parametrize("name", SMALL)
def test_output_shape_and_parameter_count(name: str, shape: tuple[int, int, int], classes: int) -> None:
    model = build_model(name, shape, classes)
    with torch.inference_mode():
        assert model(torch.rand(3, *shape)).shape == (3, classes)
    assert count_parameters(model) == COUNTS[name](*shape, classes)


@pytest.mark.parametrize(("name", "count"), [("mlp", 235_146), ("cnn", 107_786), ("mobilenet_v2", 2_236_106)])
def test_counts_that_the_module_states_for_mnist(name: str, count: int) -> None:
    assert count_parameters(build_model(name, (1, 28, 28), 10)) == count


@pytest.mark.parametrize(
    ("shape", "classes", "patch", "count"),
    [
        ((3, 224, 224), 1000, 16, 114_919_144),  # ViT-B/16's published 86,567,656, and four layers of 7,087,872 more
        ((3, 64, 64), 200, 16, None),
        ((3, 32, 32), 10, 4, None),
        ((1, 28, 28), 10, 4, 113_467_402),
        ((2, 16, 16), 3, 4, None),
        ((1, 8, 8), 10, 2, None),
        ((5, 4, 4), 1, 2, None),
    ],
)
def test_vit_at_its_whole_size(shape: tuple[int, int, int], classes: int, patch: int, count: int | None) -> None:
    """Of tensors that have shapes and no memory: 460 MB would be filled with random numbers otherwise."""
    with torch.device("meta"):
        model = build_model("torchvision_vit", shape, classes)
        assert model(torch.empty(3, *shape)).shape == (3, classes)
    expected = vit_count(*shape, classes, patch)
    channels, side, _ = shape
    docstring = 113_408_256 + 768 * (patch * patch * channels + (side // patch) ** 2 + 2) + 769 * classes
    assert count_parameters(model) == expected == docstring >= 100_000_000
    assert count in (None, expected)
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "VIT_LAYERS", 1)


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize("channels", [1, 3, 12])
def test_vit_begins_as_torchvision_does(channels: int) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build_model("torchvision_vit", (channels, 32, 32), 10).get_submodule("conv_proj"))
    first, again, other = (state.get_parameter("weight") for state in states)
    assert first.shape == (768, channels, 4, 4)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not states[0].get_parameter("bias").any()
    expected = (1 / (channels * 4 * 4)) ** 0.5  # the default of nn.Conv2d would be sqrt(1 / 3) of it
    assert abs(first.std().item() / expected - 1) < 0.02


@pytest.mark.usefixtures("one_layer")
def test_vit_learns_and_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    model = build_model("torchvision_vit", (2, 8, 8), 3).double()
    assert count_parameters(model) == vit_count(2, 8, 8, 3, patch=2, layers=1)
    inputs, targets = torch.rand(6, 2, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = torch.get_rng_state()
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - torch.tensor(3.0).log().item()) < 1e-6  # the head begins with zeros: all classes alike
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95
    assert torch.equal(before, torch.get_rng_state())
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(inputs), model(inputs))


@pytest.mark.parametrize(("side", "last"), [(4, 2), (8, 2), (28, 4), (32, 4)])
def test_mobilenet_v2_keeps_enough_pixels_for_batchnorm_on_one_sample(side: int, last: int) -> None:
    model = build_model("mobilenet_v2", (1, side, side), 10)
    seen: list[torch.Size] = []
    model.get_submodule("features").register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model(torch.rand(1, 1, side, side)).sum().backward()  # in training mode, where one value a channel would raise
    assert seen == [(1, 1280, last, last)]


@pytest.mark.parametrize("name", SMALL)
def test_same_seed_same_weights_and_the_first_layer_is_seeded_too(name: str) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(next(build_model(name, (1, 8, 8), 10).parameters()))
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_the_first_convolution_of_mobilenet_v2_is_initialised_as_torchvision_does() -> None:
    torch.manual_seed(0)
    weight = build_model("mobilenet_v2", (64, 8, 8), 10).get_parameter("features.0.0.weight")
    expected = (2 / (9 * 32)) ** 0.5  # He et al., fan out; the default of nn.Conv2d would be sqrt(1 / (3 * 9 * 64))
    assert abs(weight.std().item() / expected - 1) < 0.02


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_forward_draws_no_random_numbers(name: str) -> None:
    """Else one process and several could not agree to the last digits."""
    model = build_model(name, (1, 8, 8), 10)
    before = torch.get_rng_state()
    model(torch.rand(4, 1, 8, 8, generator=torch.Generator()))
    assert torch.equal(before, torch.get_rng_state())


def test_cnn_gradient_in_float64() -> None:
    """Backward against a difference quotient along a random direction."""
    torch.manual_seed(0)
    model = build_model("cnn", (1, 8, 8), 10).double()
    inputs, targets = torch.rand(4, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 3, 9, 3])
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), list(model.parameters()))
    direction = [torch.randn_like(gradient) for gradient in gradients]
    slope = sum((gradient * along).sum().item() for gradient, along in zip(gradients, direction, strict=True))
    losses = []
    for step in (1e-6, -1e-6):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, along in zip(moved.parameters(), direction, strict=True):
                parameter.add_(along, alpha=step)
            losses.append(nn.functional.cross_entropy(moved(inputs), targets).item())
    assert abs((losses[0] - losses[1]) / 2e-6 - slope) < 1e-5 * abs(slope)


@pytest.mark.parametrize("name", SMALL)
def test_models_travel_to_workers(name: str) -> None:
    model = build_model(name, (1, 8, 8), 10).eval()
    copied = pickle.loads(pickle.dumps(model))
    inputs = torch.rand(2, 1, 8, 8)
    assert torch.equal(copied(inputs), model(inputs))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "expected"),
    [
        ("resnet", (1, 8, 8), 10, "no model 'resnet'; choose from mlp, cnn, mobilenet_v2, vgg16, resnet50"),
        ("cnn", (1, 3, 8), 10, r"no model for 10 classes of images \(1, 3, 8\)"),
        ("cnn", (0, 8, 8), 10, r"images \(0, 8, 8\)"),
        ("mlp", (1, 8, 8), 0, "no model for 0 classes"),
        (
            "torchvision_vit",
            (1, 8, 12),
            10,
            r"^no torchvision_vit for images \(1, 8, 12\) .*: it takes square ones, .* of 2 x 2 pixels; resize them",
        ),
        (
            "torchvision_vit",
            (3, 30, 30),
            10,
            r"^no torchvision_vit for images \(3, 30, 30\) .* patches of 4 x 4 pixels; resize them",
        ),
        (
            "torchvision_vit",
            (3, 72, 72),
            10,
            r"^no torchvision_vit for images \(3, 72, 72\) .* patches of 16 x 16 pixels; resize them",
        ),
    ],
)
def test_what_cannot_be_built(name: str, shape: tuple[int, int, int], classes: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        build_model(name, shape, classes)


def test_torchvision_and_sklearn_are_imported_only_where_needed() -> None:
    """Each takes seconds, in every process that imports it."""
    script = (
        "import sys; from torch_parallel.workloads import build_model, load_dataset;"
        "build_model('mlp', (1, 8, 8), 10); build_model('cnn', (1, 8, 8), 10);"
        "load_dataset('digits', None, None, 0);"
        "assert not {'torchvision', 'sklearn'} & set(sys.modules)"
    )
    root = Path(workloads.__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=root)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_layers_before_a_relu_keep_the_variance_of_their_inputs(name: str) -> None:
    """He's rule: the weights have the variance 2 / inputs of a unit, so a standard deviation of sqrt(2 / inputs)."""
    torch.manual_seed(0)
    checked = 0
    for parameter, value in build_model(name, (3, 32, 32), 10).named_parameters():
        if parameter.endswith("bias"):
            assert not value.any(), parameter
        elif value.numel() >= 2000:  # of 2,000 uniform draws the deviation is known to 1 %, in one of 20 to less
            expected = (2 / value[0].numel()) ** 0.5
            assert abs(value.std().item() / expected - 1) < 0.04, parameter
            checked += 1
    assert checked >= 2
