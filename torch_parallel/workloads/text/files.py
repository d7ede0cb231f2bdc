"""Where a text lies, and its characters whatever they are encoded in.

A file is UTF-8 unless its first bytes or its content say otherwise. What was found instead is told, never guessed in
silence: a wrong encoding does not fail, it trains on wrong characters.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_parallel.workloads.errors import DataError, DataNotFound

# Longer marks first: that of UTF-16 is the beginning of that of UTF-32.
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
REMEDY = "put it there, or give the path of a file"


def find_named(name: str, files: Sequence[str], folders: Sequence[Path]) -> Path:
    """The first of `files`, in a folder or in its `text/`, that is there. Raises DataNotFound with what it looked for.

    The folders go first: all files are looked for in one before the next.
    """
    for place in _places(folders):
        for file in files:
            if os.path.isfile(place / file):
                return place / file
    raise _not_found(f"{name} was not found", files, folders)


def find_path(path: str | os.PathLike[str], folders: Sequence[Path], known: Sequence[str]) -> Path:
    """The file or folder `path` as it is, else in a folder or in its `text/`.

    Raises DataNotFound if there is none; it says the `known` names, because one of them may be meant.
    """
    given = Path(path).expanduser()
    for each in (given, *(place / given for place in _places(folders))):
        if os.path.exists(each):
            return each
    places = [] if given.is_absolute() else [Path(), *folders]
    raise _not_found(f"{path} is no file, and none of {', '.join(known)}", [str(given)], places)


def read_bytes(path: Path) -> bytes:
    """Raises DataError, one line, where the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; choose a file that you may read") from error


def decode(path: Path, data: bytes) -> tuple[str, list[str]]:
    """The text of a file, and what there is to say of how it was read.

    Raises DataError, one line that names the file, if it is no text.
    """
    mark = next((each for each in MARKS if data.startswith(each)), b"")
    if mark:
        text, notes = _by_mark(path, data[len(mark) :], MARKS[mark])
    else:
        text, notes = _without_mark(data)
    nuls = text.count("\0")
    if nuls * 10 > len(text):
        raise DataError(
            f"{path} cannot be used: {nuls:,} of its {len(text):,} characters are NUL, so it is no text, or UTF-16 "
            "without its mark; save it as UTF-8"
        )
    if nuls:
        text, notes = text.replace("\0", ""), [*notes, f"{many(nuls, 'NUL character')} left out"]
    return text, notes


def many(count: int, what: str) -> str:
    """So many of what, as it is said."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def _by_mark(path: Path, data: bytes, encoding: str) -> tuple[str, list[str]]:
    try:
        return data.decode(encoding), [] if encoding == "utf-8" else [f"read as {encoding.upper()}"]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} cannot be used: its first bytes say {encoding.upper()}, and it is not from byte {error.start} on "
            f"({error.reason}); save it as UTF-8"
        ) from error


def _without_mark(data: bytes) -> tuple[str, list[str]]:
    try:
        return data.decode("utf-8"), []
    except UnicodeDecodeError as error:
        # A file that was cut at some byte. One of another encoding may end so too, but is not UTF-8 all the way to it.
        if error.reason == "unexpected end of data" and not data[: error.start].isascii():
            return data[: error.start].decode("utf-8"), ["its last character is cut and left out"]
    try:
        return data.decode("cp1252"), ["not UTF-8, read as cp1252"]
    except UnicodeDecodeError:
        return data.decode("latin-1"), ["not UTF-8, read as latin-1"]


def _places(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from (folder, folder / "text")


def _not_found(what: str, files: Sequence[str], folders: Sequence[Path]) -> DataNotFound:
    names = ", ".join(files)
    places = ", ".join(map(str, _places(folders)))
    return DataNotFound(f"{what}: looked for {names}{f' in {places}' if places else ''}; {REMEDY}")
