"""Our own files and streams: text is UTF-8 whatever the locale, and what fails in them is told from a user's errors.

Where Python takes the locale's ASCII, names that came from outside hold their bytes as surrogates. They go into files
as the bytes that they were, and what a stream cannot show is escaped: neither ends a run.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


class OutputError(OSError):
    """A file or stream of our own cannot be written: a full disk, a closed pipe, a folder that went away. One line."""


@contextlib.contextmanager
def our_own() -> Iterator[None]:
    """An OSError of this block comes of files and streams of our own: it becomes an OutputError of the same words."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(*error.args, *([error.filename] if error.filename is not None else [])) from error


def path_of(name: str | os.PathLike[str]) -> Path:
    """The path of that name, `~` expanded; in UTF-8 where the file system's encoding has not all its characters."""
    text = os.fspath(name)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        text = os.fsdecode(text.encode("utf-8", "surrogateescape"))
    return Path(os.path.expanduser(text))


def utf8(text: str) -> bytes:
    """The text in UTF-8; the bytes that surrogates stand for, or U+FFFD for those that are no UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").encode("utf-8")


def say(line: str) -> None:
    """Prints a line, at once and whatever stdout's encoding; nothing where there is no stdout. Raises OutputError."""
    if sys.stdout is None:
        return
    with our_own():
        try:
            print(line, flush=True)
        except UnicodeEncodeError:
            encoding = getattr(sys.stdout, "encoding", None) or "ascii"
            print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


class _OurOwn(io.FileIO):
    """The descriptor of a standard stream. That it cannot be written is our own error, whoever printed."""

    def write(self, data: Any) -> int:
        with our_own():
            return super().write(data)


def prepare_streams() -> None:
    """Makes stdin, stdout and stderr fit for a command: closed ones are opened, and no character ends the run.

    Where one is closed, the next file that is opened would get its number, and all that is printed. What cannot be
    printed for another reason is an OutputError from then on.
    """
    fill_closed_streams()
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or stream is getattr(sys, f"__{name}__"):  # else somebody has put another one there
            setattr(sys, name, _prepared(stream, number))


def _prepared(stream: TextIO | None, number: int) -> TextIO:
    if stream is not None:
        stream.flush()
    raw = _OurOwn(number, "w", closefd=False)
    at_once = bool(getattr(stream, "write_through", False))  # python -u
    return io.TextIOWrapper(
        raw if at_once else io.BufferedWriter(raw),  # as Python makes it
        encoding=stream.encoding if stream else "utf-8",
        errors=_AS_CAN_BE,
        line_buffering=number == 2 or os.isatty(number),
        write_through=at_once,
    )


def fill_closed_streams() -> None:
    """Opens /dev/null as each of the descriptors 0, 1 and 2 that is closed, so that no other file becomes one."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)


_AS_CAN_BE = "torch_parallel.as_can_be"


def _as_can_be(error: UnicodeError) -> tuple[str | bytes, int]:
    """What stands for bytes is written as these; what the encoding lacks is escaped."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.lookup_error("backslashreplace")(error)


codecs.register_error(_AS_CAN_BE, _as_can_be)
