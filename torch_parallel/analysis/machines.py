"""What layouts of an all-reduce take on two machines: emulated, in the lab, and by theory; and training by them.

print(layouts_told())                    of results/bench_nodes
print(steps_told(newest("machines")))    of training
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from torch_parallel.analysis.figure import OTHER, Figure
from torch_parallel.analysis.runs import (
    Record,
    Run,
    bench_rows,
    by_setting,
    complete,
    machine_told,
    manifest,
    read_runs,
    read_table,
    spread,
)

CARD_COLOURS: dict[int, str] = {1: "#E69F00", 4: "#0072B2"}
"""By the number of a node's cards."""
SHORT = {"hierarchical_leaders": "leaders", "hierarchical_multi_nic": "multi_nic"}
SHORT |= {"hierarchical_grouped": "grouped", "hierarchical_sharded": "sharded", "flat_all_reduce": "flat"}


def short(name: str) -> str:
    return SHORT.get(name, name)


# ---- the sums alone ----


def layouts_told(results_dir: str | Path = "results") -> str:
    """A table for each bench: what it was, and for each layout seconds beside theory, and bytes of the busiest card."""
    told = []
    for folder in complete("bench_nodes", results_dir):
        rows = bench_rows(folder)
        told.append(f"{_setting(rows[0])}; {machine_told(manifest(folder))}")
        told += [_row_told(row) for row in rows]
        told.append("")
    return "\n".join(told).rstrip()


def _setting(row: Record) -> str:
    rate = f"{row['link']} a card" if row["link"] else "no limit"
    latency = f", {row['latency']}" if row.get("latency") not in (None, "", "0s") else ""
    where = "emulated" if row["kind"] == "emulated" else "in the lab"
    cards = f"{row['cards']} card{'s' * (row['cards'] != '1')}"
    return f"{where}: {row['nodes']} nodes, {row['workers']} ranks, {cards} a node, {rate}{latency}, {_mb(row)} MB"


def _mb(row: Record) -> str:
    return f"{int(row['bytes']) / 1e6:g}"


def _row_told(row: Record) -> str:
    text = f"  {short(row['layout']):18}{1e3 * float(row['median_s']):9.1f} ms"
    if row["theory_s"]:
        theory, predicted = float(row["theory_s"]), float(row["predicted_s"] or "nan")
        times = float(row["median_s"]) / theory
        text += f"   theory {1e3 * theory:7.1f} ms ({times:.2f} times), predicted {1e3 * predicted:7.1f} ms"
    if row["busiest_card_part"]:
        text += f"   busiest card {float(row['busiest_card_part']):.3f} S"
    if row["busiest_card_read_bytes"]:
        text += f", read {int(row['busiest_card_read_bytes']) / int(row['bytes']):.3f} S"
    return text


# ---- training ----


def _by_cards(folder: Path) -> list[tuple[int, list[Run]]]:
    """The runs by the number of a node's cards."""
    return sorted((int(cards), runs) for cards, runs in by_setting(read_runs(folder), "cards").items())


def step_s(run: Run) -> float:
    """Seconds of a step: all samples of the epoch, at the rate of its workers together."""
    return float(run.setting("batch_size")) / statistics.median(epoch.samples_per_s for epoch in run.warm_epochs)


def steps_told(folder: Path) -> str:
    """Seconds of 1,000 steps for each strategy and number of cards, how much faster than DistributedDataParallel, and
    what each has learned."""
    lines = [f"{machine_told(manifest(folder))}", ""]
    for cards, runs in _by_cards(folder):
        of_ddp = statistics.median(step_s(run) for run in runs if run.strategy == "ddp")
        lines.append(f"{cards} card{'s' * (cards > 1)} a node: 1,000 steps, median (least to largest) over the seeds")
        for strategy, repeats in by_setting(runs, "strategy").items():
            middle, least, largest = spread([1000 * step_s(run) for run in repeats])
            times = of_ddp / statistics.median(step_s(run) for run in repeats)
            losses = ", ".join(f"{run.epochs[-1].train_loss:.4f}" for run in repeats)
            text = f"  {short(strategy):12}{middle:7.0f} s ({least:.0f} to {largest:.0f})  {times:5.2f} x ddp"
            lines.append(f"{text}   losses {losses}")
    return "\n".join(lines)


def traffic_told(folder: Path) -> str:
    """For each strategy and number of cards the bytes of the busiest card in a step, as messages add up and as the
    system has counted."""
    busiest = _busiest(folder)
    lines = []
    for cards, runs in _by_cards(folder):
        lines.append(f"{cards} card{'s' * (cards > 1)} a node: MB of the busiest card in one direction, in a step")
        for strategy, repeats in by_setting(runs, "strategy").items():
            of_messages, read = (
                nbytes / int(repeats[0].setting("steps")) / 1e6 for nbytes in busiest[repeats[0].run_id]
            )
            counted = f"{of_messages:6.2f} by messages" if of_messages else "torch does not tell"
            more = f" ({100 * (read / of_messages - 1):.1f} % more)" if of_messages else ""
            lines.append(f"  {short(strategy):12}{counted:20}{read:6.2f} read{more}")
    return "\n".join(lines)


def _busiest(folder: Path) -> dict[str, tuple[int, int]]:
    """By run, the most bytes of a card in one direction: of messages, and as read."""
    most: dict[str, tuple[int, int]] = {}
    for row in read_table(folder / "runs.csv"):
        before = most.get(row["run_id"], (0, 0))
        now = (_most(row["nic_message_bytes"]), _most(row["nic_bytes"]))
        most[row["run_id"]] = max(before[0], now[0]), max(before[1], now[1])
    return most


def _most(text: str) -> int:
    return max((nbytes for both in json.loads(text or "{}").values() for nbytes in both), default=0)


def step_bars(folder: Path) -> Figure:
    """Seconds of a step by strategy, with one card a node and with four; whiskers from the least to the largest."""
    groups = _by_cards(folder)
    figure = Figure(9.0, 3.6)
    axes = figure.subplots()
    names: list[str] = []
    for place, (cards, runs) in enumerate(groups):
        for index, (strategy, repeats) in enumerate(by_setting(runs, "strategy").items()):
            middle, least, largest = spread([step_s(run) for run in repeats])
            x = index + 0.4 * (place - (len(groups) - 1) / 2)
            label = f"{cards} card{'s' * (cards > 1)} a node" if index == 0 else None
            axes.bar(x, middle, 0.38, color=CARD_COLOURS.get(int(cards), OTHER), label=label)
            axes.errorbar(x, middle, [[middle - least], [largest - middle]], color="#555555", capsize=3)
            if place == 0:
                names.append(short(strategy))
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="seconds of a step", ylim=(0, None))
    axes.set_title("bert (tiny) on two nodes of four workers, cards of 200 Mbit/s", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
