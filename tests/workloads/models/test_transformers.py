"""Transformers: published and computed counts, and that masks, causality, dropout and gradients are what they should.

"tiny" is trained here; larger ones are built of tensors that have shapes and no memory.
"""

from __future__ import annotations

import pickle
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_parallel.workloads import Form, ImageForm, TextForm, build_model
from torch_parallel.workloads.forms import TextTask

IMAGES = ImageForm(3, 8, 8, 10)
STACKS = {
    "bert": {"tiny": (2, 128), "small": (4, 512), "base": (12, 768), "large": (24, 1024)},
    "distilbert": {"tiny": (1, 128), "small": (2, 512), "base": (6, 768)},
    "gpt2": {"tiny": (4, 256), "small": (6, 384), "base": (12, 768), "large": (36, 1280)},
    "vit": {"tiny": (12, 192), "small": (12, 384), "base": (12, 768), "large": (24, 1024)},
}
HEADS = {"bert": [2, 8, 12, 16], "distilbert": [2, 8, 12], "gpt2": [4, 6, 12, 20], "vit": [3, 6, 12, 16]}


def texts(task: TextTask, vocabulary: int = 300, length: int = 16, classes: int = 5) -> TextForm:
    return TextForm(vocabulary, length, classes, task)


CASES: list[tuple[str, Form]] = [
    ("vit", IMAGES),
    ("bert", texts("classification")),
    ("bert", texts("masked")),
    ("distilbert", texts("classification")),
    ("distilbert", texts("masked")),
    ("gpt2", texts("next_token")),
    ("gpt2", texts("classification")),
]
each_case = pytest.mark.parametrize(("name", "form"), CASES)


pytestmark = pytest.mark.usefixtures("one_thread")


def on_meta(name: str, form: Form, size: str | None = None) -> nn.Module:
    with torch.device("meta"):
        return build_model(name, form, size=size)


def counts(model: nn.Module) -> tuple[int, int]:
    """Parameters, and the tensors that they are in."""
    return sum(parameter.numel() for parameter in model.parameters()), len(list(model.parameters()))


def test_published_counts() -> None:
    """Those of the papers' models as they are published, less or plus the output layers."""
    labels, words = texts("classification", 30522, 128), texts("classification", 50257, 128)
    assert counts(on_meta("bert", labels, "base")) == (109_482_240 + 5 * 769, 201)
    assert counts(on_meta("bert", labels)) == (109_482_240 + 5 * 769, 201)
    assert counts(on_meta("bert", labels, "large")) == (335_141_888 + 5 * 1025, 391 + 2)
    assert counts(on_meta("distilbert", labels)) == (66_362_880 + 768 * 769 + 5 * 769, 104)
    assert counts(on_meta("gpt2", texts("next_token", 50257, 1024), "base")) == (124_439_808, 148)
    assert counts(on_meta("gpt2", texts("next_token", 50257, 1024), "large"))[0] == 774_030_080
    assert counts(on_meta("gpt2", words)) == (124_439_808 + 5 * 768, 149)
    images = ImageForm(3, 224, 224, 1000)
    published = {"tiny": 5_717_416, "small": 22_050_664, "base": 86_567_656, "large": 304_326_632}
    for size, count in published.items():
        assert counts(on_meta("vit", images, size))[0] == count


def body(layers: int, width: int) -> int:
    """Attention has four square matrices, an MLP two of four times that; biases; two norms."""
    matrices, biases, norms = 4 * width**2 + 8 * width**2, 4 * width + 5 * width, 2 * 2 * width
    return layers * (matrices + biases + norms)


def expected_count(name: str, form: Form, layers: int, width: int, positions: int) -> int:
    norm, square = 2 * width, width**2 + width
    if isinstance(form, ImageForm):
        patch = 16 if form.width >= 64 else 4 if form.width > 8 else 2
        patches = (form.width // patch) ** 2
        embedded = (patch**2 * form.channels + 1) * width + width + (patches + 1) * width
        return embedded + body(layers, width) + norm + (width + 1) * form.class_count
    embedded = (form.vocabulary_size + positions) * width
    head = (width + 1) * form.class_count
    if name == "gpt2":
        head = width * form.class_count if form.task == "classification" else 0  # else the embedding, read backwards
        return embedded + body(layers, width) + norm + head
    kinds = 2 * width if name == "bert" else 0
    if form.task == "masked":
        head = norm + form.vocabulary_size
    return embedded + kinds + norm + body(layers, width) + square + head


@pytest.mark.parametrize("name", STACKS)
def test_all_sizes_by_formula(name: str) -> None:
    """The largest takes texts longer than published: the positions become as many."""
    for (size, (layers, width)), heads in zip(STACKS[name].items(), HEADS[name], strict=True):
        length, side = (1100, 64) if size in ("base", "large") else (16, 8)
        positions = max(length, {"gpt2": 256}.get(name, 512))
        forms = [ImageForm(2, side, side, 7)] if name == "vit" else [case[1] for case in CASES if case[0] == name]
        for form in forms:
            if isinstance(form, TextForm):
                form = texts(form.task, 259, length)
            model = on_meta(name, form, size)
            assert counts(model)[0] == expected_count(name, form, layers, width, positions)
            assert model.config.num_attention_heads == heads  # type: ignore[union-attr]


@pytest.mark.parametrize(("side", "patches"), [(8, 16), (28, 49), (32, 64), (64, 16)])
def test_patches_of_vit(side: int, patches: int) -> None:
    model = on_meta("vit", ImageForm(1, side, side, 10), "tiny")
    assert model.get_parameter("vit.embeddings.position_embeddings").shape == (1, patches + 1, 192)
    assert model(torch.empty(2, 1, side, side, device="meta")).logits.shape == (2, 10)


def batch(form: Form, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Four samples: arguments of a call. The first text ends after ten tokens; 0 fills it up."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(form, ImageForm):
        shape = (4, form.channels, form.height, form.width)
        return (torch.rand(shape, generator=generator, dtype=torch.float64),), {}
    tokens = torch.randint(1, form.vocabulary_size, (4, form.length), generator=generator)
    mask = torch.ones_like(tokens)
    tokens[0, 10:], mask[0, 10:] = 0, 0
    return (), {"input_ids": tokens, "attention_mask": mask}


def loss_of(model: nn.Module, form: Form) -> Tensor:
    arguments, named = batch(form)
    logits = model(*arguments, **named).logits
    if logits.dim() == 2:
        return cross_entropy(logits, torch.arange(4) % 5)
    return cross_entropy(logits.flatten(0, 1), named["input_ids"].roll(-1, 1).flatten())


@each_case
def test_it_learns_every_parameter_gets_a_gradient_and_nothing_is_drawn(name: str, form: Form) -> None:
    torch.manual_seed(0)
    model = build_model(name, form, size="tiny", dropout=0.0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    before = torch.get_rng_state()
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, form)
        loss.backward()
        losses.append(loss.item())
        assert [key for key, value in model.named_parameters() if value.grad is None or not value.grad.any()] == []
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert torch.equal(before, torch.get_rng_state())
    choices = form.class_count if isinstance(form, ImageForm) or form.task == "classification" else 300
    assert abs(losses[0] - torch.tensor(choices).log().item()) < 0.6  # weights begin small: all classes are about alike
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(loss_of(copied, form), loss_of(model, form))


@each_case
def test_dropout_is_on_in_training_alone(name: str, form: Form) -> None:
    torch.manual_seed(0)
    model = build_model(name, form, size="tiny", dropout=0.3 if name == "vit" else None).double()
    assert model.training
    assert loss_of(model, form) != loss_of(model, form)
    model.eval()
    assert loss_of(model, form) == loss_of(model, form)


@each_case
def test_same_seed_same_weights(name: str, form: Form) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(build_model(name, form, size="tiny").state_dict())
    first, again, other = states
    assert all(torch.equal(first[key], again[key]) for key in first)
    matrices = [key for key, value in first.items() if value.dim() > 1]
    assert [key for key in matrices if torch.equal(first[key], other[key])] == []


@each_case
def test_bfloat16_where_autocast_takes_it(name: str, form: Form) -> None:
    torch.manual_seed(0)
    model = build_model(name, form, size="tiny", dropout=0.0)
    arguments, named = batch(form)
    arguments = tuple(argument.float() for argument in arguments)
    exact = model(*arguments, **named).logits
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(*arguments, **named).logits
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.05 * exact.norm()  # eight bits, about twenty layers of rounding


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_what_fills_a_text_up_does_not_count(name: str) -> None:
    form = texts("classification")
    torch.manual_seed(0)
    model = build_model(name, form, size="tiny").double().eval()
    _, named = batch(form)
    filled = model(**named).logits[0]
    alone = model(input_ids=named["input_ids"][:1, :10]).logits[0]
    torch.testing.assert_close(filled, alone, rtol=1e-12, atol=1e-12)
    named["attention_mask"][0] = 1
    assert (model(**named).logits[0] - alone).norm() > 1e-6 * alone.norm()


def test_gpt2_classifies_by_the_last_token_that_is_no_padding() -> None:
    form = texts("classification")
    torch.manual_seed(0)
    model = build_model("gpt2", form, size="tiny").double().eval()
    _, named = batch(form)
    alone = model(input_ids=named["input_ids"][:1, :10]).logits[0]
    torch.testing.assert_close(model(**named).logits[0], alone, rtol=1e-12, atol=1e-12)


def test_gpt2_sees_only_what_came_before_and_ties_its_weights() -> None:
    form = texts("next_token", 256)
    torch.manual_seed(0)
    model = build_model("gpt2", form, size="tiny").double().eval()
    assert model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight")
    tokens = torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(input_ids=tokens).logits, model(input_ids=changed).logits
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=1e-12, atol=1e-12)
    assert (after[:, 9:] != before[:, 9:]).any(-1).all()
    assert list(model(input_ids=tokens)) == ["logits"]  # no keys and values that only a generation needs


def test_the_compiler_takes_a_whole_model() -> None:
    """By a compiler that only runs what it was given; with `fullgraph` a part that it cannot take would raise."""
    torch._dynamo.reset()
    form = texts("classification")
    torch.manual_seed(0)
    model = build_model("bert", form, size="tiny", dropout=0.0).double()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    _, named = batch(form)
    assert torch.equal(compiled(**named).logits, model(**named).logits)
    torch._dynamo.reset()


def test_every_task_has_a_model() -> None:
    assert {form.task for _, form in CASES if isinstance(form, TextForm)} == set(get_args(TextTask))
