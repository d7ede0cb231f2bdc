"""A running text, cut into what is trained on and what is tested with.

The test part is the end of the text, and not windows drawn from all of it: these would have trained neighbours that say
nearly the same.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_parallel.workloads.errors import DataNotFound
from torch_parallel.workloads.text.files import decode, find_named, find_path, read_bytes

PYTHON_DOCS = "python_docs"
NAMED_FILES = {
    "tinyshakespeare": (
        "tinyshakespeare.txt",
        "tiny_shakespeare.txt",
        *(
            f"{folder}/{name}.txt"
            for folder in ("tinyshakespeare", "tiny_shakespeare")
            for name in ("tinyshakespeare", "tiny_shakespeare", "input")
        ),
    )
}
NEAR_CHARACTERS = 1000  # a line break that is no further is near
PIECE_CHARACTERS = 1 << 20  # that are tokenised at once
# Between characters that are no white space: a tokenizer begins a new word there anyway.
_LINE_END = re.compile(r"(?<=\S)\n(?=\S)")


@dataclass(frozen=True)
class Stream:
    """A text and where it came from; `data` are the bytes of its file, and `folder` where that lies, if it has one."""

    name: str
    source: str
    text: str
    data: bytes
    folder: Path | None


def read_stream(path_or_name: str | os.PathLike[str], folders: Sequence[Path]) -> Stream:
    """The text of "tinyshakespeare", "python_docs" or a file, with \\n as the end of every line.

    Raises DataNotFound if there is none, and DataError, one line, if it cannot be read.
    """
    name = os.fspath(path_or_name)
    if name == PYTHON_DOCS:
        return _python_docs()
    known = [*NAMED_FILES, PYTHON_DOCS]
    path = find_named(name, NAMED_FILES[name], folders) if name in NAMED_FILES else find_path(name, folders, known)
    data = read_bytes(path)
    text, notes = decode(path, data)
    source = f"{path} ({'; '.join(notes)})" if notes else str(path)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return Stream(name if name in NAMED_FILES else path.stem, source, text, data, path.parent)


def _python_docs() -> Stream:
    """What Python's help() shows of keywords and operators, topic by topic. Every version has its own."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        remedy = "install the full standard library, or give the path of a text file"
        raise DataNotFound(f"{PYTHON_DOCS} was not found: this Python lacks pydoc_data.topics; {remedy}") from error
    text = "\n".join(topics[key].strip("\n") + "\n" for key in sorted(topics))
    source = f"the help texts of Python {platform.python_version()} (pydoc_data.topics)"
    return Stream(PYTHON_DOCS, source, text, b"", None)


def cut(text: str, test_part: float) -> tuple[str, str]:
    """The text to train on, and the `test_part` at its end. Cut after a line if one ends near.

    Near is within NEAR_CHARACTERS, and within a quarter of both parts.
    """
    goal = len(text) - round(len(text) * test_part)
    reach = min(NEAR_CHARACTERS, goal // 4, (len(text) - goal) // 4)
    found = (text.rfind("\n", goal - reach, goal), text.find("\n", goal, goal + reach))
    ends = [end + 1 for end in found if end >= 0]
    end = min(ends, key=lambda each: abs(each - goal), default=goal)
    return text[:end], text[end:]


def pieces(text: str) -> list[str]:
    """The text in pieces of a size that is tokenised at once; joined they are the text."""
    found, begin = [], 0
    while begin < len(text):
        end = _LINE_END.search(text, begin + PIECE_CHARACTERS)
        found.append(text[begin : end.end() if end else len(text)])
        begin += len(found[-1])
    return found
