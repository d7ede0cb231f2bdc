"""Repeats, contradictions and the split, with rows made by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.text.parts import check_known, class_names, split, without_repeats, without_texts_of
from torch_parallel.workloads.text.table import Row

HERE = Path("a.csv")


def rows(*pairs: tuple[str, str]) -> list[Row]:
    return [Row(category, text, line) for line, (category, text) in enumerate(pairs, start=1)]


def test_each_text_stays_once_and_contradicting_ones_not_at_all() -> None:
    every = rows(("a", "x"), ("b", "y"), ("a", "x"), ("b", "z"), ("a", "z"), ("b", "y"), ("b", "y"), ("a", "z"))
    kept, notes = without_repeats(every)
    assert kept == [every[0], every[1]]
    assert notes == ["3 repeated rows left out", "1 text under several categories left out (the first is in line 4)"]
    assert without_repeats(kept) == (kept, [])


def test_what_training_has_is_not_tested_with() -> None:
    train, test = rows(("a", "x"), ("b", "y")), rows(("a", "z"), ("b", "x"), ("b", "w"))
    assert without_texts_of(train, test) == ([test[0], test[2]], ["1 test text left out that training has"])


@pytest.mark.parametrize(
    ("given", "ordered"),
    [
        (["sport", "Tech", "art"], ["Tech", "art", "sport"]),
        (["10", "9", "0"], ["0", "9", "10"]),
        (["10", "9", "x"], ["10", "9", "x"]),
        (["²", "1"], ["1", "²"]),  # a digit for str.isdigit, and nothing that int can read
    ],
)
def test_categories_are_in_order(given: list[str], ordered: list[str]) -> None:
    assert class_names(HERE, rows(*((name, name) for name in given))) == ordered


def test_one_category_is_too_few() -> None:
    with pytest.raises(DataError, match="all of its 2 different texts have the category 'a'; at least two"):
        class_names(HERE, rows(("a", "x"), ("a", "y")))
    with pytest.raises(DataError, match="all of its texts have several categories"):
        class_names(HERE, [])


def test_a_category_that_only_the_test_part_has_is_named_with_its_line() -> None:
    with pytest.raises(DataError, match=r"^a.csv, line 2: its category 'c' is not among those of training \(a, b\); "):
        check_known(HERE, rows(("a", "x"), ("c", "y")), ["a", "b"])


def test_the_split_takes_its_part_of_every_class() -> None:
    sizes = {"a": 100, "b": 25, "c": 2, "d": 1}
    every = rows(*((name, f"{name}{index}") for name, size in sizes.items() for index in range(size)))
    train, test = split(HERE, every, list(sizes), 0.1, seed=3)
    # round(10), round(2.5) = 2 as Python rounds, one of two, none of one
    assert Counter(row.category for row in test) == {"a": 10, "b": 2, "c": 1}
    assert sorted(row.line for row in train + test) == [row.line for row in every]
    assert [row.line for row in train] == sorted(row.line for row in train)
    assert split(HERE, every, list(sizes), 0.1, seed=3) == (train, test)
    assert split(HERE, every, list(sizes), 0.1, seed=4) != (train, test)


def test_the_split_is_that_of_torch_s_generator() -> None:
    """The same on every machine: three of ten are drawn of each class, in the order of their names."""
    every = rows(*(("ab"[index % 2], str(index)) for index in range(20)))
    # torch.randperm(10) of a generator with seed 0 begins with 4, 1, 7, and once more with 3, 9, 4
    drawn = {2 * index for index in (4, 1, 7)} | {2 * index + 1 for index in (3, 9, 4)}
    assert {int(row.text) for row in split(HERE, every, ["a", "b"], 0.3, seed=0)[1]} == drawn


def test_every_class_trains_and_nothing_is_left_for_a_test() -> None:
    every = rows(("a", "x"), ("b", "y"), ("a", "z"))
    train, test = split(HERE, every, ["a", "b"], 0.99, seed=0)
    assert {row.category for row in train} == {"a", "b"} and len(test) == 1
    with pytest.raises(DataError, match=r"^a.csv cannot be used: each of its 2 categories has one text only"):
        split(HERE, every[:2], ["a", "b"], 0.5, seed=0)
