"""Every model: shapes, parameter counts as its docstring says, and that it learns in float64 too."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_parallel import workloads
from torch_parallel.workloads import MODELS, build_model

CASES = [((1, 8, 8), 10), ((1, 28, 28), 10), ((3, 32, 32), 10), ((2, 5, 7), 3), ((3, 4, 4), 1)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small layers: threads gain nothing, and where cores are busy they wait for each other twenty times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


COUNTS: dict[str, Callable[[int, int, int, int], int]] = {
    "mlp": mlp_count,
    "cnn": cnn_count,
    "mobilenet_v2": mobilenet_v2_count,
}


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("shape", "classes"), CASES)
@pytest.mark.parametrize("name", MODELS)
def test_output_shape_and_parameter_count(name: str, shape: tuple[int, int, int], classes: int) -> None:
    model = build_model(name, shape, classes)
    with torch.inference_mode():
        assert model(torch.rand(3, *shape)).shape == (3, classes)
    assert count_parameters(model) == COUNTS[name](*shape, classes)


@pytest.mark.parametrize(("name", "count"), [("mlp", 235_146), ("cnn", 107_786), ("mobilenet_v2", 2_236_106)])
def test_counts_that_the_module_states_for_mnist(name: str, count: int) -> None:
    assert count_parameters(build_model(name, (1, 28, 28), 10)) == count


@pytest.mark.parametrize(("side", "last"), [(4, 2), (8, 2), (28, 4), (32, 4)])
def test_mobilenet_v2_keeps_enough_pixels_for_batchnorm_on_one_sample(side: int, last: int) -> None:
    model = build_model("mobilenet_v2", (1, side, side), 10)
    seen: list[torch.Size] = []
    model.get_submodule("features").register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model(torch.rand(1, 1, side, side)).sum().backward()  # in training mode, where one value a channel would raise
    assert seen == [(1, 1280, last, last)]


@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize("name", MODELS)
def test_models_travel_to_workers(name: str) -> None:
    model = build_model(name, (1, 8, 8), 10).eval()
    copied = pickle.loads(pickle.dumps(model))
    inputs = torch.rand(2, 1, 8, 8)
    assert torch.equal(copied(inputs), model(inputs))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "expected"),
    [
        ("resnet", (1, 8, 8), 10, "no model 'resnet'; choose from mlp, cnn, mobilenet_v2"),
        ("cnn", (1, 3, 8), 10, r"no model for 10 classes of images \(1, 3, 8\)"),
        ("cnn", (0, 8, 8), 10, r"images \(0, 8, 8\)"),
        ("mlp", (1, 8, 8), 0, "no model for 0 classes"),
    ],
)
def test_what_cannot_be_built(name: str, shape: tuple[int, int, int], classes: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        build_model(name, shape, classes)


def test_torchvision_and_sklearn_are_imported_only_where_needed() -> None:
    """Each takes seconds, in every process that imports it."""
    script = (
        "import sys; from torch_parallel.workloads import build_model, load_dataset; build_model('cnn', (1, 8, 8), 10);"
        "assert not {'torchvision', 'sklearn'} & set(sys.modules)"
    )
    root = Path(workloads.__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=root)
