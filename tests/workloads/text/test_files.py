"""Text files: where they are looked for, and every encoding that people have."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from torch_parallel.workloads.errors import DataError, DataNotFound
from torch_parallel.workloads.text.files import decode, find_named, find_path, read_bytes

TEXT = "Zoé läuft"
HERE = Path("a.csv")


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (TEXT.encode("utf-8"), []),
        (codecs.BOM_UTF8 + TEXT.encode("utf-8"), []),
        (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"), ["read as UTF-16-LE"]),
        (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), ["read as UTF-16-BE"]),
        (codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"), ["read as UTF-32-LE"]),
        (TEXT.encode("latin-1"), ["not UTF-8, read as cp1252"]),
    ],
)
def test_every_encoding_gives_the_same_text(data: bytes, note: list[str]) -> None:
    assert decode(HERE, data) == (TEXT, note)


def test_what_the_two_western_encodings_differ_in() -> None:
    assert decode(HERE, b"5 \x80")[0] == "5 €"  # cp1252; in latin-1 a control character
    assert decode(HERE, b"\x81\xe9") == ("\x81é", ["not UTF-8, read as latin-1"])  # cp1252 has no 0x81


def test_a_last_character_that_is_cut_does_not_change_the_others() -> None:
    data = "läuft é".encode()[:-1]
    assert decode(HERE, data) == ("läuft ", ["its last character is cut and left out"])
    assert decode(HERE, b"caf\xe9") == ("café", ["not UTF-8, read as cp1252"])  # nothing before it is UTF-8's own


def test_a_few_nuls_are_left_out_and_counted() -> None:
    data = b"a sentence of thirty letters\0 and more\0"
    assert decode(HERE, data) == ("a sentence of thirty letters and more", ["2 NUL characters left out"])


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (TEXT.encode("utf-16-le"), "9 of its 18 characters are NUL"),  # no mark, and its ä and é are no UTF-8
        (b"\0" * 50, "50 of its 50 characters are NUL"),
        (codecs.BOM_UTF16_LE + b"a\0b", "its first bytes say UTF-16-LE, and it is not from byte 2 on"),
    ],
)
def test_what_is_no_text_is_one_line(data: bytes, found: str) -> None:
    with pytest.raises(DataError, match=f"^a.csv cannot be used: {found}.*; save it as UTF-8$") as error:
        decode(HERE, data)
    assert "\n" not in str(error.value)


def test_all_files_in_a_folder_and_its_text_before_the_next_folder(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for place in ("b/y", "b/x", "a/text/y", "a/y", "a/x"):  # each goes before those made so far
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
        assert find_named("name", ["x", "y"], folders) == tmp_path / place


def test_what_was_looked_for_and_where_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound) as error:
        find_named("bbc_text", ["x.csv", "y.csv"], [tmp_path])
    assert str(error.value) == (
        f"bbc_text was not found: looked for x.csv, y.csv in {tmp_path}, {tmp_path}/text; "
        "put it there, or give the path of a file"
    )


def test_a_path_is_looked_for_as_it_is_and_in_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    folder = tmp_path / "data"
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "a.txt").touch()
    assert find_path("a.txt", [folder], []) == folder / "text" / "a.txt"
    Path("a.txt").touch()
    assert find_path(Path("a.txt"), [folder], []) == Path("a.txt")
    with pytest.raises(DataNotFound, match=rf"^b.txt is no file, and none of one, two: looked for b.txt in .*{folder}"):
        find_path("b.txt", [folder], ["one", "two"])
    with pytest.raises(DataNotFound, match=r"looked for /nowhere/b.txt; put it there"):
        find_path("/nowhere/b.txt", [folder], ["one"])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path} cannot be read: Is a directory; choose"):
        read_bytes(tmp_path)
