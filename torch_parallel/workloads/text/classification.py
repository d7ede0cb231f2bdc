"""Texts with a category each, from a CSV file: "bbc_text", "ag_news", or a file of one's own.

BBC news has 2,225 articles in 5 categories, of which 2,126 are different (Greene and Cunningham, 2006). AG news has
120,000 and 7,600 short ones in 4 (Zhang, Zhao and LeCun, 2015). Neither comes with this package: they are looked for in
the data folders.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_parallel.workloads.errors import DataError, DataNotFound
from torch_parallel.workloads.text.cache import cached
from torch_parallel.workloads.text.files import find_named, find_path, read_bytes
from torch_parallel.workloads.text.parts import check_known, class_names, split, without_repeats, without_texts_of
from torch_parallel.workloads.text.settings import Settings, checked
from torch_parallel.workloads.text.table import Row, Table, read_table, wrong
from torch_parallel.workloads.text.text_data import TextData
from torch_parallel.workloads.text.vocabulary import LEAST_LENGTH, encode_rows, size_of, tokenizer_for, train_wordpiece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAIN_FILE, TEST_FILE = "train.csv", "test.csv"
NAMED_FILES = {
    "bbc_text": tuple(f"{folder}{name}.csv" for folder in ("", "bbc_text/") for name in ("bbc-text", "bbc_text")),
    "ag_news": tuple(f"{folder}/{TRAIN_FILE}" for folder in ("ag_news", "ag_news_csv", "AG_NEWS")),
}
# In AG news the categories are numbers, and these are what they stand for.
AG_NEWS_CLASSES = {"1": "World", "2": "Sports", "3": "Business", "4": "Sci/Tech"}


def load_csv(
    path_or_name: str | os.PathLike[str],
    folders: Sequence[Path],
    length: int,
    seed: int,
    vocabulary_size: int = 8000,
    test_part: float = 0.1,
    tokenizer: str | os.PathLike[str] | None = None,
) -> TextData:
    """Texts to be classified, `length` tokens each, by one of NAMED_FILES or from a file or folder.

    A folder has a train.csv and may have a test.csv; without it, and with a single file, `test_part` of each class is
    drawn by `seed`. The tokens are those of `tokenizer` (a tokenizer.json or a folder that has one); without it, a
    WordPiece vocabulary of at most `vocabulary_size` is trained on the training texts.

    Raises DataNotFound if there is no such file, DataError, one line, for one that cannot be used, and ValueError for a
    wrong number.
    """
    settings = checked(length, seed, vocabulary_size, test_part, tokenizer, LEAST_LENGTH)
    name, paths = _find(path_or_name, folders)
    files = [(path, read_bytes(path)) for path in paths]
    key = settings.key("classification", "length", "seed") | {"file_count": len(paths)}
    data = settings.data(*(content for _, content in files))
    made = cached(paths[0].parent, name, data, key, lambda: _make(files, settings))
    notes = "; ".join([*made["notes"], settings.says("WordPiece tokens trained on the training texts")])
    return TextData(
        name=name,
        source=f"{' and '.join(map(str, paths))} ({notes})",
        task="classification",
        train=made["train"],
        test=made["test"],
        vocabulary_size=made["vocabulary_size"],
        length=settings.length,
        class_names=tuple(_shown(name, made["class_names"])),
    )


def _shown(name: str, names: list[str]) -> list[str]:
    """What the categories stand for."""
    known = name == "ag_news" and set(names) <= set(AG_NEWS_CLASSES)
    return [AG_NEWS_CLASSES[each] for each in names] if known else names


def _find(path_or_name: str | os.PathLike[str], folders: Sequence[Path]) -> tuple[str, list[Path]]:
    """The name of the data, and its file or its training and test files."""
    name = os.fspath(path_or_name)
    if name in NAMED_FILES:
        train = find_named(name, NAMED_FILES[name], folders)
        return name, _with_test(train) if train.name == TRAIN_FILE else [train]
    path = find_path(path_or_name, folders, list(NAMED_FILES))
    if not path.is_dir():
        return path.stem, [path]
    if not (path / TRAIN_FILE).is_file():
        raise DataNotFound(f"{path} has no {TRAIN_FILE}; put it there, or give the path of a file")
    return path.resolve().name, _with_test(path / TRAIN_FILE)


def _with_test(train: Path) -> list[Path]:
    test = train.with_name(TEST_FILE)
    return [train, test] if test.is_file() else [train]


def _make(files: Sequence[tuple[Path, bytes]], settings: Settings) -> dict[str, Any]:
    """Both parts as tensors, and what is to be said of them."""
    parts = _parts(files, settings)
    tokenizer = tokenizer_for(settings, [row.text for row in parts.train], train_wordpiece)
    return {
        "train": _tensors(files[0][0], parts.train, parts.names, tokenizer, settings.length),
        "test": _tensors(files[-1][0], parts.test, parts.names, tokenizer, settings.length),
        "vocabulary_size": size_of(tokenizer),
        "class_names": parts.names,
        "notes": parts.notes,
    }


@dataclass(frozen=True)
class _Parts:
    train: list[Row]
    test: list[Row]
    names: list[str]
    notes: list[str]


def _parts(files: Sequence[tuple[Path, bytes]], settings: Settings) -> _Parts:
    path = files[0][0]
    table = read_table(*files[0])
    train, repeats = without_repeats(table.rows, path.name if len(files) > 1 else "")
    names, notes = class_names(path, train), [*table.notes, *repeats]
    if len(files) == 1:
        return _Parts(*split(path, train, names, settings.test_part, settings.seed), names, notes)
    test, more = _test_rows(*files[1], table, names)
    return _Parts(train, test, names, notes + more)


def _test_rows(path: Path, content: bytes, train: Table, names: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Of a file of its own: what is not in the training file, be it there under two categories and not trained on."""
    table = read_table(path, content, like=train.columns)
    check_known(path, table.rows, names)
    once, repeats = without_repeats(table.rows, path.name)
    rows, known = without_texts_of(train.rows, once)
    if not rows:
        raise DataError(f"{path} cannot be used: training has all of its texts; give others to test with")
    return rows, [*(f"{note} in {path.name}" for note in table.notes), *repeats, *known]


def _tensors(
    path: Path, rows: Sequence[Row], names: Sequence[str], tokenizer: Tokenizer, length: int
) -> dict[str, Tensor]:
    """Raises DataError for a text without a token: a model would divide by the number of tokens."""
    tokens, mask = encode_rows(tokenizer, [row.text for row in rows], length)
    empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        found = "the tokenizer makes no token of its text"
        raise wrong(path, rows[empty[0]].line, found, "delete the row, or take another tokenizer")
    labels = torch.tensor([names.index(row.category) for row in rows], dtype=torch.int64, device="cpu")
    return {"tokens": tokens, "mask": mask, "labels": labels}
