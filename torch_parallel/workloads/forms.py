"""What a model must know of its data: the shape of an image, or the vocabulary and length of a text, and the classes.

A model is built before it has seen a sample. These few numbers are all that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TextTask = Literal["classification", "next_token", "masked"]


@dataclass(frozen=True)
class ImageForm:
    """Images [channels, height, width] with one of `class_count` classes each; height and width in pixels."""

    channels: int
    height: int
    width: int
    class_count: int


@dataclass(frozen=True)
class TextForm:
    """Texts of at most `length` tokens, which are numbers in 0..vocabulary_size-1.

    The `task` says what is told of a text: for "classification" one of `class_count` classes; for "next_token" the
    token that follows each token; for "masked" the tokens that were hidden. The last two choose among all tokens of the
    vocabulary, and `class_count` does not matter to them.
    """

    vocabulary_size: int
    length: int
    class_count: int
    task: TextTask


Form = ImageForm | TextForm
"""What `build_model` takes."""
