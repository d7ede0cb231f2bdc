"""A running text whose next byte, or next token, is to be predicted: "tinyshakespeare", "python_docs", or a file.

Bytes need no vocabulary and no library, and a model of 256 tokens is small. `python_docs` is in every installation of
Python, so that a language model can be trained where there is no data and no network.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.text.cache import cached
from torch_parallel.workloads.text.settings import Settings, checked
from torch_parallel.workloads.text.stream import Stream, cut, pieces, read_stream
from torch_parallel.workloads.text.text_data import TextData
from torch_parallel.workloads.text.vocabulary import encode_stream, size_of, tokenizer_for, train_byte_pairs


def load_text(
    path_or_name: str | os.PathLike[str],
    folders: Sequence[Path],
    length: int,
    seed: int = 0,
    tokens: bool = False,
    test_part: float = 0.1,
    vocabulary_size: int = 8000,
    tokenizer: str | os.PathLike[str] | None = None,
) -> TextData:
    """Windows of `length` + 1 bytes, or tokens, of a text; the test part is the end of the text.

    Bytes are those of UTF-8, whatever the file is encoded in. `tokens` are those of `tokenizer` (a tokenizer.json or a
    folder that has one; to give one is to want tokens); without it, byte pairs of at most `vocabulary_size` are trained
    on the training part. Nothing is drawn: `seed` is there because every loader has one.

    Raises DataNotFound if there is no such file, DataError, one line, for one that cannot be used or is shorter than a
    window for each part, and ValueError for a wrong number.
    """
    settings = checked(length, seed, vocabulary_size, test_part, tokenizer, least_length=1)
    stream = read_stream(path_or_name, folders)
    as_tokens = tokens or settings.saved is not None
    made = _tokens(stream, settings) if as_tokens else _bytes(stream, settings)
    unit = "token" if as_tokens else "byte"
    check_long_enough(stream, made["train"], made["test"], settings.length + 1, f"{unit}s")
    how = f", {settings.says('byte pairs trained on its training part')}" if as_tokens else ""
    return TextData(
        name=stream.name,
        source=stream.source + how,
        task="next_token",
        train=windows(made["train"], settings.length),
        test=windows(made["test"], settings.length),
        vocabulary_size=made["vocabulary_size"],
        length=settings.length,
        unit=unit,
    )


def windows(stream: Tensor, length: int) -> dict[str, Tensor]:
    """The tokens [n, length + 1] and the counts [n] of a next_token part, see `TextData`."""
    target_count = len(stream) - 1
    whole = target_count // length
    count = torch.full((-(-target_count // length),), length, dtype=torch.int64, device="cpu")
    tokens = torch.zeros(len(count), length + 1, dtype=stream.dtype, device="cpu")
    if whole:
        tokens[:whole] = stream.unfold(0, length + 1, length)
    if len(count) > whole:
        count[-1] = target_count - whole * length
        tokens[-1, : count[-1] + 1] = stream[whole * length :]
    return {"tokens": tokens, "count": count}


def check_long_enough(stream: Stream, train: Tensor, test: Tensor, least: int, what: str) -> None:
    """Raises DataError where a part has not `least` bytes or tokens."""
    if min(len(train), len(test)) < least:
        raise DataError(
            f"{stream.name} from {stream.source} is too short: {len(train):,} {what} to train on and {len(test):,} to "
            f"test with, and {least:,} of each are wanted; take a longer text or a smaller length"
        )


def _bytes(stream: Stream, settings: Settings) -> dict[str, Any]:
    """Both parts as one row of bytes each."""
    train, test = (numpy.frombuffer(part.encode("utf-8"), numpy.uint8) for part in cut(stream.text, settings.test_part))
    return {"train": torch.from_numpy(train.copy()), "test": torch.from_numpy(test.copy()), "vocabulary_size": 256}


def _tokens(stream: Stream, settings: Settings) -> dict[str, Any]:
    """Both parts as one row of tokens each, from which windows of any length are cut."""

    def make() -> dict[str, Any]:
        train, test = (pieces(part) for part in cut(stream.text, settings.test_part))
        tokenizer = tokenizer_for(settings, train, train_byte_pairs)
        streams = encode_stream(tokenizer, train), encode_stream(tokenizer, test)
        return {"train": streams[0], "test": streams[1], "vocabulary_size": size_of(tokenizer)}

    return cached(stream.folder, stream.name, settings.data(stream.data), settings.key("next_token"), make)
