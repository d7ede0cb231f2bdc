"""The notebooks are committed as executed, top to bottom, and executing them again gives the same."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

nbformat = pytest.importorskip("nbformat", reason="the package's extra `notebooks` is not installed")
NotebookClient = pytest.importorskip("nbclient").NotebookClient

FOLDER = Path(__file__).parents[1] / "experiments"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def text(cell: Any) -> str:
    """What a cell printed: a kernel sends it in as many pieces as its clock happens to cut."""
    return "".join(output["text"] for output in cell.get("outputs", []) if output.output_type == "stream")


def kinds(cell: Any) -> list[str]:
    return [kind for output in cell.get("outputs", []) for kind in output.get("data", {}) if kind != "text/plain"]


def pictures(cell: Any) -> list[numpy.ndarray]:
    encoded = [
        output["data"]["image/png"] for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    images = [Image.open(io.BytesIO(base64.b64decode(each))).convert("RGB") for each in encoded]
    return [numpy.asarray(image, dtype=numpy.int16) for image in images]


def test_there_is_one_for_each_experiment() -> None:
    assert NOTEBOOKS == [
        "collectives_and_stragglers.ipynb",
        "machines.ipynb",
        "param_server.ipynb",
        "ring_all_reduce.ipynb",
        "scaling.ipynb",
        "transformers.ipynb",
    ]


@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.exhaustive
def test_a_notebook_is_executed_and_stays_what_it_is(name: str) -> None:
    committed = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(committed)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(len(cell.outputs) == 1 for cell in code)
    again = nbformat.read(FOLDER / name, as_version=4)
    NotebookClient(again, timeout=60, resources={"metadata": {"path": str(FOLDER)}}).execute()
    executed = [cell for cell in again.cells if cell.cell_type == "code"]
    for before, after in zip(code, executed, strict=True):
        assert text(before) == text(after)
        assert kinds(before) == kinds(after)
        for one, other in zip(pictures(before), pictures(after), strict=True):
            # letters of another version's fonts move; a line of a figure is more than that
            assert one.shape == other.shape and (numpy.abs(one - other).max(axis=-1) > 32).mean() < 0.001
    assert any("image/png" in kinds(cell) for cell in executed)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_thin(name: str) -> None:
    """Prose before every cell, and one call in a cell, after the first."""
    cells = nbformat.read(FOLDER / name, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    prose = [cell for cell in cells if cell.cell_type == "markdown"]
    assert len(prose) >= len(code) - 1
    for cell in code[1:]:
        statements = [line for line in cell.source.splitlines() if line and not line.startswith("from ")]
        assert len(statements) == 1
