"""Which layers of a model are compiled. That compiled ones train alike needs a compiler of C++, or a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_parallel import RunConfig, train
from torch_parallel.training.compiling import check_compiler, compile_layers, layers_of
from torch_parallel.training.config import ConfigError
from torch_parallel.workloads import build_model


def test_layers_are_what_every_outermost_long_container_holds_and_what_lies_outside() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    encoder = nn.Module()
    encoder.layers, encoder.norm = nn.ModuleList(layers), nn.LayerNorm(2)
    assert layers_of(nn.Sequential(nn.Flatten(), encoder)) == [*layers, encoder.norm]
    two = nn.Transformer(8, 2, num_encoder_layers=4, num_decoder_layers=5, dim_feedforward=8, batch_first=True)
    assert len(layers_of(two)) == 4 + 5 + 2  # and the two norms
    listed = nn.ModuleList([nn.ModuleDict({"a": layers[0]}), nn.ModuleList([layers[1], nn.Sequential(*layers)])])
    assert layers_of(listed) == [layers[0], layers[1], *layers]
    blocks = {
        length: nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(length)))
        for length in (3, 4, 6)
    }  # as ResNet-50 has them
    resnet = nn.Sequential(nn.Conv2d(3, 2, 1), *blocks.values())
    resnet = nn.Sequential(*list(resnet)[:2], nn.Sequential(*list(resnet)[2:]))
    assert layers_of(resnet) == [resnet[0], blocks[3], *blocks[4], *blocks[6]]
    deep = nn.Sequential(nn.Sequential(*layers), *(nn.ReLU() for _ in range(3)))
    assert layers_of(deep) == list(deep)
    short = nn.Sequential(*layers[:3])
    assert layers_of(short) == [short]


def test_names_stay_and_nothing_is_compiled_before_it_is_called() -> None:
    model = build_model("mobilenet_v2", (1, 8, 8), 3)
    names = list(model.state_dict())
    assert len(layers_of(model)) == 20  # MobileNetV2: the first convolution, 17 blocks, the last one, the classifier
    compile_layers(model)
    assert list(model.state_dict()) == names


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it, tracing
@pytest.mark.parametrize("name", ["cnn", "mobilenet_v2", "torchvision_vit"])
def test_every_layer_is_compiled_for_training_and_for_evaluation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that only notes what it was given: layers of one class have one code, and are many."""
    torch._dynamo.reset()
    compiled: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    with_note = partialmethod(nn.Module.compile, backend=note)
    monkeypatch.setattr(nn.Module, "compile", with_note)
    model = build_model(name, (3, 32, 32), 10)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        compile_layers(model)
        for size in (4, 3):  # of a last batch too
            model.train()(torch.rand(size, 3, 32, 32)).sum().backward()
        with torch.no_grad():
            model.eval()(torch.rand(4, 3, 32, 32))
    assert compiled
    torch._dynamo.reset()


def test_a_missing_compiler_is_said_before_anything_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(ConfigError, match=r"^--compile: .* there is no '/nowhere/g\+\+': install one .*, or leave"):
        train(RunConfig(compile=True, device="cpu", dataset="digits", results_dir=str(tmp_path)), verbose=False)
    assert not list(tmp_path.iterdir())
    check_compiler("cuda")  # there it is Triton that compiles, which says in a line what it lacks
    monkeypatch.setenv("CXX", "env g++ -m64")
    check_compiler("cpu")


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU")],
        ),
    ],
)
@pytest.mark.exhaustive
def test_a_compiled_run_ends_with_the_same_weights(tmp_path: Path, device: str) -> None:
    """On GPUs in several buckets, which leave while the compiled backward is at work."""
    weights = [
        train(
            RunConfig(
                n_gpus=2 if device == "cpu" else min(2, torch.cuda.device_count()),
                device=device,
                dataset="digits",
                model="mlp",
                train_size=16,
                batch_size=8,
                epochs=1,
                dtype="float64",
                compile=compile,
                bucket_mb=0.02,
                results_dir=str(tmp_path),
            ),
            make_model=partial(build_model, "mlp", (1, 8, 8), 10),
            verbose=False,
        ).weights
        for compile in (False, True)
    ]
    for name, value in weights[0].items():
        assert torch.linalg.vector_norm(value - weights[1][name]) <= 1e-12 * torch.linalg.vector_norm(value), name
