"""A running text: where it is found, where it is cut, and that its pieces are the text."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from torch_parallel.workloads.errors import DataError, DataNotFound
from torch_parallel.workloads.text import stream
from torch_parallel.workloads.text.stream import cut, pieces, read_stream
from torch_parallel.workloads.text.vocabulary import encode_stream, train_byte_pairs


@pytest.mark.parametrize(
    "place",
    ["tinyshakespeare.txt", "tiny_shakespeare.txt", "text/tinyshakespeare/input.txt", "tiny_shakespeare/input.txt"],
)
def test_tinyshakespeare_is_found(place: str, tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes(b"of something else")
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_bytes("First Citizen:\r\nBefore we proceed \x81".encode("latin-1"))
    read = read_stream("tinyshakespeare", [tmp_path])
    assert (read.name, read.text) == ("tinyshakespeare", "First Citizen:\nBefore we proceed \x81")
    assert read.source == f"{tmp_path / place} (not UTF-8, read as latin-1)"
    assert read.folder == (tmp_path / place).parent and read.data == (tmp_path / place).read_bytes()


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        DataNotFound, match=rf"^tinyshakespeare was not found: looked for tinysh.* in {tmp_path}, .*; put"
    ):
        read_stream("tinyshakespeare", [tmp_path])
    with pytest.raises(
        DataNotFound, match=r"^shakespeare is no file, and none of tinyshakespeare, python_docs: looked"
    ):
        read_stream("shakespeare", [tmp_path])
    with pytest.raises(DataError, match=f"^{tmp_path} cannot be read: Is a directory"):
        read_stream(tmp_path, [])


def test_the_help_texts_of_python() -> None:
    from pydoc_data.topics import topics

    read = read_stream("python_docs", [])
    assert read.folder is None and read.source.startswith("the help texts of Python 3.")
    first, last = min(topics), max(topics)
    assert read.text.startswith(topics[first].strip("\n")) and read.text.endswith(topics[last].strip("\n") + "\n")
    assert all(text.strip("\n") in read.text for text in topics.values())


def test_a_python_without_help_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataNotFound, match=r"^python_docs was not found: this Python lacks pydoc_data.topics; install"):
        read_stream("python_docs", [])


@pytest.mark.parametrize(
    ("line_end", "expected"),
    [
        (89, 90),  # the line ends where the tenth begins
        (92, 90),  # 3 characters too far: near is a quarter of 10, so 2
        (91, 92),
        (88, 89),
        (86, 90),
        (None, 90),
    ],
)
def test_the_end_is_cut_off_after_a_line_if_one_ends_near(line_end: int | None, expected: int) -> None:
    text = "".join("\n" if index == line_end else "x" for index in range(100))
    train, test = cut(text, 0.1)
    assert len(train) == expected and train + test == text


def test_the_nearer_of_two_lines() -> None:
    text = "x" * 9000
    for ends, expected in (((8090, 8115), 8091), ((8080, 8105), 8106), ((8099, 8100), 8100), ((7000, 9000), 8100)):
        with_lines = "".join("\n" if index in ends else each for index, each in enumerate(text))
        assert len(cut(with_lines, 0.1)[0]) == expected


def test_pieces_are_tokenised_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE_CHARACTERS", 50)
    draw = random.Random(0)
    text = "".join(draw.choice(["word", " ", "\n", "\n\n", " \n ", "é", "it's", "12"]) for _ in range(2000))
    found = pieces(text)
    assert "".join(found) == text and len(found) > 20
    tokenizer = train_byte_pairs([text], 400)
    assert encode_stream(tokenizer, found).tolist() == encode_stream(tokenizer, [text]).tolist()
    assert pieces("") == [] and pieces("x" * 200) == ["x" * 200]
