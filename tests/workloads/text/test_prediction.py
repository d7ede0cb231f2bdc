"""Windows of bytes and of tokens against a loop that is slow and plain."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.text import load_text, prediction
from torch_parallel.workloads.text.prediction import windows
from torch_parallel.workloads.text.vocabulary import encode_stream, train_byte_pairs

REAL_FOLDER = os.environ.get("TORCH_PARALLEL_DATA", "")


def made_text(characters: int = 5000) -> str:
    draw = random.Random(0)
    lines = (" ".join(draw.choice(["to", "be", "or", "not", "höre"]) for _ in range(7)) for _ in range(characters))
    return "\n".join(lines)[:characters]


def write(folder: Path, text: str) -> Path:
    (folder / "a.txt").write_bytes(text.encode())
    return folder / "a.txt"


def slow_windows(stream: list[int], length: int) -> tuple[list[list[int]], list[int]]:
    rows, counts = [], []
    begin = 0
    while begin + 1 < len(stream):
        row = stream[begin : begin + length + 1]
        counts.append(len(row) - 1)
        rows.append(row + [0] * (length + 1 - len(row)))
        begin += length
    return rows, counts


def joined(part: dict[str, Tensor]) -> list[int]:
    """The stream that the windows were cut from: the first token, and each one's targets."""
    tokens, counts = part["tokens"].tolist(), part["count"].tolist()
    return tokens[0][:1] + [token for row, count in zip(tokens, counts, strict=True) for token in row[1 : count + 1]]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 10, 11, 12, 100])
def test_windows_are_those_of_a_plain_loop(length: int) -> None:
    stream = list(range(1, 13))
    for size in range(2, 13):
        part = windows(torch.tensor(stream[:size], dtype=torch.int32), length)
        assert (part["tokens"].tolist(), part["count"].tolist()) == slow_windows(stream[:size], length)
        assert (part["tokens"].dtype, part["count"].dtype) == (torch.int32, torch.int64)


def test_bytes_of_a_file(tmp_path: Path) -> None:
    text = made_text()
    data = load_text(write(tmp_path, text), [], 32)
    assert (data.name, data.source, data.task, data.unit) == ("a", f"{tmp_path}/a.txt", "next_token", "byte")
    assert (data.vocabulary_size, data.length, data.train["tokens"].dtype) == (256, 32, torch.uint8)
    train, test = joined(data.train), joined(data.test)
    assert bytes(train + test) == text.encode()
    assert abs(len(bytes(test).decode()) - 500) <= 125 and train[-1] == ord("\n")  # a tenth, cut after a line near it
    assert (data.train["tokens"].tolist(), data.train["count"].tolist()) == slow_windows(train, 32)
    assert not (tmp_path / ".torch_parallel_cache").exists()


def test_tokens_of_a_file(tmp_path: Path) -> None:
    text = made_text() + "zz" * 200  # only the test part has these, so no token may be made for them
    data = load_text(write(tmp_path, text), [], 16, tokens=True, vocabulary_size=262)
    assert (data.unit, data.vocabulary_size, data.train["tokens"].dtype) == ("token", 262, torch.int32)
    assert data.source == f"{tmp_path}/a.txt, byte pairs trained on its training part"
    of_bytes = load_text(tmp_path / "a.txt", [], 16)
    train_text = bytes(joined(of_bytes.train)).decode()
    tokenizer = train_byte_pairs([train_text], 262)
    assert joined(data.train) == encode_stream(tokenizer, [train_text]).tolist()
    assert tokenizer.decode(joined(data.train) + joined(data.test)) == text


def test_a_tokenizer_that_is_given_is_used(tmp_path: Path) -> None:
    tokenizer = train_byte_pairs(["to be or not to be"], 262)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = made_text()
    for tokens in (True, False):
        data = load_text(write(tmp_path, text), [], 16, tokens=tokens, tokenizer=tmp_path)
        assert tokenizer.decode(joined(data.train) + joined(data.test)) == text
        assert data.vocabulary_size == 262 and data.source.endswith(f"tokens of {tmp_path}/tokenizer.json")


def test_tokens_are_kept_for_windows_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_text(write(tmp_path, made_text()), [], 16, tokens=True, vocabulary_size=262)
    monkeypatch.setattr(prediction, "train_byte_pairs", None)  # it would be called to make them anew
    other = load_text(tmp_path / "a.txt", [], 7, tokens=True, vocabulary_size=262)
    assert joined(first.train) == joined(other.train) and other.vocabulary_size == 262
    with pytest.raises(TypeError):
        load_text(tmp_path / "a.txt", [], 7, tokens=True, vocabulary_size=263)


def test_windows_line_ends_and_other_encodings_give_the_same_bytes(tmp_path: Path) -> None:
    text = made_text()
    usual = load_text(write(tmp_path, text), [], 32)
    for data in (text.replace("\n", "\r\n").encode(), text.encode("utf-16"), text.encode("utf-8-sig")):
        (tmp_path / "a.txt").write_bytes(data)
        assert joined(load_text(tmp_path / "a.txt", [], 32).train) == joined(usual.train)


def test_too_short_a_text_is_told_with_the_numbers(tmp_path: Path) -> None:
    file = write(tmp_path, "x" * 100)
    assert load_text(file, [], 9).test["tokens"].shape == (1, 10)
    with pytest.raises(
        DataError,
        match=rf"^a from {file} is too short: 90 bytes to train on and 10 to test with, and 11 of each are wanted",
    ):
        load_text(file, [], 10)
    with pytest.raises(DataError, match="too short: 0 bytes to train on and 0 to test with, and 2 of each"):
        load_text(write(tmp_path, ""), [], 1)
    with pytest.raises(DataError, match=r"too short: \d+ tokens to train on and \d+ to test with, and 101 of each"):
        load_text(write(tmp_path, "xy" * 100), [], 100, tokens=True)


def test_the_help_texts_of_python_need_no_file() -> None:
    data = load_text("python_docs", [], 256)
    assert data.name == "python_docs" and len(data.train["tokens"]) > 1000
    with torch.device("meta"):
        assert torch.equal(load_text("python_docs", [], 256).train["tokens"], data.train["tokens"])


def test_the_real_one_where_there_is_one(tmp_path: Path) -> None:
    """With TORCH_PARALLEL_DATA naming a folder with Tiny Shakespeare: that, copied; else a made text."""
    real = Path(REAL_FOLDER) / "text" / "tinyshakespeare" / "input.txt"
    file = tmp_path / "tinyshakespeare.txt"
    if REAL_FOLDER and real.is_file():
        shutil.copyfile(real, file)
    else:
        file.write_text(made_text(), encoding="utf-8")
    data = load_text("tinyshakespeare", [tmp_path], 256)
    assert bytes(joined(data.train) + joined(data.test)) == file.read_bytes()
