"""Transformers of the library `transformers`, built from a configuration alone: no file is read and no network used.

A size is a number of layers, their width and their heads; the middle of each MLP is four times as wide.

                  tiny             small            base              large
    bert        2 x 128,  2      4 x 512,  8     12 x 768, 12     24 x 1024, 16     base and large as published
    distilbert  1 x 128,  2      2 x 512,  8      6 x 768, 12          none         half of bert's layers each time
    gpt2        4 x 256,  4      6 x 384,  6     12 x 768, 12     36 x 1280, 20     base and large as published
    vit        12 x 192,  3     12 x 384,  6     12 x 768, 12     24 x 1024, 16     tiny and small as in DeiT

Texts may be longer than a form says, up to the published 512 tokens of bert and distilbert and 1,024 of gpt2; tiny and
small gpt2 take 256. A form of longer texts gets as many positions as it needs.

The import takes 3 to 6 s beside torch's own, half of them in parts of torch that the library wants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, cast

from torch import nn

from torch_parallel.workloads.forms import Form, ImageForm, TextForm
from torch_parallel.workloads.models.imports import leaving_no_trace
from torch_parallel.workloads.models.sizes import square_patch_side

ATTENTION = "sdpa"
"""torch's own attention: on CPU and GPU, in every dtype, and torch.compile takes it whole."""

GPT2_VOCABULARY = 50257


class Stack(NamedTuple):
    """The layers of a transformer."""

    layers: int
    width: int
    heads: int
    positions: int = 512


@dataclass(frozen=True)
class Family:
    """What the library calls the parts of a model, and the sizes it comes in."""

    config: str
    classes: dict[str, str]  # by task; of images "classification" alone
    stacks: dict[str, Stack]
    names: tuple[str, str, str]  # of the configuration's layers, width and heads
    positions: str
    dropouts: tuple[str, ...]
    middle: str | None = None  # None: four times the width, unless told otherwise
    fixed: dict[str, Any] = field(default_factory=dict)


BERT_LIKE = ("num_hidden_layers", "hidden_size", "num_attention_heads")

FAMILIES = {
    "bert": Family(
        config="BertConfig",
        classes={"classification": "BertForSequenceClassification", "masked": "BertForMaskedLM"},
        stacks={
            "tiny": Stack(2, 128, 2),
            "small": Stack(4, 512, 8),
            "base": Stack(12, 768, 12),
            "large": Stack(24, 1024, 16),
        },
        names=BERT_LIKE,
        middle="intermediate_size",
        positions="max_position_embeddings",
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    ),
    "distilbert": Family(
        config="DistilBertConfig",
        classes={"classification": "DistilBertForSequenceClassification", "masked": "DistilBertForMaskedLM"},
        stacks={"tiny": Stack(1, 128, 2), "small": Stack(2, 512, 8), "base": Stack(6, 768, 12)},
        names=("n_layers", "dim", "n_heads"),
        middle="hidden_dim",
        positions="max_position_embeddings",
        dropouts=("dropout", "attention_dropout", "seq_classif_dropout"),
    ),
    "gpt2": Family(
        config="GPT2Config",
        classes={"next_token": "GPT2LMHeadModel", "classification": "GPT2ForSequenceClassification"},
        stacks={
            "tiny": Stack(4, 256, 4, 256),
            "small": Stack(6, 384, 6, 256),
            "base": Stack(12, 768, 12, 1024),
            "large": Stack(36, 1280, 20, 1024),
        },
        names=("n_layer", "n_embd", "n_head"),
        positions="n_positions",
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        fixed={"use_cache": False},  # it would keep keys and values that training has no use for
    ),
    "vit": Family(
        config="ViTConfig",
        classes={"classification": "ViTForImageClassification"},
        stacks={
            "tiny": Stack(12, 192, 3),
            "small": Stack(12, 384, 6),
            "base": Stack(12, 768, 12),
            "large": Stack(24, 1024, 16),
        },
        names=BERT_LIKE,
        middle="intermediate_size",
        positions="",
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
}


def build_transformer(name: str, form: Form, size: str | None = None, dropout: float | None = None) -> nn.Module:
    """A model of a family with fresh weights, for images or for the task of the texts.

    It gives an output with `.logits`, and is called by model(pixel_values) or model(input_ids=..., attention_mask=...).
    """
    family = FAMILIES[name]
    fields = _fields(name, form, family.stacks[size or "base"])  # raises for images that it cannot cut
    config = library(name, "configuration", family.config)
    model = model_class(name, form)(config(**fields, **settings(name, form, dropout)))
    return cast(nn.Module, model)


def _fields(name: str, form: Form, stack: Stack) -> dict[str, Any]:
    """What a configuration must be told of the layers and of the data."""
    family = FAMILIES[name]
    fields: dict[str, Any] = dict(zip(family.names, stack[:3], strict=True))
    if family.middle:
        fields[family.middle] = 4 * stack.width
    if isinstance(form, ImageForm):
        patch = square_patch_side(name, (form.channels, form.height, form.width))
        return fields | {"image_size": form.width, "patch_size": patch, "num_channels": form.channels}
    fields[family.positions] = max(stack.positions, form.length)
    if name == "gpt2" and form.vocabulary_size < GPT2_VOCABULARY:
        fields |= {"bos_token_id": None, "eos_token_id": None}  # the published ones would lie outside
    return fields | {"vocab_size": form.vocabulary_size}


def settings(name: str, form: Form, dropout: float | None) -> dict[str, Any]:
    """What a configuration is told whether its weights are fresh or loaded."""
    family = FAMILIES[name]
    given: dict[str, Any] = {"attn_implementation": ATTENTION, **family.fixed}
    if isinstance(form, ImageForm) or form.task == "classification":
        given["num_labels"] = form.class_count
    if name == "gpt2" and isinstance(form, TextForm) and form.task == "classification":
        given["pad_token_id"] = 0  # it classifies by the last token that is no padding
    if dropout is not None:
        given |= dict.fromkeys(family.dropouts, dropout)
    return given


def check_dropout(dropout: float | None) -> None:
    """Raises ValueError unless it is a probability below 1, or None."""
    if dropout is not None and not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}; a probability of at least 0 and below 1 is wanted")


def model_class(name: str, form: Form) -> Any:
    """The library's class for what is told of the data."""
    task = "classification" if isinstance(form, ImageForm) else form.task
    return library(name, "modeling", FAMILIES[name].classes[task])


def library(name: str, part: str, attribute: str) -> Any:
    """Something of the library's module `part` for a model, imported now."""
    with leaving_no_trace():
        return getattr(import_module(f"transformers.models.{name}.{part}_{name}"), attribute)
