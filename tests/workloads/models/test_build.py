"""Models by name: what they are built of, their sizes and dropout, and what is said of what cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_parallel import workloads
from torch_parallel.workloads import Form, ImageForm, TextForm, build_model, image_side
from torch_parallel.workloads.models.imports import leaving_no_trace

IMAGES = ImageForm(1, 28, 28, 10)
TEXTS = TextForm(300, 16, 5, "classification")


@pytest.mark.parametrize("name", ["mlp", "cnn", "mobilenet_v2"])
def test_a_form_is_as_good_as_a_shape_and_a_number_of_classes(name: str) -> None:
    states = []
    for arguments in [((1, 28, 28), 10), (IMAGES,)]:
        torch.manual_seed(3)
        states.append(build_model(name, *arguments).state_dict())  # type: ignore[arg-type]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_sides_of_images() -> None:
    for name in ("vgg16", "resnet50", "mobilenet_v2", "vit"):
        assert [image_side(name, size) for size in ("tiny", "small", "base")] == [32, 64, 224]
        assert image_side(name, None) is None
    assert image_side("vit", "large") == 224
    assert [image_side("bert", "tiny"), image_side("cnn", None), image_side("torchvision_vit", None)] == [None] * 3
    with pytest.raises(ValueError, match="there is no model 'nothing'"):
        image_side("nothing", "tiny")
    with pytest.raises(
        ValueError, match=r"size is 'large', but there is no such vgg16; choose from tiny, small, base$"
    ):
        image_side("vgg16", "large")


@pytest.mark.parametrize(
    ("name", "form", "more", "said"),
    [
        ("resnet", IMAGES, {}, "there is no model 'resnet'; choose from mlp, cnn, .*, gpt2$"),
        ("cnn", IMAGES, {"size": "tiny"}, "size is 'tiny', but cnn comes in one size only; leave it out$"),
        ("distilbert", TEXTS, {"size": "large"}, "size is 'large', but .* distilbert; choose from tiny, small, base$"),
        ("bert", TEXTS, {"size": "huge"}, "size is 'huge', .*; choose from tiny, small, base, large$"),
        ("cnn", TEXTS, {}, "cnn cannot take texts with the task classification; choose from bert, distilbert, gpt2$"),
        (
            *("gpt2", IMAGES, {}),
            "gpt2 cannot take images; choose from mlp, cnn, mobilenet_v2, vgg16, resnet50, torchvision_vit, vit$",
        ),
        ("vit", TEXTS, {}, "vit cannot take texts"),
        ("bert", TextForm(300, 16, 5, "next_token"), {}, "bert cannot take .* next_token; choose from gpt2$"),
        ("gpt2", TextForm(300, 16, 5, "masked"), {}, "gpt2 cannot take .* masked; choose from bert, distilbert$"),
        (
            *("bert", TextForm(300, 16, 5, "guess"), {}),  # type: ignore[arg-type]
            "there is no task 'guess'; choose from classification, masked, next_token$",
        ),
        ("bert", TextForm(0, 16, 5, "masked"), {}, "no model for TextForm.* 1 token .* are the least$"),
        ("bert", TextForm(300, 0, 5, "masked"), {}, "no model for TextForm"),
        ("bert", TextForm(300, 16, 0, "classification"), {}, "no model for TextForm"),
        ("vgg16", ImageForm(3, 3, 8, 10), {}, r"no model for 10 classes of images \(3, 3, 8\) .* 4 pixels"),
        ("vit", ImageForm(3, 28, 32, 10), {}, r"no vit for images \(3, 28, 32\)"),
        ("cnn", (1, 28, 28), {}, r"class_count is missing; give .* images \(1, 28, 28\)$"),
        ("cnn", IMAGES, {"class_count": 10}, "class_count is 10, but ImageForm.* leave it out$"),
        ("cnn", (28, 28), {"class_count": 10}, r"the data's form is \(28, 28\); an ImageForm, a TextForm or"),
        ("cnn", None, {"class_count": 10}, "the data's form is None; an ImageForm"),
        ("bert", TEXTS, {"dropout": 1.5}, "dropout is 1.5; a probability"),
        ("vgg16", IMAGES, {"dropout": float("nan")}, "dropout is nan; a probability"),
        ("cnn", IMAGES, {"dropout": 0.5}, "dropout is 0.5, but cnn has none; leave it out, or take 0$"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(name: str, form: Form, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        build_model(name, form, **more)
    assert "\n" not in str(raised.value)


def probabilities(model: nn.Module) -> set[float]:
    """Of all that drops something."""
    found = {layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)}
    found |= {layer.dropout for layer in model.modules() if isinstance(layer, nn.MultiheadAttention)}
    return found | {layer.attention_dropout for layer in model.modules() if type(layer).__name__ == "ViTAttention"}


@pytest.mark.parametrize(
    ("name", "form", "published"),
    [
        ("mobilenet_v2", IMAGES, {0.2}),
        ("vgg16", IMAGES, {0.5}),
        ("torchvision_vit", IMAGES, {0.0}),
        ("vit", IMAGES, {0.0}),
        ("bert", TEXTS, {0.1}),
        ("distilbert", TEXTS, {0.1, 0.2}),
        ("gpt2", TEXTS, {0.1}),
    ],
)
@pytest.mark.exhaustive
def test_dropout_is_as_published_or_as_given(name: str, form: Form, published: set[float]) -> None:
    with torch.device("meta"):
        assert probabilities(build_model(name, form)) == published
        for dropout in (0.0, 0.3):
            assert probabilities(build_model(name, form, dropout=dropout)) == {dropout}


def test_no_dropout_can_be_asked_of_a_model_that_has_none() -> None:
    assert probabilities(build_model("cnn", IMAGES, dropout=0.0)) == set()


def test_what_an_import_changes_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "1")
    monkeypatch.setenv("TWO", "2")
    before, filters = dict(os.environ), list(warnings.filters)
    with pytest.raises(KeyError), leaving_no_trace():
        os.environ.update(ONE="other", THREE="3")
        del os.environ["TWO"]
        warnings.filterwarnings("ignore", "all of them")
        raise KeyError
    assert (dict(os.environ), list(warnings.filters)) == (before, filters)


SCRIPT = """
import logging, os, socket, sys, warnings
import torch
from torch_parallel.workloads import MODELS, ImageForm, TextForm, build_model, image_side
assert not {"transformers", "tokenizers", "torchvision", "huggingface_hub"} & set(sys.modules)

def refuse(*arguments, **named):
    raise AssertionError(f"a socket is opened: {arguments}")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
warnings.simplefilter("error")
torch.set_num_threads(1)
before = dict(os.environ), list(warnings.filters), list(logging.root.handlers), logging.root.level
for name, model in MODELS.items():
    for task in model.takes if name != "torchvision_vit" else ():
        size = "tiny" if model.sizes else None
        form = ImageForm(3, 32, 32, 10) if task == "images" else TextForm(300, 16, 5, task)
        build_model(name, form, size=size)
assert before == (dict(os.environ), list(warnings.filters), list(logging.root.handlers), logging.root.level)
"""


@pytest.mark.exhaustive
def test_to_build_models_needs_no_network_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, with nothing imported before; sockets may not be opened and would be allowed to be."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    root = Path(workloads.__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not (tmp_path / "hub").exists()
