"""The table of situations is complete, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def rows() -> list[tuple[str, str, str]]:
    """Number, what is right, and tests, of each row."""
    cells = [line.strip("|").split("|") for line in (HERE / "SITUATIONS.md").read_text().splitlines() if "|" in line]
    return [(row[0].strip(), row[2].strip(), row[3].strip()) for row in cells if re.fullmatch(r"\s*F?\d+\s*", row[0])]


def test_no_number_is_missing() -> None:
    assert [number for number, _, _ in rows()] == [*map(str, range(1, 55)), *(f"F{number}" for number in range(1, 16))]


def test_every_test_that_is_named_exists() -> None:
    for number, _, tests in rows():
        for file_name, test in re.findall(r"`([\w/]+\.py)::(\w+|\*)`", tests):
            tree = ast.parse((HERE / file_name).read_text())
            names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            assert any(name.startswith("test_") for name in names) if test == "*" else test in names, (number, test)


def test_what_has_no_test_says_why() -> None:
    for number, right, tests in rows():
        assert tests.startswith("`") or (tests == "-" and right.startswith("not here yet: ")), number
