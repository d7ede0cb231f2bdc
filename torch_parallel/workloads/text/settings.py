"""What a text is loaded with. It is checked before the text is read, which may take long."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_parallel.workloads.errors import DataNotFound
from torch_parallel.workloads.text.files import read_bytes

MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class SavedTokenizer:
    """The file of a tokenizer that somebody saved, and what is in it."""

    file: Path
    content: bytes


@dataclass(frozen=True)
class Settings:
    """Checked numbers, and the tokenizer if one is given: without it, one is trained."""

    length: int
    seed: int
    vocabulary_size: int
    test_part: float
    saved: SavedTokenizer | None

    def key(self, task: str, *more: str) -> dict[str, Any]:
        """What the cache tells settings apart by; `more` are fields that matter beside those that always do."""
        fields = ("vocabulary_size", "test_part", *more)
        return {"task": task, "saved": self.saved is not None} | {name: getattr(self, name) for name in fields}

    def data(self, *contents: bytes) -> list[bytes]:
        """What the cache tells data apart by: the text's files, and the tokenizer's."""
        return [*contents, self.saved.content] if self.saved else list(contents)

    def says(self, trained: str) -> str:
        """Where the tokens come from, for a source line; `trained` if from no file."""
        return f"tokens of {self.saved.file}" if self.saved else trained


def checked(
    length: int,
    seed: int,
    vocabulary_size: int,
    test_part: float,
    tokenizer: str | os.PathLike[str] | None,
    least_length: int,
) -> Settings:
    """Raises ValueError, one line, for a number that is not what it should be; for the tokenizer see `read_saved`."""
    numbers = _whole("length", length, least_length), _whole("seed", seed, 0)
    if seed > MOST_SEED:
        raise ValueError(f"seed is {seed}; a whole number up to {MOST_SEED} is wanted")
    if isinstance(test_part, bool) or not isinstance(test_part, int | float) or not 0 < test_part < 1:
        raise ValueError(f"test_part is {test_part!r}; a number between 0 and 1 is wanted, such as 0.1 for a tenth")
    saved = read_saved(Path(tokenizer).expanduser()) if tokenizer is not None else None
    return Settings(*numbers, _whole("vocabulary_size", vocabulary_size, 1), float(test_part), saved)


def read_saved(path: Path) -> SavedTokenizer:
    """The tokenizer of a tokenizer.json, or of a folder that has one, as transformers saves it.

    Raises DataNotFound if it is not there and DataError if it cannot be read.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        remedy = "name a tokenizer.json, or a folder into which transformers' save_pretrained wrote one"
        raise DataNotFound(f"tokenizer {file} was not found; {remedy}")
    return SavedTokenizer(file, read_bytes(file))


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value) if not isinstance(value, bool) else least - 1
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} is {value!r}; a whole number, at least {least}, is wanted")
    return number
