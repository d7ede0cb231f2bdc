"""Wrong numbers are told before a file is opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from torch_parallel.workloads.text import load_csv, load_masked, load_text
from torch_parallel.workloads.text.settings import checked


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length": 0}, "length is 0; a whole number, at least"),
        ({"length": 2.5}, "length is 2.5; a whole number, at least"),
        ({"length": True}, "length is True; a whole number"),
        ({"seed": -1}, "seed is -1; a whole number, at least 0"),
        ({"seed": 2**63}, "seed is 9223372036854775808; a whole number up to 9223372036854775807"),
        ({"seed": "0"}, "seed is '0'; a whole number"),
        ({"test_part": 0}, "test_part is 0; a number between 0 and 1"),
        ({"test_part": 1.0}, "test_part is 1.0; a number between"),
        ({"test_part": float("nan")}, "test_part is nan; a number between"),
        ({"vocabulary_size": 0}, "vocabulary_size is 0; a whole number, at least 1"),
    ],
)
@pytest.mark.parametrize("load", [load_csv, load_text, load_masked])
def test_a_wrong_number_is_one_line(load: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        load("/nowhere", [], **{"length": 8, "seed": 0} | given)


def test_numbers_of_numpy_are_taken_as_they_are_meant() -> None:
    settings = checked(numpy.int64(8), numpy.int32(3), numpy.int64(50), numpy.float64(0.5), None, least_length=3)
    assert (settings.length, settings.seed, settings.vocabulary_size, settings.test_part) == (8, 3, 50, 0.5)
    assert json.dumps(settings.key("masked", "seed")) == json.dumps(
        {"task": "masked", "saved": False, "vocabulary_size": 50, "test_part": 0.5, "seed": 3}
    )


def test_a_tokenizer_is_part_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    settings = checked(8, 0, 50, 0.5, tmp_path, least_length=3)
    assert settings.data(b"text") == [b"text", b"{}"] and settings.says("x") == f"tokens of {tmp_path}/tokenizer.json"
    assert checked(8, 0, 50, 0.5, None, least_length=3).data(b"text") == [b"text"]
