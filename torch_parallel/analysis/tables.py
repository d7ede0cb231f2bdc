"""The tables of the README, as Markdown, made from results/ alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch_parallel.analysis.communication import read_bench, size_told
from torch_parallel.analysis.gpu import exchange_share, nccl_table, nccl_table_of_four
from torch_parallel.analysis.runs import (
    bench_rows,
    by_label,
    by_setting,
    commit_told,
    complete,
    held_equal,
    machine_told,
    making,
    manifest,
    newest,
    read_runs,
    same_told,
    spread,
)
from torch_parallel.collectives import ALL_REDUCE


def experiments_table(results_dir: str | Path = "results") -> str:
    """Seconds of an epoch and accuracy of the two comparisons, with machine, versions, date and repeats below."""
    lines = [
        "| model, images, epochs | strategy | seconds of an epoch after the first | test accuracy (%) | repeats |",
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
        about = manifest(folder)
        notes.append(
            f"`{folder.relative_to(results_dir)}` (commit {commit_told(about)}; {machine_told(about)}, "
            f"{about['started'][:10]})"
        )
    note = (
        "Medians (least to largest) over the seeds. Accuracy is that of the last epoch. Each pair of rows has the same "
        "data, order, global batch, steps, evaluation and processors; only beside DataParallel do BatchNorm and "
        "dropout make mobilenet_v2 another training. The server is a process more, which shares the processors. "
        f"From {' and '.join(notes)} in `results/`."
    )
    return "\n".join([*lines, "", note])


def bench_table(results_dir: str | Path = "results") -> str:
    """The all-reduce of two processes beside gloo's and MPI's, by size."""
    folder = newest("bench_all_reduce", results_dir)
    rows = [row for row in read_bench(folder) if row["n"] == 2]
    lines = [
        "| size | gloo (us) | ring (us) | fastest (us) | times gloo's speed | times MPI's | ring, ordinary tensor |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in dict.fromkeys(row["size_bytes"] for row in rows):
        ways = {row["way"]: row for row in rows if row["size_bytes"] == size}
        best = min((ways[name] for name in ALL_REDUCE), key=lambda row: float(row["time_us"]))
        mpi = f"{ways['mpi']['time_us'] / best['time_us']:.2f}" if "mpi" in ways else "-"
        cells = [size_told(size), _with_quartiles(ways["gloo"]), _with_quartiles(ways["ring"])]
        cells += [f"{best['way']} {_with_quartiles(best)}", f"{best['times_faster_than_gloo']:.1f}", mpi]
        cells.append(f"{ways['ring, ordinary tensor']['times_faster_than_gloo']:.1f} times gloo's")
        lines.append(f"| {' | '.join(cells)} |")
    about = manifest(folder)
    others = f", {about['mpi']} in 2 others" if any(row["way"] == "mpi" for row in rows) else ""
    note = (
        f"Medians (quartiles) of the slowest rank; ours and gloo's in turns in the same 2 processes{others}; "
        f"{machine_told(about)}, {about['started'][:10]}. From `{folder.relative_to(results_dir)}` (commit "
        f"{commit_told(about)})."
    )
    return "\n".join([*lines, "", note])


def _with_quartiles(row: dict[str, Any]) -> str:
    return f"{_short(row['time_us'])} ({_short(row['lower_quartile_us'])} to {_short(row['upper_quartile_us'])})"


def _short(microseconds: float) -> str:
    return f"{microseconds:,.1f}" if microseconds < 100 else f"{microseconds:,.0f}"


def epoch_note(results_dir: str | Path = "results", bench: str = "bench_epoch") -> str:
    """An epoch of training beside DistributedDataParallel, in turns in the same processes."""
    folder = newest(bench, results_dir)
    ours, theirs = bench_rows(folder)
    about = manifest(folder)
    ours_s, theirs_s = json.loads(ours["all_s"]), json.loads(theirs["all_s"])
    ratio = float(ours["median_s"]) / float(theirs["median_s"])
    processes = f"{about['n']} processes" if about["n"] > 1 else "process"
    return (
        f"In turns in the same {processes}, {len(ours_s)} epochs each, an epoch of `{about['model']}` takes "
        f"{_with_spread(ours_s, '.2f')} s with {ours['side']} and {_with_spread(theirs_s, '.2f')} s with "
        f"DistributedDataParallel: {ratio:.2f} of its time. {machine_told(about)}, {about['started'][:10]}, from "
        f"`{folder.relative_to(results_dir)}` (commit {commit_told(about)})."
    )


def step_table(results_dir: str | Path = "results", bench: str = "bench_step") -> str:
    """Steps of our strategies beside DistributedDataParallel's, and the memory of both, by model and precision.

    Of steps on GPUs also what their profile says: how busy a GPU was, and how much of the time it exchanged.
    """
    measured = {}
    for folder in complete(bench, results_dir):
        about = manifest(folder)
        names = ("parameters", "image_side", "batch_size", "precision", "compile", "optimizer", "n")
        measured[_model_told(about), *(about[name] for name in names)] = folder, about
    same_told({folder: machine_told(about) for folder, about in measured.values()})
    on_gpus = bool(about["cards"])
    columns = ["model, batch, precision, optimizer, workers", "strategy", "ms a step", "DDP's", "times DDP's speed"]
    columns += ["efficiency", "part of its memory", *(["GPU busy", "exchanging"] if on_gpus else [])]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (model, parameters, side, batch_size, precision, compiled, *others), (folder, about) in measured.items():
        by_bucket = about["ddp_step_s_by_bucket_mb"].values()
        rows = bench_rows(folder)
        ddps = {row["beside"]: row for row in rows if row["side"] == "ddp"}
        for row in rows:
            if row["side"] in ("ddp", "one process"):
                continue
            sized = f"{model} of {side} x {side}" if side else model
            precision_told = f"{precision} compiled" if compiled else precision
            name = ", ".join(map(str, (sized, f"{parameters / 1e6:.1f} M", batch_size, precision_told, *others)))
            memory = row["part_of_ddps_memory"]
            cells = [name, row["side"], *(_step_ms(each) for each in (row, ddps[row["side"]]))]
            cells[-1] += f", by itself {1e3 * min(by_bucket):.1f}" if by_bucket else ""
            cells += [f"{float(row['times_faster_than_ddp']):.3f}", _percent(row["efficiency"])]
            cells.append(f"{float(memory):.2f}" if memory else "-")
            if on_gpus:
                busy = [_percent(each["gpu_busy"]) for each in (row, ddps[row["side"]])]
                profiled = [each for each in (row["side"], "ddp") if row["gpu_busy"] != ""]
                exchanging = [_percent(exchange_share(folder, each, row["side"])) for each in profiled] or ["-", "-"]
                cells += [f"{ours}, DDP's {theirs}" for ours, theirs in (busy, exchanging)]
            lines.append(f"| {' | '.join(cells)} |")
    sources = ", ".join(
        f"`{folder.relative_to(results_dir)}` (commit {commit_told(about)})" for folder, about in measured.values()
    )
    has_chosen = any(about["ddp_step_s_by_bucket_mb"] for _, about in measured.values())
    of_profile = "Busy and exchanging: parts of profiled steps, waiting for peers included. "
    by_itself = "By itself: with the fastest of several sizes of buckets, in other processes just before. "
    note = (
        "Medians (least to largest), in turns with DistributedDataParallel in the same processes. Efficiency: what one "
        f"process takes for a worker's share of the batch, over the step. {of_profile if on_gpus else ''}"
        f"{by_itself if has_chosen else ''}"
        f"Memory: {'the fullest GPU' if on_gpus else 'the Pss of all processes'}. "
        f"{machine_told(about)}, {about['started'][:10]}, from {sources}."
    )
    return "\n".join([*lines, "", note])


def _model_told(about: dict[str, Any]) -> str:
    """With what older benches had no choice of: the size, what is done with texts, and how the sides were timed."""
    name = about["model"]
    if about.get("model_size"):
        name += f" {about['model_size']}"
    if about.get("length"):
        name += f" ({about['task']}, {about['length']} of {about['vocabulary_size']} tokens)"
    return f"{name}, each side apart" if about.get("way") == "apart" else str(name)


def _step_ms(row: dict[str, str]) -> str:
    return _with_spread([1e3 * seconds for seconds in json.loads(row["all_s"])], ".1f")


def _percent(part: str | float) -> str:
    return f"{100 * float(part):.0f} %" if part != "" else "-"


def gpu_step_table(results_dir: str | Path = "results") -> str:
    """The same on GPUs."""
    return step_table(results_dir, "bench_step_gpu")


def gpu_epoch_note(results_dir: str | Path = "results") -> str:
    return epoch_note(results_dir, "bench_epoch_gpu")


def _with_spread(values: list[float], how: str) -> str:
    middle, least, largest = (format(value, how) for value in spread(values))
    return f"{middle} ({least} to {largest})"


TABLES = {
    "experiments": experiments_table,
    "bench": bench_table,
    "epoch": epoch_note,
    "epoch_gpu": gpu_epoch_note,
    "step": step_table,
    "step_gpu": gpu_step_table,
    "nccl": nccl_table,
    "nccl_n4": nccl_table_of_four,
}


def with_tables(text: str, results_dir: str | Path = "results") -> str:
    """`text` with every `<!-- NAME -->` ... `<!-- end -->` filled with the table of that name.

    Raises ValueError where one has no end of its own: what follows it is not to be taken for a table.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if found:
            held, ended, after = rest.partition(end)
            if not ended or "<!--" in held:
                raise ValueError(f"the table <!-- {name} --> has no {end} of its own: put it back behind the table")
            with making(f"the table {name}"):
                text = f"{before}{begin}{table(results_dir)}\n{end}{after}"
    return text
