"""What a bench has written, read back."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any


def figures(results_dir: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """bench.csv and manifest.json of the only folder."""
    (folder,) = results_dir.iterdir()
    with open(folder / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((folder / "manifest.json").read_text())
