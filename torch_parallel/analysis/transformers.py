"""What the experiments with transformers found: tables and sentences, from their folders of results.

    print(told(batch_table, "transformers_batch"))      of the results on the CPU, on GPUs, or both: what there is

A set-up is nodes and workers of each: "2_1" are two nodes with one worker each. A difference is claimed only where the
ranges over the seeds do not overlap. Beside it stand the parts of the time that the workers exchanged and waited, the
means over them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch_parallel.analysis.findings import about, summary
from torch_parallel.analysis.runs import (
    ExperimentMissing,
    Run,
    accuracies,
    by_setting,
    held_equal,
    how_to_make,
    newest,
    read_runs,
    select,
    spread,
)

SETUPS = ("1_1", "1_2", "1_4", "2_1", "2_2")
"""Nodes, and workers of each; nodes are emulated."""
EQUAL_BATCH = 16
"""Samples of all workers together, where those are the same in all set-ups."""

FEWEST = 3
"""Seeds without which no difference is claimed."""

COMPARED: dict[str, dict[str, Any]] = {
    "transformers_batch": {
        "apart": ("model", "batch_each"),
        "same": ("processors_each",),
        "but": ("kind", "batch_size", "nodes", "steps", "epochs"),
    },
    "transformers_learning_rate": {
        "apart": ("model", "rate"),
        "same": ("processors_each",),
        "but": ("batch_size", "steps", "lr"),
    },
    "propagation": {"apart": ("model",), "same": ("processors",), "but": ("kind", "nodes", "steps", "epochs")},
}
"""For each experiment what `summary` wants to know of it."""


def folders(experiment: str, results_dir: str | Path = "results") -> list[Path]:
    """The newest results on the CPU, then those on GPUs, as far as they are there."""
    found = []
    for name in (experiment, f"{experiment}_gpu"):
        with suppress(ExperimentMissing):
            found.append(newest(name, results_dir))
    return found


def none_yet(experiment: str) -> str:
    """What is said where there are no results."""
    return f"no results of {experiment} yet; make them with: {how_to_make(experiment)}"


def told(tell: Callable[[Path], str], experiment: str, results_dir: str | Path = "results") -> str:
    """What `tell` says of each folder of the experiment, with where and when it was made above."""
    each = [f"{about(folder)}\n\n{tell(folder)}" for folder in folders(experiment, results_dir)]
    return "\n\n".join(each) or none_yet(experiment)


def held(folder: Path) -> str:
    """What was held equal in each comparison of the experiment, and what came out."""
    return summary(folder, **COMPARED[folder.parent.name.removesuffix("_gpu")])


def alike(runs: list[Run], experiment: str, also: tuple[str, ...] = ()) -> None:
    """Raises Unequal where runs differ in more than one comparison of the experiment may; `also` are alike besides."""
    compared = COMPARED[experiment]
    but = tuple(name for name in compared["but"] if name not in also)
    if runs:
        held_equal(runs, but, compared["same"])


def by_setup(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by their set-up, in the order of SETUPS."""
    groups = {setup: select(runs, setup=setup) for setup in SETUPS}
    return {setup: of_setup for setup, of_setup in groups.items() if of_setup}


def at_batch(runs: list[Run], size: int) -> list[Run]:
    """Those in which each worker has so many samples of a step. Raises Unequal where they differ in more."""
    chosen = [run for run in runs if run.setting("batch_each") == size]
    alike(chosen, "transformers_batch")
    return chosen


def at_whole_batch(runs: list[Run], size: int = EQUAL_BATCH) -> list[Run]:
    """Those in which all workers together have so many. Raises Unequal where they differ in more."""
    chosen = select(runs, batch_size=size)
    alike(chosen, "transformers_batch", also=("batch_size",))
    return chosen


def batch_sizes(runs: list[Run]) -> list[int]:
    """The batches of a worker that more than two set-ups have: others come of an equal batch of all."""
    sizes = sorted({run.setting("batch_each") for run in runs})
    return [int(size) for size in sizes if len(by_setup([r for r in runs if r.setting("batch_each") == size])) > 2]


def differ(some: list[float], others: list[float]) -> bool:
    """Whether the ranges of the repeats do not overlap, and there are enough of them to say so."""
    enough = min(len(some), len(others)) >= FEWEST
    return enough and (max(some) < min(others) or max(others) < min(some))


def with_spread(values: list[float], how: str = ".2f") -> str:
    """Median, and the least and the largest in brackets."""
    middle, least, largest = (format(value, how) for value in spread(values))
    return f"{middle} ({least} to {largest})"


def part(runs: list[Run], name: str) -> float | None:
    """Median over the runs of `exchanged_part` or `waited_part`; None where some run does not know it."""
    of_runs: list[list[float | None]] = [[getattr(epoch, name) for epoch in run.warm_epochs] for run in runs]
    known = [[value for value in values if value is not None] for values in of_runs]
    if known != of_runs:
        return None
    return statistics.median(statistics.median(values) for values in known)


def parts_told(runs: list[Run]) -> str:
    """Such as "exchanged 12 %, waited 3 %"; where waiting is not told apart it is within the exchange."""
    exchanged, waited = part(runs, "exchanged_part"), part(runs, "waited_part")
    if exchanged is None:
        return "exchange not told apart"
    if waited is None:
        return f"exchanged and waited {100 * exchanged:.0f} %"
    return f"exchanged {100 * exchanged:.0f} %, waited {100 * waited:.0f} %"


def slower_or_not(name: str, runs: list[Run], other: str, others: list[Run]) -> str:
    """One sentence on the seconds of two groups of runs."""
    ours, theirs = [run.per_1000_s for run in runs], [run.per_1000_s for run in others]
    both = f"{name} {with_spread(ours)} s for 1,000 samples, {other} {with_spread(theirs)} s"
    if not differ(ours, theirs):
        return f"{both}: no difference can be told."
    times = statistics.median(ours) / statistics.median(theirs)
    return f"{both}: {times:.2f} times as long ({name} {parts_told(runs)}; {other} {parts_told(others)})."


# ---- batches ----


def batch_table(folder: Path) -> str:
    """Seconds for 1,000 samples: a row for each set-up, a column for each batch; `-` was not measured."""
    lines = ["seconds for 1,000 samples, median (least to largest) over the seeds"]
    for model, runs in by_setting(read_runs(folder), "model").items():
        sizes = batch_sizes(runs)
        columns = {f"{size} a worker": at_batch(runs, size) for size in sizes}
        columns[f"{EQUAL_BATCH} over all"] = at_whole_batch(runs)
        lines += ["", f"{model:12}" + "".join(f"{name:>26}" for name in columns)]
        for setup in by_setup(runs):
            cells = [select(of_column, setup=setup) for of_column in columns.values()]
            values = [with_spread([run.per_1000_s for run in of_cell]) if of_cell else "-" for of_cell in cells]
            lines.append(f"{setup:12}" + "".join(f"{value:>26}" for value in values))
    return "\n".join(lines)


PAIRS = (("2_1", "1_2"), ("2_2", "1_4"))
"""As many workers on two nodes as on one."""


def batch_found(folder: Path) -> str:
    """Two nodes beside one with as many workers, and several workers beside one; in sentences."""
    lines = []
    for model, runs in by_setting(read_runs(folder), "model").items():
        comparisons = {f"{size} a worker": at_batch(runs, size) for size in batch_sizes(runs)}
        comparisons[f"{EQUAL_BATCH} over all"] = at_whole_batch(runs)
        for batch, chosen in comparisons.items():
            groups = by_setup(chosen)
            pairs = [*PAIRS, *((setup, "1_1") for setup in ("1_2", "1_4"))]
            for one, other in pairs:
                if one in groups and other in groups:
                    lines.append(f"{model}, {batch}: {slower_or_not(one, groups[one], other, groups[other])}")
    return "\n".join(lines)


# ---- learning rates ----


def rate_groups(folder: Path) -> dict[tuple[str, str], list[Run]]:
    """Rate as asked for, and set-up -> runs. Raises Unequal where they differ in more than these."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for rate, runs in by_setting(read_runs(folder), "rate").items():
        alike(runs, "transformers_learning_rate")
        groups |= {(rate, setup): of_setup for setup, of_setup in by_setup(runs).items()}
    return groups


def rate_table(folder: Path) -> str:
    """Test accuracy after the last epoch, by learning rate and set-up."""
    lines = ["test accuracy (%) after the last epoch, median (least to largest) over the seeds", ""]
    lines.append(f"{'rate':20}{'set-up':8}{'accuracy':>26}")
    for (rate, setup), runs in rate_groups(folder).items():
        lines.append(f"{rate:20}{setup:8}{with_spread(accuracies(runs)):>26}")
    return "\n".join(lines)


def rate_found(folder: Path) -> str:
    """The two rates beside each other, and each rate times the workers beside itself, for each set-up."""
    groups, lines = rate_groups(folder), []
    rates = [rate for rate in dict.fromkeys(rate for rate, _ in groups) if "x" not in rate]
    pairs = [*pairwise(rates), *((f"{rate} x workers", rate) for rate in rates)]
    for one, other in pairs:
        for setup in SETUPS:
            if (one, setup) in groups and (other, setup) in groups:
                ours, theirs = (accuracies(groups[rate, setup]) for rate in (one, other))
                points = statistics.median(ours) - statistics.median(theirs)
                verdict = f"{points:+.2f} points" if differ(ours, theirs) else "no difference can be told"
                lines.append(f"{setup}: {one} {with_spread(ours)} %, {other} {with_spread(theirs)} %: {verdict}")
    return "\n".join(lines)


# ---- near and far ----


def link_groups(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs of one model by what lies between their workers. Raises Unequal where they differ in more."""
    alike(runs, "propagation")
    groups: dict[str, list[Run]] = {}
    for run in runs:
        link, latency = run.given("link"), run.given("latency")
        groups.setdefault(f"{link}, {latency}" if link else "one node", []).append(run)
    return groups


def step_s(run: Run) -> float:
    """Seconds of a step, the first one left out."""
    return run.per_1000_s * int(run.setting("batch_size")) / 1000


def link_table(folder: Path) -> str:
    """Milliseconds of a step by what lies between the two workers, and which parts they exchanged and waited."""
    lines = ["ms of a step, median (least to largest) over the seeds"]
    for model, runs in by_setting(read_runs(folder), "model").items():
        lines += ["", f"{model}, batch of {runs[0].setting('batch_size')} over two workers"]
        for name, of_link in link_groups(runs).items():
            milliseconds = with_spread([1e3 * step_s(run) for run in of_link], ".1f")
            lines.append(f"  {name:18}{milliseconds:>30}   {parts_told(of_link)}")
    return "\n".join(lines)


def link_found(folder: Path) -> str:
    """Each distance beside the nearest one, and that beside one node without links."""
    lines = []
    for model, runs in by_setting(read_runs(folder), "model").items():
        groups = link_groups(runs)
        near, *far = [name for name in groups if name != "one node"]
        lines += [f"{model}: {slower_or_not(name, groups[name], near, groups[near])}" for name in far]
        if "one node" in groups:
            lines.append(f"{model}: {slower_or_not(near, groups[near], 'one node', groups['one node'])}")
    return "\n".join(lines)
