"""A running text some of whose tokens are hidden and to be found again, as BERT is trained (Devlin et al., 2018).

What is hidden is drawn once, here, and not anew in each epoch: every strategy and every number of workers then trains
on the same rows, which is what makes their losses comparable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.task import IGNORED
from torch_parallel.workloads.text.cache import cached
from torch_parallel.workloads.text.prediction import check_long_enough
from torch_parallel.workloads.text.settings import Settings, checked
from torch_parallel.workloads.text.stream import cut, pieces, read_stream
from torch_parallel.workloads.text.text_data import TextData
from torch_parallel.workloads.text.vocabulary import (
    LEAST_LENGTH,
    MASK,
    SPECIAL,
    encode_stream,
    number_of,
    pad_number,
    size_of,
    tokenizer_for,
    train_wordpiece,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DRAWN = 0.15  # of the tokens are to be predicted
MASKED, RANDOM = 0.8, 0.1  # of these, become the mask token or any other; the rest stay
MASK_NAMES = (MASK, "<mask>")


def load_masked(
    path_or_name: str | os.PathLike[str],
    folders: Sequence[Path],
    length: int,
    seed: int,
    vocabulary_size: int = 4000,
    test_part: float = 0.1,
    tokenizer: str | os.PathLike[str] | None = None,
) -> TextData:
    """Rows of `length` tokens of a text, [CLS] ... [SEP], some of them hidden as `seed` draws them.

    The text is what `load_text` reads, and its end is the test part. The last row of a part is filled up with the pad
    id. The tokens are those of `tokenizer` (a tokenizer.json or a folder that has one, made for such a task); without
    it, a WordPiece vocabulary of at most `vocabulary_size` is trained on the training part.

    Raises DataNotFound if there is no such file, DataError, one line, for one that cannot be used or is shorter than a
    row for each part, and ValueError for a wrong number.
    """
    settings = checked(length, seed, vocabulary_size, test_part, tokenizer, LEAST_LENGTH)
    stream = read_stream(path_or_name, folders)
    key = settings.key("masked")
    made = cached(stream.folder, stream.name, settings.data(stream.data), key, lambda: _make(stream.text, settings))
    check_long_enough(stream, made["train"], made["test"], settings.length - 2, "tokens")
    generator = torch.Generator("cpu").manual_seed(settings.seed)
    train, test = (_part(made[part], settings.length, made, generator) for part in ("train", "test"))
    return TextData(
        name=stream.name,
        source=f"{stream.source}, {settings.says('WordPiece tokens trained on its training part')}",
        task="masked",
        train=train,
        test=test,
        vocabulary_size=made["vocabulary_size"],
        length=settings.length,
    )


def _part(stream: Tensor, length: int, made: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    tokens, mask, real = rows(stream, length, made["begin"], made["end"], made["pad"])
    return {"mask": mask} | hide(tokens, real, made["mask"], made["words"], generator)


def rows(stream: Tensor, length: int, begin: int, end: int, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stream of tokens in rows int32 [n, length], `begin` ... `end`, filled up with `pad`.

    And two masks: where a token is, and where it is one of the stream.
    """
    inner = length - 2
    count = -(-len(stream) // inner)
    tokens = torch.full((count, length), pad, dtype=torch.int32, device="cpu")
    place = torch.arange(length, device="cpu").expand(count, length)
    last = torch.full((count, 1), inner + 1, device="cpu")  # the column of `end`
    last[-1] = len(stream) - (count - 1) * inner + 1
    real = (place > 0) & (place < last)
    tokens[real] = stream.to(torch.int32)
    tokens[:, 0] = begin
    tokens.scatter_(1, last, end)
    return tokens, place <= last, real


def hide(
    tokens: Tensor, real: Tensor, mask_number: int, words: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """The tokens and targets of a masked part, see `TextData`. What is to be found is drawn where `real` is true.

    Of what is drawn, some become the token `mask_number`, some one of `words`, and the rest stay.
    """
    shape, draw = tokens.shape, {"generator": generator, "device": "cpu"}
    drawn = real & (torch.rand(shape, dtype=torch.float64, **draw) < DRAWN)  # type: ignore[call-overload]
    what = torch.rand(shape, dtype=torch.float64, **draw)  # type: ignore[call-overload]
    others = words[torch.randint(len(words), shape, **draw)].to(torch.int32)  # type: ignore[call-overload]
    targets = tokens.to(torch.int64).masked_fill(~drawn, IGNORED)
    hidden = tokens.masked_fill(drawn & (what < MASKED), mask_number)
    hidden = torch.where(drawn & (what >= MASKED) & (what < MASKED + RANDOM), others, hidden)
    return {"tokens": hidden, "targets": targets}


def _make(text: str, settings: Settings) -> dict[str, Any]:
    """Both parts as one row of tokens each, and the numbers that rows are made with."""
    train, test = (pieces(part) for part in cut(text, settings.test_part))
    tokenizer = tokenizer_for(settings, train, train_wordpiece)
    begin, end, mask = _around(tokenizer, settings.saved.file if settings.saved else None)
    return {
        "train": encode_stream(tokenizer, train),
        "test": encode_stream(tokenizer, test),
        "vocabulary_size": size_of(tokenizer),
        "begin": begin,
        "end": end,
        "mask": mask,
        "pad": pad_number(tokenizer),
        "words": _words(tokenizer),
    }


def _around(tokenizer: Tokenizer, file: Path | None) -> tuple[int, int, int]:
    """The numbers of the tokens that begin and end a text, and of the one that hides others."""
    ends, mask = tokenizer.encode("").ids, number_of(tokenizer, MASK_NAMES)
    if len(ends) != 2 or mask is None:
        found = f"it puts {len(ends)} tokens around a text and has {'no' if mask is None else 'a'} mask token"
        raise DataError(f"{file} is not for masked text: {found}; take a tokenizer such as that of BERT")
    return ends[0], ends[1], mask


def _words(tokenizer: Tokenizer) -> Tensor:
    """The numbers of all tokens that stand for text, in order: int64 [k]."""
    special = {tokenizer.token_to_id(name) for name in SPECIAL}
    special |= {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    numbers = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - special)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
