"""From results/ alone: draws every figure of media/ anew, fills the tables of the README, and makes the table by which
the fastest all-reduce is chosen.

python -m torch_parallel plots
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib.figure

from torch_parallel.analysis import (
    bottlenecks,
    communication,
    gpu,
    machines,
    plots,
    scheduling,
    timeline,
    transformer_plots,
    waits,
)
from torch_parallel.analysis.animate import save_gif
from torch_parallel.analysis.choice import fastest_table
from torch_parallel.analysis.figure import Figure
from torch_parallel.analysis.runs import ExperimentMissing, making, newest
from torch_parallel.analysis.tables import with_tables
from torch_parallel.collectives import COLLECTIVES
from torch_parallel.collectives.choice import TABLE
from torch_parallel.steps import read_steps
from torch_parallel.trace import read_chrome_trace
from torch_parallel.usage import OneLineParser

FIGURES: dict[str, tuple[Callable[[Path], Figure], str]] = {
    "param_server.png": (plots.accuracy, "param_server"),
    "ring_all_reduce.png": (plots.epoch_parts, "ring_all_reduce"),
    "scaling.png": (plots.scaling, "scaling"),
    "collectives.png": (communication.all_reduce_times, "bench_collectives"),
    "stragglers.png": (bottlenecks.stragglers, "stragglers"),
    "links.png": (bottlenecks.links, "links"),
    "aggregation.png": (bottlenecks.aggregation, "aggregation"),
    "all_reduce_gpu.png": (gpu.all_reduce_beside_nccl, "bench_all_reduce_gpu"),
    "all_reduce_gpu_n4.png": (gpu.all_reduce_beside_nccl, "bench_all_reduce_gpu_n4"),
    "ring_all_reduce_gpu.png": (plots.epoch_parts, "ring_all_reduce_gpu"),
    "transformers_batch.png": (transformer_plots.seconds_by_batch, "transformers_batch"),
    "transformers_learning_rate.png": (transformer_plots.accuracy_by_epoch, "transformers_learning_rate"),
    "propagation.png": (transformer_plots.step_parts, "propagation"),
    "machines.png": (machines.step_bars, "machines"),
}
"""File -> how it is drawn, and from which experiment or bench."""
TABLES = ("runs.csv", "bench.csv")


def draw_all(results_dir: Path, media: Path, skip: Callable[[str], None] | None = None) -> list[Path]:
    """Every figure of media/, and the animated ring; returns the files.

    Raises ExperimentMissing, Unequal, DamagedResults and NotMade, before any is written.

    With `skip`, that is called with a line for each figure whose results are missing, and the others are drawn.
    """
    drawn = []
    every: dict[str, Callable[[Path, Path], None]] = {name: partial(_draw, *how) for name, how in FIGURES.items()}
    with tempfile.TemporaryDirectory() as temporary:
        for name, draw in (every | OTHERS).items():
            try:
                with making(str(media / name)):
                    draw(results_dir, Path(temporary, name))
                drawn.append(media / name)
            except ExperimentMissing as error:
                if skip is None:
                    raise
                skip(f"{media / name} is left as it is: {error}")
        media.mkdir(exist_ok=True)
        for file in drawn:  # nothing is written over before all of it has been made
            shutil.copyfile(Path(temporary, file.name), file)
    return drawn


def _draw(draw: Callable[[Path], Figure], experiment: str, results_dir: Path, file: Path) -> None:
    folder = newest(experiment, results_dir)
    _save(draw(folder), file, next((folder / name for name in TABLES if (folder / name).exists()), folder / TABLES[0]))


def _draw_overlap(results_dir: Path, file: Path) -> None:
    folder = gpu.newest_overlap(results_dir)
    _save(gpu.overlap(folder), file, folder / "bench.csv", folder / "gpu_work.csv")


def _draw_schedule(results_dir: Path, file: Path) -> None:
    folders = scheduling.newest_of_each(results_dir).values()
    _save(scheduling.gain_bars(results_dir), file, *(folder / "bench.csv" for folder in folders))


def _draw_timeline(results_dir: Path, file: Path) -> None:
    trace = newest("trace", results_dir) / "trace.json"
    events = read_chrome_trace(trace)
    first_step_s = min(event.end_s for event in events if event.lane == "compute")  # it warms up, and takes long
    _save(timeline.draw(events, first_s=first_step_s), file, trace)


def _draw_waits(draw: Callable[..., matplotlib.figure.Figure], results_dir: Path, file: Path) -> None:
    table = newest("waits", results_dir) / "steps.csv"
    _save(draw(read_steps(table), title="a slow worker, emulated"), file, table)


def _draw_ring(results_dir: Path, file: Path) -> None:
    save_gif(COLLECTIVES["ring"], 4, file)


OTHERS: dict[str, Callable[[Path, Path], None]] = {
    "overlap_gpu.png": _draw_overlap,
    "schedule.png": _draw_schedule,
    "timeline.png": _draw_timeline,
    "waits.png": partial(_draw_waits, partial(waits.draw_matrix, followed=True)),
    "steps.png": partial(_draw_waits, waits.draw_steps),
    "ring_all_reduce.gif": _draw_ring,
}


def _save(figure: matplotlib.figure.Figure, file: Path, *drawn_from: Path) -> None:
    """The file says which tables it was drawn from, so that one that was not drawn anew is found out."""
    digests = [f"{table.name} sha256 {hashlib.sha256(table.read_bytes()).hexdigest()}" for table in drawn_from]
    figure.savefig(file, metadata={"Software": None, "Source": ", ".join(digests)})


def main(arguments: list[str]) -> None:
    """`python -m torch_parallel plots`"""
    parser = OneLineParser(prog="python -m torch_parallel plots", description=__doc__, allow_abbrev=False)
    parser.add_argument("--results_dir", default="results", help="where the results are (default: results)")
    parser.add_argument("--media", default="media", help="where the figures go (default: media)")
    parser.add_argument("--readme", default="README.md", help="file whose tables are filled (default: README.md)")
    parser.add_argument(
        "--table", default=TABLE, help="file for the table of the fastest all-reduce (default: the package's own)"
    )
    options = parser.parse_args(arguments)
    if not Path(options.results_dir).is_dir():
        sys.exit(
            f"plots: --results_dir {options.results_dir}: there is no such folder; run it in a clone of the "
            "repository, or name the folders (--results_dir, --media, --readme)"
        )
    try:
        table, readme = Path(options.table), Path(options.readme)
        with making(str(table)):
            fastest = fastest_table(options.results_dir)
        text = with_tables(readme.read_text(encoding="utf-8"), options.results_dir)
        files = draw_all(Path(options.results_dir), Path(options.media), skip=print)
        readme.write_text(text, encoding="utf-8")
        table.write_text(fastest, encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.exit(f"plots: {error}")
    print("\n".join(["drawn:", *(f"  {file}" for file in files), f"tables filled: {readme}, {table}"]))
