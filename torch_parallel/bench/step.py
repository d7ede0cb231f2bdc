"""Training steps of our strategies beside DistributedDataParallel's, and the memory of both.

Each strategy takes turns with DistributedDataParallel in the same processes: the same model, samples and fused
optimizer, some steps at a time. `--n_gpus` counts workers; a strategy's server is one process more, which idles in its
peer's turns. Memory cannot be told apart in one process, so each side's is measured in a run of its own: the Pss of all
its workers and servers at rest after a step (what several processes share is counted once).
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from torch_parallel.bench.common import recorded, save, start_gloo
from torch_parallel.communicator import Communicator
from torch_parallel.devices import threads_per_worker
from torch_parallel.gradients.buckets import NamedParameters
from torch_parallel.launcher import launch
from torch_parallel.results import RunFolder
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.strategies.builtin import at_its_best
from torch_parallel.strategies.shares import shard
from torch_parallel.training.config import ConfigError, OneLineParser
from torch_parallel.training.optimizers import DEFAULT_LR, OPTIMIZERS, make_optimizer

FEATURES, CLASSES = 784, 10
DEFAULT_STRATEGIES = ("sharded_param_server", "ring_all_reduce")
DDP = "ddp"


@dataclass(frozen=True)
class Setting:
    """What both sides train."""

    parameters: int
    batch_size: int  # of all workers together
    optimizer: str

    def make_model(self) -> nn.Module:
        """A multi-layer perceptron of about that many parameters, three quarters of them in its two square layers."""
        # 2 h^2 + (FEATURES + CLASSES + 3) h parameters
        linear = FEATURES + CLASSES + 3
        width = max(1, round((math.sqrt(linear**2 + 8 * self.parameters) - linear) / 4))
        sizes = (FEATURES, width, width, width, CLASSES)
        layers = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]
        return nn.Sequential(*(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1])

    def make_optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        return make_optimizer(parameters, self.optimizer, DEFAULT_LR[self.optimizer], momentum=0.9, weight_decay=0.0)

    def samples(self, communicator: Communicator) -> tuple[Tensor, Tensor]:
        """This worker's of the batch that every step takes; none on a server."""
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.batch_size, FEATURES, generator=generator)
        targets = torch.randint(0, CLASSES, (self.batch_size,), generator=generator)
        mine = shard(self.batch_size, communicator.worker_index, communicator.worker_count)
        return inputs[mine], targets[mine]


class OurSide:
    """One of our strategies in the plainest loop."""

    def __init__(self, communicator: Communicator, setting: Setting, name: str) -> None:
        torch.manual_seed(0)
        self.model = setting.make_model()
        self.inputs, self.targets = setting.samples(communicator)
        self.batch_size = setting.batch_size
        self.strategy = FROM_SCRATCH[name](self.model, setting.make_optimizer, communicator)

    def step(self) -> None:
        self.strategy.begin_step()
        if len(self.targets):
            loss = cross_entropy(self.model(self.inputs), self.targets, reduction="sum") / self.batch_size
            loss.backward()
        self.strategy.step()


class DdpSide:
    """DistributedDataParallel at its best settings, likewise; on a server, nothing."""

    def __init__(self, communicator: Communicator, setting: Setting) -> None:
        torch.manual_seed(0)
        self.inputs, self.targets = setting.samples(communicator)
        self.factor = communicator.worker_count / setting.batch_size  # it takes the mean over the workers
        self.ddp: DistributedDataParallel | None = None
        if not communicator.is_server:
            self.model = setting.make_model()
            self.ddp = at_its_best(self.model)
            self.optimizer = setting.make_optimizer(list(self.model.named_parameters()))

    def step(self) -> None:
        if self.ddp is None:
            return
        self.optimizer.zero_grad()
        loss = cross_entropy(self.ddp(self.inputs), self.targets, reduction="sum") * self.factor
        loss.backward()
        self.optimizer.step()


def time_steps(
    communicator: Communicator, setting: Setting, name: str, steps: int, repeats: int, store: str
) -> tuple[dict[str, list[float]], float]:
    """The worker function: seconds of a step by side and repeat, and how far the sides' parameters lie apart."""
    start_gloo(communicator, store)
    ours, theirs = OurSide(communicator, setting, name), DdpSide(communicator, setting)
    sides: dict[str, Callable[[], None]] = {name: ours.step, DDP: theirs.step}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(-1, repeats):  # the first turn of each warms up
        for side, step in sides.items() if repeat % 2 else reversed(sides.items()):
            step()  # the caches hold the other side's
            communicator.barrier()
            start_s = time.perf_counter()
            for _ in range(steps):
                step()
            communicator.barrier()
            if repeat >= 0:
                seconds[side].append((time.perf_counter() - start_s) / steps)
    difference = 0.0
    if theirs.ddp is not None:
        dist.destroy_process_group()
        difference = _difference(ours.model, theirs.model)
    slowest = communicator.all_ranks(torch.tensor(list(seconds.values()), dtype=torch.float64)).amax(0)
    worst = communicator.all_ranks(torch.tensor(difference, dtype=torch.float64)).amax().item()
    return dict(zip(seconds, slowest.tolist(), strict=True)), worst


def _difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest over the tensors, as a part of the tensor's norm."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    with torch.no_grad():
        return max(float((our - their).norm() / their.norm()) for our, their in pairs)


def measure_memory(communicator: Communicator, setting: Setting, name: str, steps: int, store: str) -> int | None:
    """The worker function: bytes of memory of all ranks together after some steps; None where it cannot be told."""
    side: OurSide | DdpSide
    if name == DDP:
        start_gloo(communicator, store)
        side = DdpSide(communicator, setting)
    else:
        side = OurSide(communicator, setting, name)
    for _ in range(steps):
        side.step()
    communicator.barrier()
    total = communicator.all_ranks(torch.tensor(_pss_bytes())).sum().item()
    if name == DDP:
        dist.destroy_process_group()
    return int(total) or None


def _pss_bytes() -> int:
    """What this process has in memory, pages of several processes divided among them; 0 where it cannot be told."""
    path = Path("/proc/self/smaps_rollup")
    if not path.exists():
        return 0
    return next(1024 * int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("Pss:"))


def bench_step(arguments: list[str]) -> None:
    options = _parse(arguments)
    setting = Setting(round(options.parameters_m * 1e6), options.batch_size, options.optimizer)
    size = sum(parameter.numel() for parameter in setting.make_model().parameters())
    print(f"{size:,} parameters, {options.n_gpus} workers, global batch {options.batch_size}, {setting.optimizer}")
    folder = RunFolder(options.results_dir, f"bench_step_n{options.n_gpus}")
    entries = {"parameters": size, "batch_size": options.batch_size, "optimizer": setting.optimizer}
    with recorded(folder, n=options.n_gpus, **entries), tempfile.TemporaryDirectory() as temporary:
        stores = (f"{temporary}/store{index}" for index in range(1 + len(options.strategy)))
        ddp_memory = _launch(measure_memory, options.n_gpus, 0, setting, DDP, 5, next(stores))
        rows = []
        for name in options.strategy:
            servers = FROM_SCRATCH[name].server_count
            memory = _launch(measure_memory, options.n_gpus, servers, setting, name, 5, "")
            turns = (setting, name, options.steps, options.repeats, next(stores))
            seconds, difference = _launch(time_steps, options.n_gpus, servers, *turns)
            rows += _rows(name, seconds, memory, ddp_memory, difference)
    for row in rows:
        print(_line(row))
    save(folder, [{"n": options.n_gpus, **entries, **row} for row in rows])


def _parse(arguments: list[str]) -> Any:
    parser = OneLineParser(prog="python -m torch_parallel bench step", allow_abbrev=False)
    parser.add_argument(
        "--strategy",
        nargs="+",
        default=DEFAULT_STRATEGIES,
        choices=tuple(FROM_SCRATCH),
        help=f"strategies, each beside ddp (default: {' '.join(DEFAULT_STRATEGIES)})",
    )
    parser.add_argument("--n_gpus", type=int, default=2, help="workers (default: 2)")
    parser.add_argument("--parameters_m", type=float, default=25, help="millions of parameters (default: 25)")
    parser.add_argument("--batch_size", type=int, default=16, help="global (default: 16)")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="fused (default: sgd)")
    parser.add_argument("--steps", type=int, default=10, help="of each side in a turn (default: 10)")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each side, one more warms up (default: 9)")
    parser.add_argument("--results_dir", default="results/runs", help="folder for a folder with the figures")
    options = parser.parse_args(arguments)
    for name in ("n_gpus", "steps", "repeats"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: it must be at least 1")
    if options.batch_size < options.n_gpus:
        raise ConfigError(f"--batch_size {options.batch_size}: each of the {options.n_gpus} workers needs a sample")
    if not 0 < options.parameters_m < math.inf:
        raise ConfigError(f"--parameters_m {options.parameters_m}: it must be finite and > 0")
    return options


def _launch(worker_function: Callable[..., Any], workers: int, servers: int, *arguments: Any) -> Any:
    """What the first rank returns. Workers have the same threads on both sides, whether there is a server or not."""
    n, threads = workers + servers, threads_per_worker(workers)
    return launch(worker_function, n, *arguments, server_count=servers, threads=threads, deadline_s=120)[0]


def _rows(
    name: str, seconds: dict[str, list[float]], memory: int | None, ddp_memory: int | None, difference: float
) -> list[dict[str, Any]]:
    """One for the strategy, one for DistributedDataParallel beside it."""
    ddp_s = statistics.median(seconds[DDP])
    rows = []
    for side, times in seconds.items():
        pss = ddp_memory if side == DDP else memory
        lower, median_s, upper = statistics.quantiles(times, n=4) if len(times) > 1 else 3 * times
        rows.append(
            {
                "side": side,
                "beside": DDP if side == name else name,
                "median_s": round(median_s, 6),
                "lower_quartile_s": round(lower, 6),
                "upper_quartile_s": round(upper, 6),
                "steps_per_s": round(1 / median_s, 3),
                "times_faster_than_ddp": round(ddp_s / median_s, 3),
                "pss_bytes": pss,
                "part_of_ddps_memory": round(pss / ddp_memory, 3) if pss and ddp_memory else None,
                "difference_of_parameters": difference,
                "all_s": times,
            }
        )
    return rows


def _line(row: dict[str, Any]) -> str:
    memory = f"{row['pss_bytes'] / 2**20:9,.0f} MiB ({row['part_of_ddps_memory']:.2f})" if row["pss_bytes"] else ""
    return (
        f"{row['side']:22}{row['steps_per_s']:8.2f} steps/s ({row['times_faster_than_ddp']:.2f} x ddp; quartiles "
        f"{1000 * row['lower_quartile_s']:.1f} {1000 * row['median_s']:.1f} {1000 * row['upper_quartile_s']:.1f} ms)"
        f"{memory}"
    )
