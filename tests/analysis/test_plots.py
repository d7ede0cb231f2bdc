"""Every number and figure of the README and of media/ comes from results/: they are made anew and compared."""

from __future__ import annotations

import csv
import json
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from PIL import Image

from torch_parallel import plots
from torch_parallel.analysis import plots as drawing
from torch_parallel.analysis.runs import Unequal, newest
from torch_parallel.analysis.tables import TABLES, with_tables
from torch_parallel.collectives import choice

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


PICTURES = sorted(name for name in (*plots.FIGURES, *plots.OTHERS) if name.endswith(".png"))


@pytest.fixture(scope="module")
def redrawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    media = tmp_path_factory.mktemp("media")
    plots.draw_all(RESULTS, media)
    return media


@pytest.mark.exhaustive
def test_what_has_no_results_is_said_and_the_rest_is_drawn(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(newest("aggregation", RESULTS), results / "aggregation" / "one")
    said: list[str] = []
    drawn = plots.draw_all(results, tmp_path / "media", skip=said.append)
    assert {file.name for file in drawn} == {"aggregation.png", "ring_all_reduce.gif"}
    assert len(said) == len(PICTURES) - 1 and all("is left as it is: " in line for line in said)
    assert any("python -m torch_parallel experiment scaling" in line for line in said)
    assert any("python -m torch_parallel bench collectives" in line for line in said)


def test_media_holds_what_is_drawn_and_nothing_else(redrawn: Path) -> None:
    assert {file.name for file in (ROOT / "media").iterdir()} == {file.name for file in redrawn.iterdir()}
    assert {"param_server.png", "ring_all_reduce.png", "scaling.png"} <= {file.name for file in redrawn.iterdir()}


def pixels(path: Path) -> numpy.ndarray:
    with Image.open(path) as image:
        return numpy.asarray(image.convert("RGB"), dtype=numpy.int16)


def part_that_differs(one: numpy.ndarray, other: numpy.ndarray) -> float:
    """Of all pixels, those in which a colour differs by more than an eighth of its range."""
    assert one.shape == other.shape
    return float((numpy.abs(one - other).max(axis=-1) > 32).mean())


MOST = 0.001
"""The fonts of another version of matplotlib move letters; a line of a figure is more than that."""


@pytest.mark.parametrize("name", PICTURES)
def test_the_figures_are_those_of_the_results(redrawn: Path, name: str) -> None:
    assert part_that_differs(pixels(ROOT / "media" / name), pixels(redrawn / name)) < MOST


@pytest.mark.parametrize("name", ["scaling.png", "param_server.png", "ring_all_reduce.png", "stragglers.png"])
@pytest.mark.exhaustive
def test_a_figure_without_one_of_its_lines_would_be_noticed(name: str) -> None:
    """Each of the colours that many pixels have, white but for the grey of letters and grids, painted over."""
    image = pixels(ROOT / "media" / name)
    colours, counts = numpy.unique(image.reshape(-1, 3), axis=0, return_counts=True)
    lively = [colour for colour, count in zip(colours, counts, strict=True) if numpy.ptp(colour) > 60 and count > 900]
    assert len(lively) >= 2
    for colour in lively:
        without = image.copy()
        without[(image == colour).all(axis=-1)] = 255
        assert part_that_differs(image, without) > MOST, colour


@pytest.mark.parametrize("name", PICTURES)
def test_and_were_drawn_from_the_tables_that_are_there_to_the_last_byte(redrawn: Path, name: str) -> None:
    with Image.open(ROOT / "media" / name) as committed, Image.open(redrawn / name) as drawn:
        assert committed.text["Source"] == drawn.text["Source"]


def test_bars_are_as_long_as_the_medians_of_the_table() -> None:
    folder = newest("ring_all_reduce", RESULTS)
    with open(folder / "runs.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "cnn" and int(row["epoch"]) > 1]
    runs: dict[str, list[float]] = {}  # the seconds of compute of each run's warm epochs, a mean over the workers
    for seed in sorted({row["seed"] for row in rows}):
        of_seed = [row for row in rows if row["seed"] == seed and row["strategy"] == "ring_all_reduce"]
        epochs = sorted({row["epoch"] for row in of_seed})
        runs[seed] = [statistics.mean(float(r["compute_s"]) for r in of_seed if r["epoch"] == e) for e in epochs]
    expected = statistics.median(statistics.median(of_seed) for of_seed in runs.values())
    panel = drawing.epoch_parts(folder).axes[0]
    first_bar = panel.patches[0]
    assert first_bar.get_width() == pytest.approx(expected) and first_bar.get_x() == 0


def test_the_animated_ring_has_a_round_for_each_of_the_schedule(redrawn: Path) -> None:
    name = "ring_all_reduce.gif"
    with Image.open(ROOT / "media" / name) as committed, Image.open(redrawn / name) as drawn:
        assert committed.n_frames == drawn.n_frames > 2 * (4 - 1)  # several pictures for each of 2(P-1) rounds
        for frame in range(0, drawn.n_frames, 7):
            committed.seek(frame)
            drawn.seek(frame)
            both = [numpy.asarray(each.convert("RGB"), dtype=numpy.int16) for each in (committed, drawn)]
            assert part_that_differs(*both) < MOST


def test_the_tables_of_the_readme_are_those_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text()
    assert with_tables(readme, RESULTS) == readme
    assert all(f"<!-- {name} -->" in readme for name in TABLES)


def header(text: str) -> str:
    return text.splitlines()[0] + "\n"


DAMAGES = [
    ("bench_all_reduce_gpu", "bench.csv", lambda text: "", "cannot be read"),
    ("bench_all_reduce_gpu", "bench.csv", header, "rows of it are missing"),
    ("bench_step_gpu", "bench.csv", header, "rows of it are missing"),
    ("bench_all_reduce", "bench.csv", lambda text: text[:-9], "rows of it are missing, or not whole"),
    ("bench_collectives", "bench.csv", lambda text: text.replace(",time_us", ",time"), "it has no time_us"),
    ("bench_broadcast_gpu", "manifest.json", lambda text: text[:100], "cannot be read"),
    ("bench_broadcast_gpu", "manifest.json", lambda text: text.replace("Triton", "Tritium"), ""),
    ("bench_broadcast_gpu", "manifest.json", lambda text: text.replace('"NCCL": "', '"NCCL": "older '), "no table has"),
    ("ring_all_reduce", "runs.csv", lambda text: text.replace("train_s", "seconds"), "it has no train_s"),
    ("bench_step_gpu", "gpu_work.csv", header, "rows of it are missing"),
    ("bench_step_gpu", "gpu_work.csv", lambda text: text.replace("ddp", "other"), "cannot be made"),
    ("bench_step_gpu", "gpu_work.csv", None, "cannot be read"),
    ("bench_step_gpu", "manifest.json", None, "cannot be read"),
    ("bench_step_gpu", "manifest.json", lambda text: text.replace("H200", "H100"), "no table has"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("experiment", "name", "damage", "said"), DAMAGES)
def test_damaged_results_are_one_line_and_nothing_is_written_over(
    experiment: str,
    name: str,
    damage: Callable[[str], str] | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, readme = tmp_path / "results", tmp_path / "README.md"
    shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns("runs"))
    shutil.copy(ROOT / "README.md", readme)
    file = newest(experiment, results) / name
    if damage is None:
        file.unlink()
    else:
        file.write_text(damage(file.read_text()))
    monkeypatch.setattr(plots, "FIGURES", {"aggregation.png": plots.FIGURES["aggregation.png"]})
    monkeypatch.setattr(plots, "OTHERS", {"overlap_gpu.png": plots.OTHERS["overlap_gpu.png"]})
    table = tmp_path / "fastest.csv"
    table.write_text(choice.TABLE.read_text())
    command = ["--results_dir", str(results), "--media", str(tmp_path / "media"), "--readme", str(readme)]
    command += ["--table", str(table)]
    written = [table, readme]
    before = [each.read_text() for each in written]
    if said:
        with pytest.raises(SystemExit) as raised:
            plots.main(command)
        assert re.fullmatch(f"plots: .*{said}.*", str(raised.value.code))
        assert "restore" in str(raised.value.code) or said == "no table has"
        assert not (tmp_path / "media").exists()
    else:
        plots.main(command)
    assert [each.read_text() for each in written] == before


@pytest.mark.parametrize("name", ["nccl", list(TABLES)[-1], "experiments"])
@pytest.mark.exhaustive
def test_a_table_without_an_end_takes_nothing_with_it(name: str) -> None:
    before, begin, rest = (ROOT / "README.md").read_text().partition(f"<!-- {name} -->")
    table, _, after = rest.partition("<!-- end -->")
    with pytest.raises(ValueError, match=f"the table <!-- {name} --> has no <!-- end --> of its own"):
        with_tables(before + begin + table + after, RESULTS)


def test_a_changed_figure_shows_in_the_table(tmp_path: Path) -> None:
    """The tests above would be of no use if tables and figures did not follow the results."""
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns("runs"))
    table = newest("ring_all_reduce", results) / "runs.csv"
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["train_s"] = str(2 * float(row["train_s"]))
    with open(table, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert TABLES["experiments"](results) != TABLES["experiments"](RESULTS)


def test_the_table_of_steps_tells_sizes_and_sides_apart(tmp_path: Path) -> None:
    """Two folders that are alike in all that older benches have, and have rows of their own in the table."""
    results = tmp_path / "results"
    (committed,) = (RESULTS / "bench_step").glob("*_bench_step_cnn_n2")
    told = {"model_size": "tiny", "task": "masked", "length": 8, "vocabulary_size": 50, "way": "apart"}
    for name, more in (("2026-11-29_1", {}), ("2026-11-29_2", told)):
        shutil.copytree(committed, results / "bench_step" / name)
        manifest = results / "bench_step" / name / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | more))
    names = {line.split(" | ")[0] for line in TABLES["step"](results).splitlines()[2:] if line.startswith("|")}
    alike = "0.1 M, 64, full, sgd, 2"
    assert names == {f"| cnn, {alike}", f"| cnn tiny (masked, 8 of 50 tokens), each side apart, {alike}"}


def test_figures_of_unlike_runs_are_not_drawn(tmp_path: Path) -> None:
    folder = newest("ring_all_reduce", RESULTS)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("runs"))
    text = (copy / "runs.csv").read_text()
    first, *others = text.splitlines()
    (copy / "runs.csv").write_text("\n".join([first, others[0].replace(",64,", ",65,", 1), *others[1:], ""]))
    with pytest.raises(Unequal):
        drawing.epoch_parts(copy)
