"""Which all-reduce is the fastest, by device, number of ranks and size: looked up in a table that was measured once.

The table is part of the package; `python -m torch_parallel plots` makes it from what the benches measured.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from importlib.resources import files
from pathlib import Path

from torch_parallel.collectives import ALL_REDUCE

TABLE = Path(str(files("torch_parallel.collectives") / "fastest_all_reduce.csv"))
COLUMNS = ("device", "n", "size_bytes", "algorithm")
WITHOUT_TABLE = "ring"


@cache
def measured(table: Path = TABLE) -> dict[tuple[str, int], dict[int, str]]:
    """For each kind of device and number of ranks the fastest algorithm by size in bytes; empty without a table."""
    fastest: dict[tuple[str, int], dict[int, str]] = {}
    if table.exists():
        with open(table, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["algorithm"] in ALL_REDUCE:
                    fastest.setdefault((row["device"], int(row["n"])), {})[int(row["size_bytes"])] = row["algorithm"]
    return fastest


def fastest_all_reduce(device: str, n: int, nbytes: int, table: Path = TABLE) -> str:
    """The name of the algorithm that was the fastest on "cpu" or "cuda" for `n` ranks, at the size that differs from
    `nbytes` by the smallest factor; the ring where nothing was measured for as many."""
    sizes = measured(table).get((device, n))
    if not sizes:
        return WITHOUT_TABLE
    return sizes[min(sizes, key=lambda size: abs(math.log(size / max(nbytes, 1))))]
