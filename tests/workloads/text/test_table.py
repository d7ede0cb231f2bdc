"""CSV files as people have them, each written by hand, and what is said of those that cannot be used."""

from __future__ import annotations

import codecs
import csv
from pathlib import Path

import pytest

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.text.table import read_table

HERE = Path("a.csv")
EXPECTED = [("sport", "a goal, at last"), ("tech", 'he said "no" twice'), ("sport", "two lines"), ("tech", "plain")]


def read(data: str | bytes) -> list[tuple[str, str]]:
    table = read_table(HERE, data.encode() if isinstance(data, str) else data)
    return [(row.category, row.text) for row in table.rows]


COMMAS = 'category,text\nsport,"a goal, at last"\ntech,"he said ""no"" twice"\nsport,"two\nlines"\ntech,plain\n'
TURNED = 'Text,Label\n"a goal, at last",sport\n"he said ""no"" twice",tech\n"two\nlines",sport\nplain,tech\n'
SEMICOLONS = 'label;text\nsport;a goal, at last\ntech;"he said ""no"" twice"\nsport;"two\nlines"\ntech;plain\n'
TABS = 'category\ttext\nsport\ta goal, at last\ntech\t"he said ""no"" twice"\nsport\t"two\nlines"\ntech\tplain'
BARE = COMMAS.removeprefix("category,text\n")
BARE_TURNED = TURNED.removeprefix("Text,Label\n")
BARE_TABS = TABS.removeprefix("category\ttext\n")
MORE_COLUMNS = "category,filename,title,content\nsport,1.txt,x,'a'\ntech,2.txt,y,b\n"  # only the named ones count


@pytest.mark.parametrize(
    "text",
    [COMMAS, TURNED, SEMICOLONS, TABS, BARE, BARE_TURNED, BARE_TABS]
    + [COMMAS.replace("\n", "\r\n"), SEMICOLONS.replace("\n", "\r"), COMMAS.replace(",", ", ", 2)]
    + [COMMAS.replace("tech,plain", "  tech ,\t plain \u00a0"), "\n\n" + COMMAS, BARE + "\n,\n\n"],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be-bom"])
def test_every_form_gives_the_same_rows(text: str, encoding: str) -> None:
    data = codecs.BOM_UTF16_BE + text.encode("utf-16-be") if encoding.endswith("-bom") else text.encode(encoding)
    assert read(data) == EXPECTED


def test_lines_are_those_in_which_a_row_begins() -> None:
    table = read_table(HERE, b'category,text\r\n\r\na,"x\r\ny"\r\n,\r\nb,z\r\n')
    assert [(row.line, row.text) for row in table.rows] == [(3, "x y"), (6, "z")]
    assert table.notes == ["2 empty rows skipped"]


def test_the_encoding_is_said() -> None:
    table = read_table(HERE, "category,text\na,café\nb,tea\n".encode("cp1252"))
    assert table.rows[0].text == "café" and table.notes == ["not UTF-8, read as cp1252"]


def test_columns_that_a_header_does_not_name_as_ours_are_passed_over() -> None:
    assert read(MORE_COLUMNS) == [("sport", "'a'"), ("tech", "b")]
    assert read("Class Index,Title,Description\n3,Short,longer text\n1,Other,words\n") == [
        ("3", "Short longer text"), ("1", "Other words")
    ]  # fmt: skip


def test_three_columns_without_a_header_are_class_title_and_description() -> None:
    text = '"3","Wall St.","Short-sellers, again"\n"4","Chips","New ones\\from here"\n"3","Oil","Prices"\n'
    text += '"4","Phones","Old ones"\n'
    assert read(text)[:2] == [("3", "Wall St. Short-sellers, again"), ("4", "Chips New ones\\from here")]


def test_a_column_that_numbers_the_rows_is_no_text() -> None:
    """Or no text would be there twice, and repeats would be tested with."""
    assert read("0,a,same\n1,b,other\n2,a,same\n3,b,more\n")[2] == ("a", "same")
    assert read("a,10\nb,11\na,12\nb,13\n")[2] == ("a", "12")  # unless there is no other


def test_a_column_that_is_always_the_same_is_no_category() -> None:
    assert read("1,News,one text\n2,News,another\n1,News,more\n2,News,most\n")[0] == ("1", "News one text")
    assert read("1,one text\n1,another\n") == [("1", "one text"), ("1", "another")]  # unless there is no other


def test_a_test_file_may_be_too_small_to_show_its_columns() -> None:
    train = read_table(HERE, b"1;one, two\n2;three\n1;four\n2;five\n")
    table = read_table(HERE, b"2;six, seven\n", like=train.columns)
    assert [(row.category, row.text) for row in table.rows] == [("2", "six, seven")]
    named = read_table(HERE, b"text,category\nsix,2\n", like=train.columns)  # its own header counts more
    assert [(row.category, row.text) for row in named.rows] == [("2", "six")]


def test_the_separator_is_not_told_by_what_is_in_the_texts() -> None:
    """Each text has one comma: by commas there would be two columns too, but as many categories as rows."""
    assert read("a;one, two\nb;three, four\na;five, six\nb;seven, eight\n")[1] == ("b", "three, four")
    assert read("a,one; two\nb,three; four\na,five; six\nb,seven; eight\n")[1] == ("b", "three; four")


def test_a_long_text_is_read_and_the_limit_put_back() -> None:
    before = csv.field_size_limit(1000)
    try:
        words = "word " * 50_000  # 250,000 characters, and the limit of the csv module is 131,072
        assert read(f"category,text\na,{words}\nb,x\n")[0] == ("a", words.strip())
        assert csv.field_size_limit() == 1000
    finally:
        csv.field_size_limit(before)


def test_nuls_are_no_reason_to_fail() -> None:
    table = read_table(HERE, b"category,text\na,one tw\0o\nb,three\n")
    assert table.rows[0].text == "one two" and table.notes == ["1 NUL character left out"]


BROKEN: dict[str, tuple[str, str]] = {
    "too few columns": (
        "category,text\na,x\nb\n",
        "line 3: the row has 1 column .*, and 2 are wanted; complete or d",
    ),
    "too many": (
        "category,text\na,x\n\nb,y, z\n",
        "line 4: the row has 3 columns .*; put a text that has a comma in",
    ),
    "too many, no header": ("a;x\nb;y;z;w\na;z\nb;x\na;w\n", "line 2: the row has 4 columns .*a semicolon into quotes"),
    "a quote that never closes": (
        'category,text\na,x\nb,"y\na,z\n',
        "line 3: a quote opens in the row that begins here .* before the end of the file .*; close it, double each",
    ),
    "a quote closed rows later": (
        'category,text\na,"x\nb,y\na,"z"\n',
        "line 2: a quote opens in the row that begins here and does not close properly before line 4",
    ),
    "a quote after a quoted word": ('category,text\na,"x" y\n', "line 2: a quote opens .* not close properly in it "),
    "a header once more": ("category,text\na,x\ncategory,text\n", "line 3: the row is the header once more; delete it"),
    "an empty text": ("category,text\na,x\nb,\n", "line 3: its text is empty; write it or delete the row"),
    "a blank text": ("category,text\na,  \nb,x\n", "line 2: its text is empty"),
    "an empty category": ('category,text\na,x\n"",y\n', "line 3: its category is empty"),
    "one column": ("first\nsecond\n", r"line 1: it has 1 column \(.*; two are wanted, a category and a text"),
    "many columns": ("a,b,c,d,e\n" * 3, "line 1: it has 5 columns .*; two are wanted"),
    "no column of categories": ("a,one\nb,two\nc,three\n", "line 1: no column has few .*a first line category,text"),
    "long categories": (
        "".join(f"{'a' * 101},{text}\n" for text in "xyz"),
        "line 1: no column has few different short values",
    ),
    "an unknown header": (
        "sentiment,review\ngood,I like it\nbad,I do not\ngood,it is fine\nbad,it is not\ngood,it was\n",
        "line 1: sentiment, review looks like a header that does not name .*; call them category/label",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_one_line_that_names_the_line(what: str) -> None:
    text, expected = BROKEN[what]
    with pytest.raises(DataError, match=f"^a.csv, {expected}") as error:
        read(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "found"), [("", "no rows"), (" \n\n,\n", "no rows"), ("category,text\n\n", "a header and no rows")]
)
def test_a_file_of_nothing(text: str, found: str) -> None:
    with pytest.raises(DataError, match=f"^a.csv cannot be used: it has {found}"):
        read(text)
