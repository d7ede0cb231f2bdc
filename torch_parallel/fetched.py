"""What a grid is trained on where the data that it names are not there.

BBC news has to be fetched by hand and MNIST is downloaded, which need not work. Then the cells take what every machine
has, as `python train.py` does, and a line says so.
"""

from __future__ import annotations

from dataclasses import replace

from torch_parallel.grids import Experiment
from torch_parallel.transformer_grids import BARE
from torch_parallel.workloads import load_dataset
from torch_parallel.workloads.data import FOLDER_VARIABLE, search_folders
from torch_parallel.workloads.errors import DataNotFound
from torch_parallel.workloads.text import classification, stream
from torch_parallel.workloads.text.files import find_named

NAMED_FILES = classification.NAMED_FILES | stream.NAMED_FILES


def at_hand(experiment: Experiment) -> tuple[Experiment, list[str]]:
    """The experiment on data that are there, and a line for each data set that had to be replaced.

    Only transformers have others to take: the cells of other models name theirs as they are.
    """
    lines = []
    for name, bare in BARE.items():
        cells = [cell for cell in experiment.cells if cell.trains_on(name)]
        missing = _missing(name) if cells else None
        if missing is not None:
            experiment = replace(experiment, cells=[cell.on_data(name, bare) for cell in experiment.cells])
            lines.append(f"{bare} in the place of {name}, because {missing}; {FOLDER_VARIABLE} may name its folder")
    return experiment, lines


def _missing(name: str) -> str | None:
    """Why data are not there, in words; None where they are. MNIST is downloaded, as training would do."""
    if name not in NAMED_FILES:
        dataset, line = load_dataset(None, None, None, seed=0)
        return None if dataset.name == name else line.partition("because ")[2]
    try:
        find_named(name, NAMED_FILES[name], search_folders(None))
    except DataNotFound as error:
        return str(error)
    return None
