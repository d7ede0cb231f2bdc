"""What an experiment found, in sentences whose every number is worked out from its folder of results."""

from __future__ import annotations

import statistics
from pathlib import Path

from torch_parallel.analysis.runs import (
    PARTS,
    Run,
    accuracies,
    by_label,
    by_setting,
    commit_told,
    held_equal,
    machine_told,
    manifest,
    read_runs,
    select,
    speed_ups,
    spread,
)
from torch_parallel.results import joined


def about(folder: str | Path) -> str:
    """Where and when the runs were made, with which code, and how many there are."""
    told = manifest(folder)
    return (
        f"{told['command']}\n"
        f"{len(read_runs(folder))} runs, begun {told['started'][:16].replace('T', ' ')}: {machine_told(told)}, "
        f"python {told['versions']['python']}, commit {commit_told(told, 12)}"
    )


def made(folder: str | Path) -> str:
    """The same of a bench."""
    told = manifest(folder)
    when = told["started"][:16].replace("T", " ")
    return f"{told['command']}\n{when}: {machine_told(told)}, commit {commit_told(told, 12)}"


def summary(
    folder: str | Path,
    apart: tuple[str, ...] = ("model",),
    same: tuple[str, ...] = ("processors",),
    but: tuple[str, ...] = (),
) -> str:
    """For each comparison what was held equal, and seconds of an epoch and accuracy with their spread.

    `apart` are the columns whose values are not compared with each other, `same` and `but` are those of `held_equal`.
    Raises Unequal.
    """
    lines = []
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in read_runs(folder):
        groups.setdefault(tuple(str(run.setting(name)) for name in apart), []).append(run)
    for key, runs in groups.items():
        held = held_equal(runs, but, same)
        lines.append(", ".join(f"{name} {value}" for name, value in zip(apart, key, strict=True)))
        lines.append(f"  held equal: {'; '.join(f'{name} {value}' for name, value in held.items())}")
        for label, of_label in by_label(runs).items():
            what, seconds = _seconds(of_label)
            median, least, largest = spread(seconds)
            accuracy, worst, best = spread([100 * run.epochs[-1].test_accuracy for run in of_label])
            lines.append(
                f"  {label:44}{median:8.3f} s {what} ({least:.3f} to {largest:.3f})   "
                f"test accuracy {accuracy:.2f} % ({worst:.2f} to {best:.2f})   {len(of_label)} runs"
            )
    return "\n".join(lines)


def _seconds(runs: list[Run]) -> tuple[str, list[float]]:
    """What is timed, and its seconds: an epoch, or samples where runs end after so many steps."""
    if any(run.given("max_steps") for run in runs):
        return "for 1,000 samples", [run.per_1000_s for run in runs]
    return "an epoch", [run.epoch_s for run in runs]


def ring_beside_ddp(folder: str | Path) -> str:
    """Whose epoch is shorter, and which of its parts make the difference; a paragraph for each model."""
    paragraphs = []
    for model, runs in by_setting(read_runs(folder), "model").items():
        held_equal(runs)
        ring, ddp = select(runs, strategy="ring_all_reduce"), select(runs, strategy="ddp")
        ours, theirs = _median(ring), _median(ddp)
        told = [f"{model}: the ring's epoch takes {ours / theirs:.2f} of DistributedDataParallel's time."]
        told.append(f"They differ by {theirs - ours:+.2f} s:")
        groups = _told_apart(ring + ddp)
        told.append(
            ", ".join(f"{joined(group)} {_parts(ddp, group) - _parts(ring, group):+.2f} s" for group in groups)
            + " (positive: the ring needs less; each is a difference of medians, so they need not add up)."
        )
        told.append(f"Their accuracies differ by at most {_largest_difference(ring, ddp):.2f} points for any seed.")
        paragraphs.append(" ".join(told))
    return "\n".join(paragraphs)


def server_beside_data_parallel(folder: str | Path) -> str:
    """Accuracy of both, seed by seed, and whose epoch is shorter; a paragraph for each model."""
    paragraphs = []
    for model, runs in by_setting(read_runs(folder), "model").items():
        held_equal(runs)
        server, builtin = select(runs, strategy="param_server"), select(runs, strategy="data_parallel")
        difference = _largest_difference(server, builtin)
        _, worst, best = spread(accuracies(builtin))
        paragraphs.append(
            f"{model}: for one seed the two differ by at most {difference:.2f} points of accuracy, while the seeds of "
            f"one program differ by {best - worst:.2f}. The server's epoch takes "
            f"{_median(server) / _median(builtin):.2f} of the built-in's time."
        )
    return "\n".join(paragraphs)


def scaling_found(folder: str | Path, model: str = "cnn") -> str:
    """How epochs grow with the data, and what more workers bring, against one process with one thread."""
    runs = [run for run in select(read_runs(folder), model=model) if not run.plain_module]
    lines = []
    for model, of_model in by_setting(runs, "model").items():
        sizes = sorted({int(run.setting("train_size")) for run in of_model})
        largest = select(of_model, train_size=sizes[-1])
        held_equal(largest, same=("processors_each",))
        for label, of_label in by_label(of_model).items():
            most, least = (select(of_label, train_size=size) for size in (sizes[-1], sizes[0]))
            grown = ""
            if least:
                times = _median(most) / _median(least)
                grown = f"{sizes[-1] / sizes[0]:.0f} times the images take {times:.1f} times as long; "
            median, lowest, highest = spread(speed_ups(most, largest))
            lines.append(
                f"{model}, {label}: {grown}with {sizes[-1]:,} images {median:.2f} times the speed of one process "
                f"({lowest:.2f} to {highest:.2f}), efficiency {100 * median / of_label[0].asked_for:.0f} %"
            )
    return "\n".join(lines)


def _median(runs: list[Run]) -> float:
    return statistics.median(run.epoch_s for run in runs)


def _told_apart(runs: list[Run]) -> list[tuple[str, ...]]:
    """The parts of an epoch; what some run does not tell from the part before it is together with that."""
    groups: list[tuple[str, ...]] = []
    for part in PARTS:
        apart = part != "wait" and all(run.part_s(part) is not None for run in runs)
        groups = [*groups, (part,)] if apart else [*groups[:-1], (*groups[-1], part)]
    return groups


def _parts(runs: list[Run], names: tuple[str, ...]) -> float:
    """Median over the runs of the seconds that go into these parts of an epoch."""
    assert set(names) <= set(PARTS)
    return statistics.median(sum(run.part_s(name) or 0.0 for name in names) for run in runs)


def _largest_difference(some: list[Run], others: list[Run]) -> float:
    """Of the accuracies, in points, seed by seed."""
    return max(abs(a - b) for a, b in zip(accuracies(some), accuracies(others), strict=True))
