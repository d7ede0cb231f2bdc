"""The tables of the README, as Markdown, made from results/ alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from torch_parallel.analysis.runs import (
    by_label,
    by_setting,
    held_equal,
    machine_told,
    manifest,
    newest,
    read_runs,
    spread,
)


def experiments_table(results_dir: str | Path = "results") -> str:
    """Seconds of an epoch and accuracy of the two comparisons, with machine, versions, date and repeats below."""
    lines = [
        "| model, images, epochs | strategy | seconds of an epoch | test accuracy (%) | repeats |",
        "|---|---|---|---|---|",
    ]
    notes = []
    for experiment in ("ring_all_reduce", "param_server"):
        folder = newest(experiment, results_dir)
        for model, of_model in by_setting(read_runs(folder), "model").items():
            held = held_equal(of_model)
            for label, of_label in by_label(of_model).items():
                seconds = _with_spread([run.epoch_s for run in of_label], ".2f")
                accuracy = _with_spread([100 * run.epochs[-1].test_accuracy for run in of_label], ".2f")
                name = f"{model}, {int(held['train_size']):,}, {held['epochs']}"
                lines.append(f"| {name} | {label} | {seconds} | {accuracy} | {len(of_label)} |")
        notes.append(f"`{folder.relative_to(results_dir)}` (commit {manifest(folder)['commit'][:7]})")
    about = manifest(newest("ring_all_reduce", results_dir))
    note = (
        f"Medians (least to largest) over the seeds; {machine_told(about)}, {about['started'][:10]}. Accuracy is that "
        f"of the last epoch. Each pair of rows has the same data, order, global batch, steps, evaluation and "
        f"processors; dropout and BatchNorm make mobilenet_v2 differ. From {' and '.join(notes)} in `results/`."
    )
    return "\n".join([*lines, "", note])


def bench_table(results_dir: str | Path = "results") -> str:
    """The ring's all-reduce beside gloo's, by size."""
    folder = max((Path(results_dir) / "bench_all_reduce").glob("*"))
    with open(folder / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = ["| all-reduce of | times gloo's speed | of an ordinary tensor |", "|---|---|---|"]
    for size in dict.fromkeys(int(row["size_bytes"]) for row in rows):
        ways = {row["way"]: float(row["times_faster_than_gloo"]) for row in rows if int(row["size_bytes"]) == size}
        lines.append(f"| {_size(size)} | {ways['ring']:.1f} | {ways['ring, ordinary tensor']:.1f} |")
    about = manifest(folder)
    note = (
        f"{about['n']} processes, both sides in turns in the same ones; {machine_told(about)}, {about['started'][:10]}."
    )
    return "\n".join([*lines, "", note])


def epoch_note(results_dir: str | Path = "results") -> str:
    """One sentence: an epoch of training beside DistributedDataParallel, in turns in the same processes."""
    folder = max((Path(results_dir) / "bench_epoch").glob("*"))
    with open(folder / "bench.csv", newline="") as file:
        ours, theirs = list(csv.DictReader(file))
    about = manifest(folder)
    ours_s, theirs_s = float(ours["median_s"]), float(theirs["median_s"])
    return (
        f"In turns in the same {about['n']} processes, {len(json.loads(ours['all_s']))} epochs each, an epoch of "
        f"`{about['model']}` takes {ours_s:.2f} s with {ours['side']} and {theirs_s:.2f} s with "
        f"DistributedDataParallel: {ours_s / theirs_s:.2f} of its time."
    )


def _with_spread(values: list[float], how: str) -> str:
    middle, least, largest = (format(value, how) for value in spread(values))
    return f"{middle} ({least} to {largest})"


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


TABLES = {"experiments": experiments_table, "bench": bench_table, "epoch": epoch_note}


def with_tables(text: str, results_dir: str | Path = "results") -> str:
    """`text` with every `<!-- NAME -->` ... `<!-- end -->` filled with the table of that name."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if found:
            after = rest.partition(end)[2]
            text = f"{before}{begin}{table(results_dir)}\n{end}{after}"
    return text
