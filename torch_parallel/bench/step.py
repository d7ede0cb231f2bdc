"""Training steps of our strategies beside DistributedDataParallel's, and the memory of both.

Each strategy takes turns with DistributedDataParallel in the same processes: the same model, samples and fused
optimizer, some steps at a time. `--n_gpus` counts workers; a strategy's server is one process more, which idles in its
peer's turns. Before and after, one process is timed alone: the fullest worker with its samples, while the others wait.
It is not between the sides, or one of them would more often follow an idle worker. A side's efficiency is the median of
all that was timed alone over its own.

With `--apart` processes are started for every turn of a side, which ends them: nobody has what the other one left in
caches, allocators and streams, and nobody pays for it. The row's `way` says which of the two it was.

Memory cannot be told apart in one process, so each side's is measured in a run of its own, after a few steps: the Pss
of all workers and servers (what several processes share is counted once), or of GPUs, which keep what they once needed,
all that is not free on the fullest one.

A row also has the samples of a second, of texts the tokens too, and on GPUs whose peak is known (`cards.py`) how much
of it the operations of the model are (`workloads/flops.py`). Its verdict is "faster" or "slower" than ddp where the
quartiles of the two do not overlap and the medians are more than CLOSE apart, else "level".

Each strategy that can, if there are several buckets, is also told to exchange during backward. On GPUs torch's profiler
looks at a few steps of every side that runs in turns (`gpu_profile.py`).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from torch_parallel.bench import gpu_profile
from torch_parallel.bench.common import recorded, save, write_table
from torch_parallel.bench.gpu import versions
from torch_parallel.bench.setting import Setting
from torch_parallel.bench.sides import ALONE, DDP, OVERLAPPING
from torch_parallel.bench.step_options import parse, setting_of
from torch_parallel.bench.turns import count_flops, measure_memory, time_apart, time_ddp, time_steps
from torch_parallel.cards import card_names, utilisation
from torch_parallel.devices import threads_per_worker
from torch_parallel.gradients.buckets import cut_into_buckets
from torch_parallel.launcher import launch
from torch_parallel.results import RunFolder
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.workloads.flops import arithmetic

IN_TURNS, APART = "in turns", "apart"
CLOSE = 0.01
"""Medians that are less apart, as a part of ddp's, are level."""


def bench_step(arguments: list[str]) -> None:
    options = parse(arguments)
    device = options.device
    setting = setting_of(options)
    with torch.device("meta"):
        model = setting.make_model()
        size = sum(parameter.numel() for parameter in model.parameters())
        bucket_count = len(cut_into_buckets(model.named_parameters(), setting.bucket_bytes))
    given = {name: value for name, value in asdict(setting).items() if value and name != "parameters"}
    told = ", ".join(name if value is True else f"{name} {value}" for name, value in given.items())
    print(f"{size:,} parameters, {options.n_gpus} workers on {device}; {told}")
    name = setting.model if setting.model_size is None else f"{setting.model}_{setting.model_size}"
    folder = RunFolder(options.results_dir, f"bench_step_{name}_n{options.n_gpus}")
    bench = _Bench(options, device, setting, arithmetic(model, setting.precision))
    chosen = asdict(bench.setting)
    entries = {"parameters": size, **{key: value for key, value in chosen.items() if key != "parameters"}}
    about = {"device": device, "ddp_step_s_by_bucket_mb": bench.ddp_s, "flops_of_step": bench.flops, "way": bench.way}
    with recorded(folder, n=options.n_gpus, **entries, **about, **(versions() if device == "cuda" else {})):
        for strategy in options.strategy:
            bench.compare(strategy)
            # one bucket has nothing to run beside
            if "overlap" in FROM_SCRATCH[strategy].options and bucket_count > 1:
                bench.compare(strategy + OVERLAPPING)
    rows = bench.rows()
    for row in rows:
        print(_line(row))
    if bench.work:
        write_table(folder.path / "gpu_work.csv", bench.work)
    save(folder, [{"n": options.n_gpus, **entries, **row} for row in rows])


@dataclass(frozen=True)
class _Timed:
    """A side in one comparison: seconds of a step by turn, of its own and of ddp, and what else is known of it."""

    side: str
    beside: str
    times: list[float]
    ddps: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    memory: int | None = None
    difference: float | None = None


def quartiles(times: list[float]) -> list[float]:
    """The lower one, the median and the upper one."""
    return statistics.quantiles(times, n=4) if len(times) > 1 else 3 * times


def verdict(ours: list[float], ddps: list[float]) -> str:
    """Whether our steps are "faster" or "slower" than ddp's, or "level": see the module's docstring."""
    (our_lower, our_s, our_upper), (lower, ddp_s, upper) = quartiles(ours), quartiles(ddps)
    if abs(our_s - ddp_s) <= CLOSE * ddp_s or (our_lower <= upper and lower <= our_upper):
        return "level"
    return "faster" if our_s < ddp_s else "slower"


def throughput(
    setting: Setting, workers: int, side: str, step_s: float, flops: int | None, cards: list[str], arithmetic: str
) -> dict[str, float | None]:
    """Of what this side is fed with: one process alone has the share of the fullest worker, and one card.

    `flops` are those of a step of all workers, computed in `arithmetic`; `cards` are the workers' GPUs.
    """
    samples, tokens = setting.batch_size, setting.tokens
    if side == ALONE:
        samples, cards = -(-samples // workers), cards[:1]
    of_side = None if flops is None else flops * samples / setting.batch_size
    part = utilisation(of_side, step_s, cards, arithmetic)
    return {
        "samples_per_s": round(samples / step_s, 3),
        "tokens_per_s": None if tokens is None else round(samples * tokens / step_s, 1),
        "model_flops_utilisation": None if part is None else round(part, 4),
    }


class _Bench:
    """Launches what has to be measured, and puts the rows together."""

    def __init__(self, options: Any, device: str, setting: Setting, arithmetic: str) -> None:
        self.options, self.device, self.arithmetic = options, device, arithmetic
        self.turns = (options.steps, options.repeats)
        self.way = APART if options.apart else IN_TURNS
        self.cards = card_names()[: options.n_gpus] if device == "cuda" else []
        self.work: list[dict[str, Any]] = []
        self.setting = setting
        self.ddp_s: dict[float, float] = {}
        """Seconds of DistributedDataParallel's step by the size of its buckets, where it had a choice."""
        if len(options.ddp_bucket_mb) > 1:
            self._choose_ddps_bucket()
        self.flops: int | None = launch(count_flops, 1, self.setting, deadline_s=300)[0]
        """Of a step of all workers together, where they can be counted."""
        self.ddp_memory: int | None = self._beside_ddp(measure_memory, 0, DDP, 5)
        self.alone: list[float] = []
        self.timed: list[_Timed] = []
        """All but the time of one process alone, which is known when all is timed."""

    def _choose_ddps_bucket(self) -> None:
        times = self._beside_ddp(time_ddp, 0, self.options.ddp_bucket_mb, *self.turns)
        self.ddp_s = {mb: statistics.median(seconds) for mb, seconds in times.items()}
        self.setting = replace(self.setting, ddp_bucket_mb=min(self.ddp_s, key=self.ddp_s.__getitem__))
        told = ", ".join(f"{1e3 * seconds:.1f} ms with {mb:g} MiB" for mb, seconds in self.ddp_s.items())
        print(f"ddp takes {told} in a bucket; beside ours it has {self.setting.ddp_bucket_mb:g}")

    def compare(self, name: str) -> None:
        servers = FROM_SCRATCH[name.removesuffix(OVERLAPPING)].server_count
        memory = {name: self._beside_ddp(measure_memory, servers, name, 5), DDP: self.ddp_memory}
        if self.options.apart:
            seconds, difference = self._apart(name, servers)
            work: dict[str, list[gpu_profile.Work]] = {}
        else:
            seconds, difference, work = self._beside_ddp(time_steps, servers, name, *self.turns)
        self.alone += seconds[ALONE]
        for side, beside in ((name, DDP), (DDP, name)):
            parts = gpu_profile.shares(work[side]) if work else {}
            self.timed.append(_Timed(side, beside, seconds[side], seconds[DDP], parts, memory[side], difference))
        self.work += [{"side": side, "beside": name, **each.row()} for side in work for each in work[side]]

    def _apart(self, name: str, servers: int) -> tuple[dict[str, list[float]], float]:
        """Seconds by side and launch, and how far the sides' parameters lie apart, which all launches would tell."""
        seconds: dict[str, list[float]] = {ALONE: [], name: [], DDP: []}
        differences = []
        with tempfile.TemporaryDirectory() as folder:
            for repeat in range(self.options.repeats):
                kept = f"{folder}/parameters" if repeat == 0 else ""
                for side in (name, DDP, ALONE) if repeat % 2 else (DDP, name, ALONE):
                    of_side = servers if side == name else 0
                    step_s, difference = self._beside_ddp(time_apart, of_side, side, self.options.steps, kept)
                    seconds[side].append(step_s)
                    differences += [] if difference is None else [difference]
        return seconds, differences[0]

    def rows(self) -> list[dict[str, Any]]:
        alone_s = statistics.median(self.alone)
        return [self._row(alone_s, timed) for timed in [_Timed(ALONE, ALONE, self.alone), *self.timed]]

    def _row(self, alone_s: float, timed: _Timed) -> dict[str, Any]:
        lower, median_s, upper = quartiles(timed.times)
        memory, parts = timed.memory, timed.parts
        ddp_s = statistics.median(timed.ddps) if timed.ddps else None
        shares = {part: parts.get(part) for part in gpu_profile.PARTS} if self.device == "cuda" else {}
        return {
            "side": timed.side,
            "beside": timed.beside,
            "median_s": round(median_s, 6),
            "lower_quartile_s": round(lower, 6),
            "upper_quartile_s": round(upper, 6),
            "steps_per_s": round(1 / median_s, 3),
            **throughput(
                self.setting, self.options.n_gpus, timed.side, median_s, self.flops, self.cards, self.arithmetic
            ),
            "times_faster_than_ddp": round(ddp_s / median_s, 3) if ddp_s else None,
            "verdict": verdict(timed.times, timed.ddps) if timed.side not in (ALONE, DDP) else None,
            "efficiency": round(alone_s / median_s, 3),
            "memory_bytes": memory,
            "part_of_ddps_memory": round(memory / self.ddp_memory, 3) if memory and self.ddp_memory else None,
            **{f"gpu_{part}": None if share is None else round(share, 3) for part, share in shares.items()},
            "difference_of_parameters": timed.difference,
            "way": self.way,
            "all_s": timed.times,
        }

    def _beside_ddp(self, worker_function: Callable[..., Any], servers: int, *arguments: Any) -> Any:
        """What the first worker returns. All workers of a bench have the same threads, with a server too."""
        with tempfile.TemporaryDirectory() as folder:
            return launch(
                worker_function,
                self.options.n_gpus + servers,
                self.setting,
                *arguments,
                f"{folder}/store",
                server_count=servers,
                threads=threads_per_worker(self.options.n_gpus),
                deadline_s=300,
                device=self.device,
            )[servers]


def _line(row: dict[str, Any]) -> str:
    beside = f"{row['times_faster_than_ddp']:.2f} x ddp; " if row["times_faster_than_ddp"] else ""
    if row["verdict"]:
        beside = f"{row['verdict']}, {beside}"
    of_row = (1000 * row[f"{which}_s"] for which in ("lower_quartile", "median", "upper_quartile"))
    memory = (
        f"{row['memory_bytes'] / 2**20:9,.0f} MiB ({row['part_of_ddps_memory']:.2f})" if row["memory_bytes"] else ""
    )
    busy = f"  GPU busy {100 * row['gpu_busy']:.0f} %" if row.get("gpu_busy") else ""
    part = row["model_flops_utilisation"]
    speed = f"{row['samples_per_s']:,.1f} samples/s"
    speed += f", {row['tokens_per_s']:,.0f} tokens/s" if row["tokens_per_s"] else ""
    speed += f", {100 * part:.1f} % of the peak" if part else ""
    return (
        f"{row['side']:32}{row['steps_per_s']:8.2f} steps/s ({beside}quartiles "
        f"{' '.join(f'{each:.1f}' for each in of_row)} ms)  {speed}  {100 * row['efficiency']:.0f} % of one process"
        f"{memory}{busy}"
    )
