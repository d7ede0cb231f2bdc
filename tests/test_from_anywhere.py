"""The package is used from a user's own folder: by a script, in a notebook, and without the repository around it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from torch_parallel.collectives.choice import TABLE

nbformat = pytest.importorskip("nbformat", reason="the package's extra `notebooks` is not installed")
NotebookClient = pytest.importorskip("nbclient").NotebookClient

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_parallel"

RING = """
import torch
from torch_parallel import RunConfig, launch, train
from torch_parallel.collectives import Collective, Receive, Send, register


def rounds(rank, world_size):
    "The other way round: to the left neighbour."
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    for step in range(2 * (world_size - 1)):
        chunk = (rank + 1 + step) % world_size
        coming = (chunk + 1) % world_size
        first_half = step < world_size - 1
        yield [Send(left, range(chunk, chunk + 1)), Receive(right, range(coming, coming + 1), reduce=first_half)]


def size(numel, world_size, chunk):
    return numel // world_size + (chunk % world_size < numel % world_size)


LEFT = Collective(
    name="left",
    rounds=rounds,
    chunk_count=lambda world_size: world_size,
    contributors=lambda rank, world_size, chunk: frozenset(range(world_size)),
    round_count=lambda rank, world_size: 2 * (world_size - 1),
    message_count=lambda rank, world_size: 2 * (world_size - 1),
    sent_elements=lambda rank, world_size, numel: 2 * numel
    - size(numel, world_size, rank)
    - size(numel, world_size, rank - 1),
)


def work(communicator):
    mine = torch.arange(4.0) * 10**communicator.rank
    return [communicator.all_reduce(mine.clone(), algorithm=each).tolist() for each in ("left", LEFT)]


def same(**options):
    "Two ranks: each chunk is the sum of two numbers, whichever way it goes, so the bits are those of the ring."
    both = []
    for each in (options, {"strategy": "ring_all_reduce"}):
        config = RunConfig(n_gpus=2, device="cpu", dataset="digits", train_size=40, epochs=1, **each)
        both.append(train(config, verbose=False).weights)
    return all(torch.equal(both[0][name], both[1][name]) for name in both[0])
"""
CALLS = """
print(launch(work, 3, deadline_s=30))
print(same(strategy="{strategy}", **{options}))
"""
PRINTED = f"{[[[0.0, 111.0, 222.0, 333.0]] * 2] * 3}\nTrue\n"


def run(place: Path, *words: str, path: Path = ROOT, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    """Python in a folder of the user's; `path` is where the package was installed."""
    variables = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, *words], cwd=place, env=variables, capture_output=True, text=True, timeout=timeout_s
    )


def calls(strategy: str, **options: str) -> str:
    return CALLS.format(strategy=strategy, options=options)


@pytest.mark.exhaustive
def test_a_script_that_registers_a_collective(tmp_path: Path) -> None:
    guarded = ("\nregister(LEFT)" + calls("left_all_reduce")).replace("\n", "\n    ")
    (tmp_path / "mine.py").write_text(f"{RING}\n\nif __name__ == '__main__':{guarded}\n")
    done = run(tmp_path, "mine.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, PRINTED, "")


@pytest.mark.exhaustive
def test_a_module_that_registers_when_it_is_imported(tmp_path: Path) -> None:
    """The workers import it too, where it registers once more."""
    (tmp_path / "algorithm.py").write_text(f"{RING}\n\nregister(LEFT)\n")
    guarded = calls("all_reduce", algorithm="left").replace("\n", "\n    ")
    (tmp_path / "mine.py").write_text(
        f"from algorithm import launch, same, work\n\nif __name__ == '__main__':{guarded}\n"
    )
    done = run(tmp_path, "mine.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, PRINTED, "")


@pytest.mark.exhaustive
def test_a_notebook_that_registers_a_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sources = (RING, "register(LEFT) is LEFT", calls("left_all_reduce"), "register(LEFT) is LEFT")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = notebook.cells
    assert "".join(each["text"] for each in cells[2].outputs if each.get("name") == "stdout") == PRINTED
    assert [cell.outputs[0]["data"]["text/plain"] for cell in (cells[1], cells[3])] == ["True", "True"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel has of the package: its modules, and the data that pyproject.toml names."""
    place = tmp_path_factory.mktemp("installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shutil.copytree(PACKAGE, place / "torch_parallel", ignore=shutil.ignore_patterns("*.csv", "__pycache__"))
    for package, names in project["tool"]["setuptools"]["package-data"].items():
        for name in names:
            file = Path(*package.split("."), name)
            shutil.copy(ROOT / file, place / file)
    return place


def test_the_table_of_the_fastest_is_part_of_the_package(installed: Path, tmp_path: Path) -> None:
    assert TABLE.is_relative_to(PACKAGE)
    words = "from torch_parallel.collectives import choice; print(choice.TABLE); print(len(choice.measured()))"
    done = run(tmp_path, "-c", words, path=installed)
    table, count = done.stdout.split()
    assert Path(table).is_relative_to(installed) and int(count) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["plots"], "plots: --results_dir results: there is no such folder; run it in a clone"),
        (["experiment", "scaling", "--quick"], "experiment scaling: it runs train.py and the built-in scripts"),
    ],
)
def test_what_needs_the_repository_says_so(command: list[str], said: str, installed: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "torch_parallel", *command, path=installed)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(said)
    assert not list(tmp_path.iterdir())


def test_commands_run_in_any_folder(installed: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "torch_parallel", "collectives", "--show", "ring", "--n", "3", path=installed)
    assert (done.returncode, done.stderr) == (0, "") and "chunk 2" in done.stdout


def test_the_set_up_installs_the_package_and_what_opens_notebooks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "jupyter" in project["project"]["optional-dependencies"]["notebooks"]
    line = 'pip install -e ".[notebooks]"'
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    start = readme.partition("## Start")[2].partition("## ")[0]
    assert start.count(line) == 2 and "pip install -r" not in start  # with pip, with conda
    assert makefile.count('install -q -e ".[notebooks]"') == 1
