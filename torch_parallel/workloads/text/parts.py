"""Which text is trained on and which is tested with: no text is in both, and the split is the same everywhere.

A text that came twice could be trained on and tested with, which would make a test look better than the model is. So
repeats go before anything is drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.text.files import many
from torch_parallel.workloads.text.table import Row, wrong

SHOWN_CHARACTERS = 60  # of a category: in a file whose columns are mixed up it may be a whole text


def without_repeats(rows: Sequence[Row], part: str = "") -> tuple[list[Row], list[str]]:
    """Each text once, the first time that it came, and what there is to say of the others.

    A text that has several categories is left out: nobody knows which is right. `part` is the name of the file if there
    are two.
    """
    categories: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        categories[row.text].add(row.category)
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.text, row)
    contradicting = [row for row in first.values() if len(categories[row.text]) > 1]
    kept = [row for row in first.values() if len(categories[row.text]) == 1]
    repeated = sum(len(categories[row.text]) == 1 for row in rows) - len(kept)
    of_part = f" of {part}" if part else ""
    notes = [f"{many(repeated, 'repeated row')}{of_part} left out"] if repeated else []
    if contradicting:
        where = f"the first is in line {contradicting[0].line}"
        notes.append(f"{many(len(contradicting), 'text')}{of_part} under several categories left out ({where})")
    return kept, notes


def without_texts_of(train: Sequence[Row], test: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows of `test` whose text is not in `train`, and how many were."""
    known = {row.text for row in train}
    kept = [row for row in test if row.text not in known]
    count = len(test) - len(kept)
    return kept, [f"{many(count, 'test text')} left out that training has"] if count else []


def class_names(path: Path, rows: Sequence[Row]) -> list[str]:
    """The categories in order: as numbers if all are whole numbers, else by their characters.

    Raises DataError if there is only one, or none.
    """
    if not rows:
        raise DataError(f"{path} cannot be used: all of its texts have several categories; give each text one")
    names = sorted({row.category for row in rows})
    if len(names) < 2:
        found = f"all of its {many(len(rows), 'different text')} have the category {names[0][:SHOWN_CHARACTERS]!r}"
        raise DataError(f"{path} cannot be used: {found}; at least two categories are wanted, so add rows of another")
    # isdecimal, not isdigit: int cannot read ².
    return sorted(names, key=lambda name: (int(name), name)) if all(map(str.isdecimal, names)) else names


def check_known(path: Path, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Raises DataError, which names the line, for a test row whose category no training row has."""
    for row in rows:
        if row.category not in names:
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            found = f"its category {row.category[:SHOWN_CHARACTERS]!r} is not among those of training ({shown})"
            raise wrong(path, row.line, found, "correct it, or add such rows to the training file")


def split(
    path: Path, rows: Sequence[Row], names: Sequence[str], test_part: float, seed: int
) -> tuple[list[Row], list[Row]]:
    """Training and test rows, both in the order of `rows`. Of each class `test_part` is tested with, drawn by `seed`.

    A class of two texts or more has at least one in both, a class of one has it in training. Raises DataError if all
    are of that kind.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    tested: set[int] = set()
    for name in names:  # in a fixed order, because each class takes numbers from the same generator
        members = [index for index, row in enumerate(rows) if row.category == name]
        count = min(max(round(test_part * len(members)), 1), len(members) - 1)
        drawn = torch.randperm(len(members), generator=generator, device="cpu")[:count].tolist()
        tested |= {members[index] for index in drawn}
    if not tested:
        found = f"each of its {len(names)} categories has one text only, so none is left to test with"
        raise DataError(f"{path} cannot be used: {found}; add texts")
    train = [row for index, row in enumerate(rows) if index not in tested]
    return train, [rows[index] for index in sorted(tested)]
