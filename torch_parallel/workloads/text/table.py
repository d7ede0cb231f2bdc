"""A CSV file of categories and texts, as people have them: with a header or none, and one of three separators.

Python's csv reads the fields. What it leaves open is settled here: the separator, which column is which, and the line
that a row began in, since an error is of use only with the line that it is in.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.text.files import decode, many

if TYPE_CHECKING:
    from _csv import Reader

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}
# The names that a header may give, the first that is there counts.
CATEGORY_NAMES = ("category", "label", "class", "class index")
TEXT_NAMES = (("text",), ("content",), ("title", "description"))
HEADER = "a first line category,text"
SAMPLE_ROWS = 200
MOST_CHARACTERS = 2**31 - 1  # of a field: csv's own limit is 131,072
LONGEST_CATEGORY = 100


@dataclass(frozen=True)
class Row:
    """A text, its white space joined, its category and the line that it begins in, counted from 1."""

    category: str
    text: str
    line: int


@dataclass(frozen=True)
class Columns:
    """How many columns a file has, the separator between them, that of the category and those of the text."""

    width: int
    separator: str
    category: int
    texts: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """What is in a file, and what there is to say of how it was read."""

    rows: list[Row]
    notes: list[str]
    columns: Columns


@dataclass(frozen=True)
class _Record:
    line: int
    cells: list[str]


def read_table(path: Path, data: bytes, like: Columns | None = None) -> Table:
    """The rows of the file `path`, whose content is `data`.

    `like` are the columns of the training file, for a test file without a header: it may be too small to show them.
    Raises DataError, one line that names the file and the line in it.
    """
    text, notes = decode(path, data)
    separator = _separator(text, like)
    every = list(_records(path, text, separator))
    records = [record for record in every if any(record.cells)]
    if not records:
        raise DataError(f"{path} cannot be used: it has no rows; rows of a category and a text are wanted")
    if len(records) < len(every):
        notes.append(f"{many(len(every) - len(records), 'empty row')} skipped")
    named = _named_columns(records[0].cells, separator)
    if named and len(records) == 1:
        raise DataError(f"{path} cannot be used: it has a header and no rows; write rows below it")
    header, rows = (records[0].cells, records[1:]) if named else ([], records)
    again = next((record for record in rows if record.cells == header), None)
    if again:  # as in a file that was put together from several
        raise wrong(path, again.line, "the row is the header once more", "delete it")
    columns = named or like or _unnamed_columns(path, records, separator)
    return Table([_row(path, record, columns) for record in rows], notes, columns)


def wrong(path: Path, line: int, found: str, remedy: str) -> DataError:
    """What is said of one line of a file."""
    return DataError(f"{path}, line {line}: {found}; {remedy}")


def _records(path: Path, text: str, separator: str) -> Iterator[_Record]:
    """Every row, white space joined within its cells."""
    reader = _reader(text, separator, strict=True)
    with _long_fields():
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise _quotes(path, line, reader.line_num, error) from error
            yield _Record(line, [" ".join(cell.split()) for cell in cells])


def _quotes(path: Path, line: int, last: int, error: csv.Error) -> DataError:
    """The only errors that are left are those of quotes."""
    until = "in it" if line == last else f"before line {last}"
    until = "before the end of the file" if "end of data" in str(error) else until
    found = f"a quote opens in the row that begins here and does not close properly {until} ({error})"
    return wrong(path, line, found, 'close it, double each quote inside quotes (""), or take single quotes')


def _reader(text: str, separator: str, strict: bool) -> Reader:
    # newline="": lines end with \n, \r\n or \r, and stay in quoted fields as they are.
    return csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=strict)


@contextmanager
def _long_fields() -> Iterator[None]:
    """The limit is one for the whole process: it is put back."""
    before = csv.field_size_limit(MOST_CHARACTERS)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _separator(text: str, like: Columns | None) -> str:
    """The one that finds a header; else that of `like`, or the one by which most rows have the same number of cells.

    Where several do equally well, the one by which the rows have the fewest categories.
    """
    samples = {separator: _sample(text, separator) for separator in SEPARATORS}
    for separator, rows in samples.items():
        if rows and _named_columns(rows[0], separator):
            return separator
    return like.separator if like else min(SEPARATORS, key=lambda separator: _unfitness(samples[separator]))


def _sample(text: str, separator: str) -> list[list[str]]:
    """The cells of the first rows that are not empty."""
    with _long_fields():
        rows = ([" ".join(cell.split()) for cell in cells] for cells in _reader(text, separator, strict=False))
        return list(itertools.islice((cells for cells in rows if any(cells)), SAMPLE_ROWS))


def _unfitness(rows: Sequence[Sequence[str]]) -> tuple[float, int]:
    """Minus the share of the rows that have the usual number of cells, then the number of categories."""
    widths = Counter(len(cells) for cells in rows if len(cells) > 1)
    if not widths:
        return 0.0, 0
    width, count = max(widths.items(), key=lambda item: (item[1], -item[0]))
    alike = [cells for cells in rows if len(cells) == width]
    return -count / len(rows), min(len({cells[column] for cells in alike}) for column in range(width))


def _named_columns(cells: Sequence[str], separator: str) -> Columns | None:
    """Where the category and the text are, if this row is a header that names them."""
    names = [cell.lower() for cell in cells]
    category = next((name for name in CATEGORY_NAMES if name in names), None)
    texts = next((each for each in TEXT_NAMES if set(each) <= set(names)), None)
    if category is None or texts is None:
        return None
    return Columns(len(names), separator, names.index(category), tuple(names.index(name) for name in texts))


def _unnamed_columns(path: Path, records: Sequence[_Record], separator: str) -> Columns:
    """As most rows have them: the category is the column with few different short values.

    The text is all others, but for one that only numbers the rows.
    """
    widths = Counter(len(record.cells) for record in records if len(record.cells) in (2, 3))
    if not widths:
        found = f"it has {_cells(len(records[0].cells), separator)}"
        raise wrong(path, records[0].line, found, f"two are wanted, a category and a text; {HEADER} names them")
    width = max(widths, key=lambda each: (widths[each], -each))
    usual = [record for record in records if len(record.cells) == width]
    category = _category_column(path, usual, width)
    others = [column for column in range(width) if column != category]
    texts = [column for column in others if not _are_numbers([record.cells[column] for record in usual])]
    return Columns(width, separator, category, tuple(texts or others))


def _category_column(path: Path, records: Sequence[_Record], width: int) -> int:
    """The one with few different short values. Raises DataError if there is none or they hang below a header."""
    columns = [[record.cells[column] for record in records] for column in range(width)]
    category = min(range(width), key=lambda column: _unlikeliness(columns[column]))
    values = Counter(columns[category])
    if len(values) * 2 > len(records) or max(map(len, values)) > LONGEST_CATEGORY:
        found = "no column has few different short values, so none can be told to be the category "
        found += f"(the best of {width} has {len(values):,} in {len(records):,} rows)"
        raise wrong(path, records[0].line, found, f"write {HEADER} that names them")
    first = records[0].cells
    if values[first[category]] == 1 and not any(" " in cell for cell in first):
        known = f"{'/'.join(CATEGORY_NAMES)} and {' or '.join('+'.join(names) for names in TEXT_NAMES)}"
        found = f"{', '.join(first)} looks like a header that does not name the category and the text"
        raise wrong(path, records[0].line, found, f"call them {known}, or put {HEADER} above it if it is a row")
    return category


def _unlikeliness(cells: Sequence[str]) -> tuple[bool, bool, int, int]:
    """How little a column looks like one of categories: too many values, only one, more of them, longer ones."""
    values = len(set(cells))
    return values * 2 > len(cells), values == 1, values, sum(map(len, cells))


def _are_numbers(cells: Sequence[str]) -> bool:
    """Whether they are whole numbers, each another one."""
    return all(map(str.isdecimal, cells)) and len(set(cells)) == len(cells)


def _row(path: Path, record: _Record, columns: Columns) -> Row:
    count, separator = len(record.cells), columns.separator
    if count != columns.width:
        found = f"the row has {_cells(count, separator)}, and {columns.width} are wanted"
        quotes = f"put a text that has a {SEPARATORS[separator]} into quotes"
        raise wrong(path, record.line, found, quotes if count > columns.width else "complete or delete the row")
    text = " ".join(record.cells[column] for column in columns.texts).strip()
    row = Row(record.cells[columns.category], text, record.line)
    for what, value in (("category", row.category), ("text", row.text)):
        if not value:
            raise wrong(path, record.line, f"its {what} is empty", "write it or delete the row")
    return row


def _cells(count: int, separator: str) -> str:
    return f"{many(count, 'column')} (separated by a {SEPARATORS[separator]})"
