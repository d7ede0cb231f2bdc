"""What was made is read again, and only if it is whole and of the same data and settings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_parallel.workloads.text import cache
from torch_parallel.workloads.text.cache import cached


class Maker:
    """Makes the same again, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> dict[str, Any]:
        self.count += 1
        return {"train": {"tokens": torch.arange(1000)}, "size": 7, "notes": ["a note"]}


def check(found: dict[str, Any]) -> None:
    assert found["train"]["tokens"].tolist() == list(range(1000))
    assert (found["size"], found["notes"]) == (7, ["a note"])


def only_file(folder: Path) -> Path:
    (file,) = (folder / ".torch_parallel_cache").iterdir()
    return file


def test_it_is_made_once(tmp_path: Path) -> None:
    maker = Maker()
    for _ in range(3):
        check(cached(tmp_path, "name", [b"data"], {"length": 3}, maker))
    assert maker.count == 1
    assert only_file(tmp_path).name.startswith("name-")


@pytest.mark.parametrize(
    ("data", "settings"), [([b"datb"], {"length": 3}), ([b"da", b"ta"], {"length": 3}), ([b"data"], {"length": 4})]
)
def test_other_data_and_other_settings_are_made_anew(
    data: list[bytes], settings: dict[str, Any], tmp_path: Path
) -> None:
    maker = Maker()
    cached(tmp_path, "name", [b"data"], {"length": 3}, maker)
    cached(tmp_path, "name", data, settings, maker)
    assert maker.count == 2 and len(list((tmp_path / ".torch_parallel_cache").iterdir())) == 2


def test_another_version_of_the_library_may_tokenise_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker()
    cached(tmp_path, "name", [b"data"], {}, maker)
    monkeypatch.setattr(cache, "version", lambda name: f"{name} of tomorrow")
    cached(tmp_path, "name", [b"data"], {}, maker)
    assert maker.count == 2


def with_digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest() + payload


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[:-1],
        lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],  # torch does not notice
        lambda content: with_digest(b"something else"),
    ],
)
def test_a_damaged_file_is_made_anew(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    maker = Maker()
    cached(tmp_path, "name", [b"data"], {}, maker)
    file = only_file(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    for _ in range(2):
        check(cached(tmp_path, "name", [b"data"], {}, maker))
    assert maker.count == 2 and only_file(tmp_path) == file


def refuse(*arguments: object, **more: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("what", ["a file is there", "no such folder", "a full disk", "no rename"])
def test_where_none_can_be_written_it_is_made_each_time(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, folder = Maker(), tmp_path
    if what == "a file is there":
        (folder / ".torch_parallel_cache").write_bytes(b"somebody's")
    elif what == "no such folder":
        folder = tmp_path / "nowhere"
    elif what == "a full disk":
        monkeypatch.setattr(Path, "write_bytes", refuse)
    else:
        monkeypatch.setattr(os, "replace", refuse)
    for _ in range(2):
        check(cached(folder, "name", [b"data"], {}, maker))
    assert maker.count == 2
    if what == "a file is there":
        assert (folder / ".torch_parallel_cache").read_bytes() == b"somebody's"
    else:
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    maker = Maker()
    for _ in range(2):
        check(cached(None, "name", [b"data"], {}, maker))
    assert maker.count == 2 and list(tmp_path.iterdir()) == []


def test_what_fails_is_not_kept(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached(tmp_path, "name", [b"data"], {}, fail)
    assert list(tmp_path.iterdir()) == []
