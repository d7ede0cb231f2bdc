"""What a slow worker, a slow link, and another way of averaging do: figures and sentences from a folder of results.

The formulas beside the measurements, for n workers of which one takes s times as long as the others:

    everybody waits for everybody   1 / s of the speed
    nobody waits                    (n - 1 + 1/s) / n
    B backup workers, B >= 1        1: the slow one is not waited for
    jitter, exponential with mean m a step takes m H_n longer, with backup workers m (H_n - H_B)

Beside a measurement, drawn or printed, what else a step takes besides computing is added to both speeds, for it does
not grow with s. An epoch ends when the last share of it is done, so those that do not wait come out somewhat lower.
With bounded staleness the slack of some steps evens jitter out: between m and m H_n, no formula. H_k = 1 + 1/2 + ... +
1/k; the last formula is the mean of the largest of n exponentially distributed numbers, or of the largest but B (Renyi,
1953).
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from matplotlib.axes import Axes

from torch_parallel.analysis.figure import Figure, style
from torch_parallel.analysis.plots import points
from torch_parallel.analysis.runs import Run, accuracies, by_setting, held_equal, read_runs, select, spread
from torch_parallel.collectives import ALL_REDUCE, COLLECTIVES, Collective
from torch_parallel.collectives.cost import Rates, predicted_s
from torch_parallel.topology import Topology
from torch_parallel.units import parse_seconds

# ---- one slow worker, and jitter ----


def expected_speed(run: Run, times: float, rest: float = 0.0) -> float:
    """Of a run with one worker that computes `times` as long, as a part of that without it.

    `rest` is what a step takes besides computing, as a part of the computing.
    """
    slow = (1 + rest) / (times + rest)
    if run.strategy == "param_server_async":
        return (run.workers - 1 + slow) / run.workers
    return 1.0 if run.strategy == "param_server_backup" else slow


def rest_of(plain: list[Run]) -> float:
    """What a step without a slow worker takes besides computing, as a part of the computing."""
    compute_s = float(plain[0].options["compute_ms"]) / 1e3
    return max(0.0, statistics.median(step_s(run) for run in plain) / compute_s - 1)


def expected_jitter_s(run: Run, mean_s: float) -> float | None:
    """What exponential jitter of that mean adds to a step, or to an asynchronous worker's; None without a formula."""
    if run.strategy == "param_server_async":
        return mean_s
    if run.options.get("staleness"):
        return None
    waited_for_all_but = run.options.get("backup_workers", 0)
    return mean_s * (_harmonic(run.workers) - _harmonic(waited_for_all_but))


def _harmonic(count: int) -> float:
    return sum(1 / k for k in range(1, count + 1))


def slowed(runs: list[Run]) -> dict[str, dict[int, list[Run]]]:
    """Strategy -> how many times slower the slow worker is -> the runs."""
    with_one = [run for run in runs if "straggler" in run.options]
    return {
        strategy: {_times(value): of_value for value, of_value in by_setting(of_strategy, "straggler").items()}
        for strategy, of_strategy in by_setting(with_one, "strategy").items()
    }


def _times(straggler: str) -> int:
    """Of "3:4x"."""
    return int(straggler.partition(":")[2].removesuffix("x"))


def step_s(run: Run) -> float:
    """Seconds in which the workers together do one batch."""
    return run.epoch_s / -(-int(run.setting("train_size")) // int(run.setting("batch_size")))


def relative_speeds(by_times: dict[int, list[Run]]) -> dict[int, list[float]]:
    """Seed by seed, beside the run without a slow worker."""
    plain = {run.seed: run.epoch_s for run in by_times[1]}
    return {times: [plain[run.seed] / run.epoch_s for run in runs] for times, runs in by_times.items()}


def stragglers(folder: str | Path) -> Figure:
    """Left: speed beside that without a slow worker, by how slow it is. Right: what jitter adds to a step."""
    runs = read_runs(folder)
    held_equal(runs, but=("steps",), same=())
    figure = Figure(9.5, 4.2)
    left, right = figure.subplots(1, 2)
    _draw_slowed(left, slowed(runs))
    _draw_jitter(right, runs)
    return figure


def _draw_slowed(axes: Axes, groups: dict[str, dict[int, list[Run]]]) -> None:
    for strategy, by_times in groups.items():
        speeds = relative_speeds(by_times)
        points(axes, list(speeds), list(speeds.values()), strategy)
        expected = [expected_speed(of_times[0], times, rest_of(by_times[1])) for times, of_times in by_times.items()]
        axes.plot(list(by_times), expected, color=style(strategy)["color"], linestyle=":", zorder=0)
    every = next(iter(groups.values()))
    places, workers = list(every), every[1][0].workers
    axes.set(xscale="log", ylim=(0, 1.15), xlabel=f"one of {workers} workers is s times slower (dotted: the formula)")
    axes.set_ylabel("part of the speed left")
    axes.set_title("a slow worker, emulated", fontsize=10)
    axes.set_xticks(places, [f"{each}" for each in places])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=7, loc="lower left")


def _draw_jitter(axes: Axes, runs: list[Run]) -> None:
    groups = by_setting([run for run in runs if "jitter" in run.options], "strategy")
    title = f"jitter of {next(iter(groups.values()))[0].options['jitter']} on average, emulated"
    for row, (strategy, of_strategy) in enumerate(groups.items()):
        first = of_strategy[0]
        expected_s = expected_jitter_s(first, parse_seconds(first.options["jitter"]))
        _bar(axes, row, jitter_added_ms(of_strategy, runs), style(strategy)["color"], expected_s)
    _name_bars(axes, list(groups), "ms added to a step (dotted: the formula)", title)
    axes.invert_yaxis()


def _bar(axes: Axes, row: int, milliseconds: list[float], colour: str, expected_s: float | None) -> None:
    """A bar to the median, a whisker from the least to the largest, and a dotted line where it is expected."""
    middle, least, largest = spread(milliseconds)
    axes.barh(row, middle, 0.6, color=colour)
    axes.errorbar(middle, row, xerr=[[middle - least], [largest - middle]], color="#222222", capsize=3)
    if expected_s is not None:
        axes.plot([1e3 * expected_s] * 2, [row - 0.4, row + 0.4], color="#222222", linestyle=":", linewidth=1.6)


def _name_bars(axes: Axes, names: list[str], xlabel: str, title: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel=xlabel, xlim=(0, None))
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def jitter_added_ms(with_jitter: list[Run], runs: list[Run]) -> list[float]:
    """Seed by seed, over the same strategy's step without jitter and without a slow worker."""
    strategy = with_jitter[0].strategy
    plain = {run.seed: step_s(run) for run in slowed(runs)[strategy][1]}
    return [1e3 * (step_s(run) - plain[run.seed]) for run in with_jitter]


def stragglers_found(folder: str | Path) -> str:
    """Measured beside the formula, for each strategy."""
    runs = read_runs(folder)
    lines = []
    for strategy, by_times in slowed(runs).items():
        speeds = relative_speeds(by_times)
        told = [
            f"{times}x slower {statistics.median(speeds[times]):.2f} "
            f"(formula {expected_speed(of_times[0], times, rest_of(by_times[1])):.2f})"
            for times, of_times in by_times.items()
            if times > 1
        ]
        lines.append(f"{strategy}: speed left with one worker " + ", ".join(told))
    for strategy, of_strategy in by_setting([run for run in runs if "jitter" in run.options], "strategy").items():
        first = of_strategy[0]
        expected_s = expected_jitter_s(first, parse_seconds(first.options["jitter"]))
        formula = "no formula" if expected_s is None else f"formula {1e3 * expected_s:.1f}"
        measured = statistics.median(jitter_added_ms(of_strategy, runs))
        lines.append(f"{strategy}: jitter of {first.options['jitter']} adds {measured:.1f} ms ({formula})")
    return "\n".join(lines)


# ---- links ----


def collectives_of(strategy: str) -> list[Collective]:
    """What a step of it performs on its gradients, once a bucket, where memory is not shared."""
    if strategy == "param_server":
        return [COLLECTIVES["push"], COLLECTIVES["broadcast"]]
    if strategy == "sharded_param_server":
        return [COLLECTIVES["direct_reduce_scatter"], COLLECTIVES["direct_all_gather"]]
    return [COLLECTIVES[strategy.removesuffix("_all_reduce")]]


def added_by_links_s(linked: list[Run], runs: list[Run]) -> list[float]:
    """Seed by seed, what a step takes longer than the same strategy's over links that cost nothing."""
    plain = {(run.strategy, run.seed): step_s(run) for run in runs if "link" not in run.options}
    return [step_s(run) - plain[run.strategy, run.seed] for run in linked]


def _by_link(runs: list[Run]) -> dict[str, list[Run]]:
    return by_setting([run for run in runs if "link" in run.options], "link")


def expected_exchange_s(run: Run, nbytes: int) -> float | None:
    """From the schedules, alpha the latency and beta the link's; None where links differ or nobody waits for all."""
    links = Topology.of(run.n, run.options["link"], run.options["latency"], server_count=run.n - run.workers)
    if len(set(links.bytes_per_s)) > 1 or run.strategy.startswith("param_server_"):
        return None
    rates = Rates(links.latency_s, 1 / links.bytes_per_s[0], latency_is_on_the_way=True)
    expected_s = sum(predicted_s(each, run.n, nbytes, rates) for each in collectives_of(run.strategy))
    if run.strategy == "sharded_param_server":  # which parameters were used: a few bytes
        expected_s += predicted_s(ALL_REDUCE["one_shot"], run.n, 1, rates)
    return expected_s


def gradient_bytes(runs: list[Run]) -> float:
    """Of the buffer that a step exchanges: in the ring's first epoch rank 0 received 2(n - 1)/n of it in each step."""
    ring = select(runs, strategy="ring_all_reduce")[0]
    received = sum(json.loads(ring.setting("received_bytes")))
    return float(received / int(ring.setting("steps")) * ring.n / (2 * (ring.n - 1)))


def links(folder: str | Path) -> Figure:
    """What links add to a step where they are alike, and with one slower; bars are measured."""
    all_runs = read_runs(folder)
    nbytes, groups = round(gradient_bytes(all_runs)), _by_link(all_runs)
    figure = Figure(11.0, 4.2)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for (link, runs), axes in zip(groups.items(), panels, strict=True):
        held_equal(runs, but=("steps", "nodes"), same=())
        strategies = by_setting(runs, "strategy")
        for row, of_strategy in enumerate(strategies.values()):
            expected_s = expected_exchange_s(of_strategy[0], nbytes)
            added = [1e3 * added_s for added_s in added_by_links_s(of_strategy, all_runs)]
            _bar(axes, row, added, "#56B4E9", expected_s)
        title = f"emulated links of {link}, latency {runs[0].options['latency']}"
        _name_bars(axes, list(strategies), "ms that they add to a step (dotted: predicted)", title)
        axes.invert_yaxis()
    return figure


def links_found(folder: str | Path) -> str:
    """Measured and predicted for each strategy."""
    all_runs = read_runs(folder)
    nbytes = round(gradient_bytes(all_runs))
    lines = [
        f"{nbytes:,} bytes of gradients; ms that a step takes longer than over links that cost nothing;",
        "predicted where all links are alike and everybody waits for everybody",
    ]
    for link, runs in _by_link(all_runs).items():
        lines.append(f"links of {link}:")
        for strategy, of_strategy in by_setting(runs, "strategy").items():
            measured = 1e3 * statistics.median(added_by_links_s(of_strategy, all_runs))
            told = f"{measured:8.1f} ms"
            expected_s = expected_exchange_s(of_strategy[0], nbytes)
            if expected_s is not None:
                told += f"   predicted {1e3 * expected_s:8.1f} ms   {measured / 1e3 / expected_s:5.2f}"
            lines.append(f"  {strategy:28}{told}")
    return "\n".join(lines)


# ---- ways to average ----

WAYS = {
    ("weighted", False): "weighted by samples",
    ("mean", False): "mean of the workers' means",
    ("sum", False): "sum of the means",
    ("sum", True): "sum of the means, rate / 3",
}


def way(run: Run, rate: float) -> str:
    """How this run averages; `rate` is the usual learning rate."""
    return WAYS[run.options.get("aggregate", "weighted"), float(run.setting("lr")) != rate]


def by_way(folder: str | Path) -> dict[str, list[Run]]:
    """The runs of the experiment by how they average."""
    runs = read_runs(folder)
    held_equal(runs, but=("lr",))
    rate = max(float(run.setting("lr")) for run in runs)
    return {told: each for told in WAYS.values() if (each := [run for run in runs if way(run, rate) == told])}


def aggregation(folder: str | Path) -> Figure:
    """Accuracy after the last epoch: a point for each seed, a line at the median."""
    figure = Figure(8.0, 3.0)
    axes = figure.subplots()
    groups = by_way(folder)
    for row, runs in enumerate(groups.values()):
        values = accuracies(runs)
        axes.plot(values, [row] * len(values), "o", color="#0072B2", alpha=0.6)
        axes.plot([statistics.median(values)] * 2, [row - 0.3, row + 0.3], color="#222222")
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    first = next(iter(groups.values()))
    axes.set_xlabel("test accuracy (%): each seed, and the median")
    axes.set_title(
        f"{first[0].setting('model')}, batches of {first[0].setting('batch_size')} over {first[0].workers} workers, "
        f"{len(first)} seeds",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def aggregation_found(folder: str | Path) -> str:
    """How much of a difference the way makes, beside that of the seeds."""
    groups = by_way(folder)
    exact = accuracies(groups[WAYS["weighted", False]])
    lines = [f"{WAYS['weighted', False]}: {statistics.median(exact):.2f} % ({min(exact):.2f} to {max(exact):.2f})"]
    for told, runs in list(groups.items())[1:]:
        values = accuracies(runs)
        differences = [a - b for a, b in zip(values, exact, strict=True)]
        lines.append(
            f"{told}: {statistics.median(values):.2f} % ({min(values):.2f} to {max(values):.2f}); seed by seed "
            f"{min(differences):+.2f} to {max(differences):+.2f} points beside the exact mean"
        )
    return "\n".join(lines)
