"""Training steps of our strategies beside DistributedDataParallel's, and the memory of both.

Each strategy takes turns with DistributedDataParallel in the same processes: the same model, samples and fused
optimizer, some steps at a time. `--n_gpus` counts workers; a strategy's server is one process more, which idles in its
peer's turns. Before and after, one process is timed alone: the fullest worker with its samples, while the others wait.
It is not between the sides, or one of them would more often follow an idle worker. A side's efficiency is the median of
all that was timed alone over its own.

Memory cannot be told apart in one process, so each side's is measured in a run of its own, after a few steps: the Pss
of all workers and servers (what several processes share is counted once), or of GPUs, which keep what they once needed,
all that is not free on the fullest one.

Each strategy that can, if there are several buckets, is also told to exchange during backward. On GPUs torch's profiler
looks at a few steps of every side (`gpu_profile.py`).
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_parallel.bench import gpu_profile
from torch_parallel.bench.common import recorded, save, start_group, write_table
from torch_parallel.bench.gpu import versions
from torch_parallel.bench.sides import (
    ALONE,
    CLASSES,
    DDP,
    IMAGES,
    OVERLAPPING,
    DdpSide,
    OurSide,
    PlainSide,
    Setting,
    difference_of,
    make_side,
    memory_bytes,
)
from torch_parallel.communicator import Communicator
from torch_parallel.devices import choose_processes, threads_per_worker
from torch_parallel.gradients.buckets import cut_into_buckets
from torch_parallel.launcher import launch
from torch_parallel.results import RunFolder
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.training.compiling import check_compiler
from torch_parallel.training.config import (
    A_BUCKET,
    DEFAULT_BUCKET_MB,
    DEVICES,
    LARGEST_BUCKET_MB,
    PRECISIONS,
    ConfigError,
    OneLineParser,
)
from torch_parallel.training.optimizers import OPTIMIZERS
from torch_parallel.workloads import build_model

Side = TypeVar("Side")

DEFAULT_STRATEGIES = ("sharded_param_server", "ring_all_reduce")
PROFILED_STEPS = 3
LARGEST_SIDE = 4096


def time_steps(
    communicator: Communicator, setting: Setting, name: str, steps: int, repeats: int, store: str
) -> tuple[dict[str, list[float]], float, dict[str, list[gpu_profile.Work]]]:
    """The worker function: seconds of a step by side and repeat, those of one process alone among them, how far the
    sides' parameters lie apart, and what the GPU of this rank did in a few more steps."""
    start_group(communicator, store)
    alone = {ALONE: PlainSide(communicator, setting).step}
    before = _in_turns(communicator, alone, steps, -(-repeats // 2))
    ours, theirs = OurSide(communicator, setting, name), DdpSide(communicator, setting)
    sides: dict[str, Callable[[], None]] = {name: ours.step, DDP: theirs.step}
    seconds = _in_turns(communicator, sides, steps, repeats)
    after = _in_turns(communicator, alone, steps, repeats // 2)
    seconds[ALONE] = before[ALONE] + after[ALONE]
    difference = difference_of(ours.model, theirs.model) if not theirs.idle else 0.0
    work = {}
    if communicator.device.type == "cuda":
        for side, step in sides.items():
            _meet(communicator)
            work[side] = gpu_profile.profiled(step, PROFILED_STEPS)
    _meet(communicator)
    if not theirs.idle:
        dist.destroy_process_group()
    worst = communicator.all_ranks(torch.tensor(difference, dtype=torch.float64)).amax().item()
    return seconds, worst, work


def time_ddp(
    communicator: Communicator, setting: Setting, buckets_mb: list[float], steps: int, repeats: int, store: str
) -> dict[float, list[float]]:
    """The worker function: seconds of DistributedDataParallel's step by its bucket's size and repeat."""
    start_group(communicator, store)
    sides = {mb: DdpSide(communicator, replace(setting, ddp_bucket_mb=mb)).step for mb in buckets_mb}
    seconds = _in_turns(communicator, sides, steps, repeats)
    dist.destroy_process_group()
    return seconds


def _in_turns(
    communicator: Communicator, sides: dict[Side, Callable[[], None]], steps: int, repeats: int
) -> dict[Side, list[float]]:
    """Seconds of a step of each side, by repeat: the slowest rank's."""
    seconds: dict[Side, list[float]] = {side: [] for side in sides}
    for repeat in range(-1, repeats):  # the first turn of each warms up
        for side, step in sides.items() if repeat % 2 else reversed(sides.items()):
            torch.manual_seed((repeat + 2) * communicator.world_size + communicator.rank)  # the same dropout on all
            step()  # the caches hold the other side's
            _meet(communicator)
            start_s = time.perf_counter()
            for _ in range(steps):
                step()
            _meet(communicator)
            if repeat >= 0:
                seconds[side].append((time.perf_counter() - start_s) / steps)
    slowest = communicator.all_ranks(torch.tensor(list(seconds.values()), dtype=torch.float64)).amax(0)
    return dict(zip(seconds, slowest.tolist(), strict=True))


def _meet(communicator: Communicator) -> None:
    """Returns when all ranks have done all they had to do, their GPUs included."""
    if communicator.device.type == "cuda":
        torch.cuda.synchronize(communicator.device)
    communicator.barrier()


def measure_memory(communicator: Communicator, setting: Setting, name: str, steps: int, store: str) -> int | None:
    """The worker function: bytes after some steps, of all ranks together, or of the fullest GPU; None if unknown.

    On GPUs less what our transport has taken before, where it is not our side's.
    """
    on_gpu = communicator.device.type == "cuda"
    of_transport = torch.cuda.memory_reserved(communicator.device) if on_gpu and name == DDP else 0
    if name == DDP:
        start_group(communicator, store)
    side = make_side(communicator, setting, name)
    for _ in range(steps):
        side.step()
    _meet(communicator)
    of_ranks = communicator.all_ranks(torch.tensor(memory_bytes(communicator.device) - of_transport))
    if name == DDP and not communicator.is_server:
        dist.destroy_process_group()
    return int((of_ranks.amax() if on_gpu else of_ranks.sum()).item()) or None


def bench_step(arguments: list[str]) -> None:
    options = _parse(arguments)
    device = options.device
    setting = _setting(options, device)
    with torch.device("meta"):
        model = setting.make_model()
        size = sum(parameter.numel() for parameter in model.parameters())
        bucket_count = len(cut_into_buckets(model.named_parameters(), setting.bucket_bytes))
    given = {name: value for name, value in asdict(setting).items() if value and name != "parameters"}
    told = ", ".join(name if value is True else f"{name} {value}" for name, value in given.items())
    print(f"{size:,} parameters, {options.n_gpus} workers on {device}; {told}")
    folder = RunFolder(options.results_dir, f"bench_step_{setting.model}_n{options.n_gpus}")
    bench = _Bench(options, device, setting)
    chosen = asdict(bench.setting)
    entries = {"parameters": size, **{key: value for key, value in chosen.items() if key != "parameters"}}
    about = {"device": device, "ddp_step_s_by_bucket_mb": bench.ddp_s, **(versions() if device == "cuda" else {})}
    with recorded(folder, n=options.n_gpus, **entries, **about):
        for name in options.strategy:
            bench.compare(name)
            # one bucket has nothing to run beside
            if "overlap" in FROM_SCRATCH[name].options and bucket_count > 1:
                bench.compare(name + OVERLAPPING)
    rows = bench.rows()
    for row in rows:
        print(_line(row))
    if bench.work:
        write_table(folder.path / "gpu_work.csv", bench.work)
    save(folder, [{"n": options.n_gpus, **entries, **row} for row in rows])


class _Bench:
    """Launches what has to be measured, and puts the rows together."""

    def __init__(self, options: Any, device: str, setting: Setting) -> None:
        self.options, self.device = options, device
        self.turns = (options.steps, options.repeats)
        self.work: list[dict[str, Any]] = []
        self.setting = setting
        self.ddp_s: dict[float, float] = {}
        """Seconds of DistributedDataParallel's step by the size of its buckets, where it had a choice."""
        if len(options.ddp_bucket_mb) > 1:
            self._choose_ddps_bucket()
        self.ddp_memory: int | None = self._beside_ddp(measure_memory, 0, DDP, 5)
        self.alone: list[float] = []
        self.timed: list[tuple[Any, ...]] = []
        """What `_row` is made of, but for the time of one process alone, which is known when all is timed."""

    def _choose_ddps_bucket(self) -> None:
        times = self._beside_ddp(time_ddp, 0, self.options.ddp_bucket_mb, *self.turns)
        self.ddp_s = {mb: statistics.median(seconds) for mb, seconds in times.items()}
        self.setting = replace(self.setting, ddp_bucket_mb=min(self.ddp_s, key=self.ddp_s.__getitem__))
        told = ", ".join(f"{1e3 * seconds:.1f} ms with {mb:g} MiB" for mb, seconds in self.ddp_s.items())
        print(f"ddp takes {told} in a bucket; beside ours it has {self.setting.ddp_bucket_mb:g}")

    def compare(self, name: str) -> None:
        servers = FROM_SCRATCH[name.removesuffix(OVERLAPPING)].server_count
        memory = {name: self._beside_ddp(measure_memory, servers, name, 5), DDP: self.ddp_memory}
        seconds, difference, work = self._beside_ddp(time_steps, servers, name, *self.turns)
        self.alone += seconds[ALONE]
        ddp_s = statistics.median(seconds[DDP])
        for side, beside in ((name, DDP), (DDP, name)):
            parts = gpu_profile.shares(work[side]) if work else {}
            self.timed.append((side, beside, seconds[side], parts, ddp_s, memory[side], difference))
        self.work += [{"side": side, "beside": name, **each.row()} for side in work for each in work[side]]

    def rows(self) -> list[dict[str, Any]]:
        alone_s = statistics.median(self.alone)
        return [self._row(alone_s, *timed) for timed in [(ALONE, ALONE, self.alone, {}), *self.timed]]

    def _row(
        self,
        alone_s: float,
        side: str,
        beside: str,
        times: list[float],
        parts: dict[str, float],
        ddp_s: float | None = None,
        memory: int | None = None,
        difference: float | None = None,
    ) -> dict[str, Any]:
        lower, median_s, upper = statistics.quantiles(times, n=4) if len(times) > 1 else 3 * times
        shares = {part: parts.get(part) for part in gpu_profile.PARTS} if self.device == "cuda" else {}
        return {
            "side": side,
            "beside": beside,
            "median_s": round(median_s, 6),
            "lower_quartile_s": round(lower, 6),
            "upper_quartile_s": round(upper, 6),
            "steps_per_s": round(1 / median_s, 3),
            "times_faster_than_ddp": round(ddp_s / median_s, 3) if ddp_s else None,
            "efficiency": round(alone_s / median_s, 3),
            "memory_bytes": memory,
            "part_of_ddps_memory": round(memory / self.ddp_memory, 3) if memory and self.ddp_memory else None,
            **{f"gpu_{part}": None if share is None else round(share, 3) for part, share in shares.items()},
            "difference_of_parameters": difference,
            "all_s": times,
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


def _setting(options: Any, device: str) -> Setting:
    return Setting(
        round(options.parameters_m * 1e6),
        options.batch_size,
        options.optimizer,
        model=options.model,
        image_side=options.image_side,
        precision=options.precision,
        compile=options.compile,
        bucket_mb=options.bucket_mb or DEFAULT_BUCKET_MB[device],
        ddp_bucket_mb=options.ddp_bucket_mb[0],
    )


def _parse(arguments: list[str]) -> Any:
    parser = OneLineParser(prog="python -m torch_parallel bench step", allow_abbrev=False)
    parser.add_argument(
        "--strategy",
        nargs="+",
        default=DEFAULT_STRATEGIES,
        choices=tuple(FROM_SCRATCH),
        help=f"strategies, each beside ddp (default: {' '.join(DEFAULT_STRATEGIES)})",
    )
    parser.add_argument("--n_gpus", type=int, help="workers (default: all GPUs, or 2 on the CPU)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where they train (default: auto)")
    parser.add_argument("--model", choices=("mlp", *IMAGES), default="mlp", help="model (default: mlp)")
    parser.add_argument("--parameters_m", type=float, default=25, help="millions of parameters of mlp (default: 25)")
    parser.add_argument("--image_side", type=int, help="pixels (default: 28 for cnn, 224 for the others)")
    parser.add_argument("--batch_size", type=int, default=16, help="global (default: 16)")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="fused (default: sgd)")
    parser.add_argument("--precision", choices=PRECISIONS, default="full", help="bf16: autocast (default: full)")
    parser.add_argument("--compile", action="store_true", help="each layer by torch.compile, on both sides")
    usual = ", ".join(f"{mb:g} on {device}" for device, mb in DEFAULT_BUCKET_MB.items())
    parser.add_argument("--bucket_mb", type=float, help=f"MiB in a bucket of ours (default: {usual})")
    parser.add_argument(
        "--ddp_bucket_mb",
        type=float,
        nargs="+",
        default=[25.0],
        help="and of ddp's; of several it gets what it is fastest with (default: 25, torch's own)",
    )
    parser.add_argument("--steps", type=int, default=10, help="of each side in a turn (default: 10)")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each side, one more warms up (default: 9)")
    parser.add_argument("--results_dir", default="results/runs", help="folder for a folder with the figures")
    options = parser.parse_args(arguments)
    for name in ("n_gpus", "steps", "repeats"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: it must be at least 1")
    options.n_gpus, options.device, line = choose_processes(options.n_gpus, options.device)
    if line is not None:
        print(line)
    if options.batch_size < options.n_gpus:
        raise ConfigError(f"--batch_size {options.batch_size}: each of the {options.n_gpus} workers needs a sample")
    if not 0 < options.parameters_m < math.inf:
        raise ConfigError(f"--parameters_m {options.parameters_m}: it must be finite and > 0")
    for name, value in [("bucket_mb", options.bucket_mb), *(("ddp_bucket_mb", each) for each in options.ddp_bucket_mb)]:
        if value is not None and not 0 < value <= LARGEST_BUCKET_MB:
            raise ConfigError(f"--{name} {value}: {A_BUCKET}")
    if options.image_side is not None:
        _check_image_side(options.model, options.image_side)
    if options.compile:
        check_compiler(options.device)
    return options


def _check_image_side(model: str, side: int) -> None:
    """Raises ConfigError where the model cannot be made for such images, or cannot be fed with one."""
    if model == "mlp":
        raise ConfigError(f"--image_side {side}: mlp is fed with no images; leave it out, or take another --model")
    if side > LARGEST_SIDE:
        raise ConfigError(f"--image_side {side}: at most {LARGEST_SIDE} pixels are taken")
    try:
        shape = (IMAGES[model][0], side, side)
        with torch.device("meta"):
            build_model(model, shape, CLASSES).eval()(torch.empty(1, *shape))
    except (RuntimeError, ValueError, AssertionError, ArithmeticError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"--image_side {side}: {model} cannot take such images ({why}); leave it out") from None


def _line(row: dict[str, Any]) -> str:
    beside = f"{row['times_faster_than_ddp']:.2f} x ddp; " if row["times_faster_than_ddp"] else ""
    quartiles = (1000 * row[f"{which}_s"] for which in ("lower_quartile", "median", "upper_quartile"))
    memory = (
        f"{row['memory_bytes'] / 2**20:9,.0f} MiB ({row['part_of_ddps_memory']:.2f})" if row["memory_bytes"] else ""
    )
    busy = f"  GPU busy {100 * row['gpu_busy']:.0f} %" if row.get("gpu_busy") else ""
    return (
        f"{row['side']:32}{row['steps_per_s']:8.2f} steps/s ({beside}quartiles "
        f"{' '.join(f'{each:.1f}' for each in quartiles)} ms)  {100 * row['efficiency']:.0f} % of one process"
        f"{memory}{busy}"
    )
