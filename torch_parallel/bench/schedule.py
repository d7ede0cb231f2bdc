"""What scheduling gains: a step of equal layers over an emulated link, under each arm, beside what could be gained.

    python -m torch_parallel bench schedule                                    exchange as long as forward and backward
    python -m torch_parallel bench schedule --ratio 0.5 1 2                    half as long, as long, twice as long
    python -m torch_parallel bench schedule --strategy param_server

A layer's forward and backward only last, so that a machine with few processors measures the schedule and not itself;
exchange and update are real, over links whose rate makes the exchange as long as is asked for. The arms take turns in
one run. Beside them stands the best that a schedule could do for the same layers and link: one that is interrupted at
any moment, for what the next forward needs first (`ideal_step_s`).
"""

from __future__ import annotations

import math
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from torch_parallel.bench.common import recorded, save
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import launch
from torch_parallel.results import RunFolder
from torch_parallel.strategies import FROM_SCRATCH, FromScratch
from torch_parallel.topology import Topology
from torch_parallel.usage import ConfigError, OneLineParser

PLAIN = "plain"
LATENCY_S = 50e-6


def arms(partition_mb: float, credit_mb: float) -> dict[str, dict[str, Any]]:
    """Options of the strategy, by name. Without a partition each layer is exchanged as one."""
    cut = {"partition_mb": partition_mb, "credit_mb": credit_mb}
    crossing = {"cross_barrier": True}
    return {
        PLAIN: {},
        "overlap": {"schedule": "fifo"},
        "partition": {"schedule": "fifo", **cut, **crossing},
        "priority": {"schedule": "priority", **crossing},
        "priority and partition": {"schedule": "priority", **cut, **crossing},
    }


class _Lasts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0].clone(), None, None


class Layer(nn.Module):
    """One parameter, [numel], whose gradient is there when its backward has lasted."""

    def __init__(self, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        lasted: Tensor = _Lasts.apply(x + self.weight[:1], self.forward_s, self.backward_s)
        return lasted


def bench_schedule(arguments: list[str]) -> None:
    """Raises ConfigError."""
    options = _parse(arguments)
    rows: list[dict[str, Any]] = []
    for ratio in options.ratio:
        rows += _at_ratio(options, ratio)
    folder = RunFolder(options.results_dir, f"bench_schedule_{options.strategy}_n{options.n_gpus}")
    with recorded(folder, options.n_gpus, kind="emulated"):
        save(folder, rows)


def _at_ratio(options: Namespace, ratio: float) -> list[dict[str, Any]]:
    layers, numel = options.layers, round(options.layer_mb * 2**18)
    exchange_s = ratio * layers * (options.forward_ms + options.backward_ms) / 1e3
    servers = FROM_SCRATCH[options.strategy].server_count
    crossing = 4 * numel * layers * _share(options.n_gpus, servers)
    links = Topology.at(range(options.n_gpus), 1, crossing / exchange_s, LATENCY_S)
    seconds = launch(
        partial(time_arms, options=options),
        options.n_gpus,
        server_count=servers,
        links=links,
        threads=1,
    )[servers]
    (forward_s, backward_s), by_arm = seconds
    medians = {name: statistics.median(each) for name, each in by_arm.items()}
    # of a server both directions, one after the other, where nothing overlaps
    alone_s = (medians[PLAIN] - forward_s - backward_s) / (2 if servers else 1)
    overlapped = overlapped_step_s(forward_s, backward_s, alone_s, layers)
    ideal = ideal_step_s(forward_s, backward_s, alone_s, layers)
    print(f"\n{options.strategy}, {options.n_gpus} processes, {layers} layers of {options.layer_mb:g} MiB, emulated")
    print(f"forward {_ms(forward_s)}, backward {_ms(backward_s)}, exchange alone {_ms(alone_s)} (measured)")
    print(f"{'arm':<26}{'a step':>11}{'x plain':>9}   part of what an ideal schedule gains over plain, over overlap")
    rows = []
    for name, each in by_arm.items():
        step_s = medians[name]
        over_plain = (medians[PLAIN] - step_s) / (medians[PLAIN] - ideal)
        over_overlap = (medians["overlap"] - step_s) / (medians["overlap"] - ideal)
        rows.append(
            {
                "strategy": options.strategy,
                "n": options.n_gpus,
                "layers": layers,
                "layer_mb": options.layer_mb,
                "partition_mb": options.partition_mb,
                "credit_mb": options.credit_mb,
                "ratio": ratio,
                "forward_s": round(forward_s, 6),
                "backward_s": round(backward_s, 6),
                "exchange_s": round(alone_s, 6),
                "arm": name,
                "step_s": round(step_s, 6),
                "fastest_s": round(min(each), 6),
                "slowest_s": round(max(each), 6),
                "ideal_s": round(ideal, 6),
                "ideal_overlap_s": round(overlapped, 6),
                "part_of_gain": round(over_plain, 4),
                "part_of_gain_over_overlap": round(over_overlap, 4),
            }
        )
        parts = f"{over_plain:8.0%}" + (f"{over_overlap:12.0%}" if name not in (PLAIN, "overlap") else "")
        print(f"{name:<26}{_ms(step_s):>11}{medians[PLAIN] / step_s:9.2f}   {parts}")
    print(f"{'ideal':<26}{_ms(ideal):>11}{medians[PLAIN] / ideal:9.2f}")
    return rows


def time_arms(communicator: Communicator, options: Namespace) -> tuple[tuple[float, float], dict[str, list[float]]]:
    """The worker function: seconds of forward and backward alone, and of a step under each arm, by repeat."""
    lasting = options.forward_ms / 1e3, options.backward_ms / 1e3
    numel = round(options.layer_mb * 2**18)
    sides: dict[str, tuple[nn.Module, FromScratch]] = {}
    for name, chosen in arms(options.partition_mb, options.credit_mb).items():
        model = nn.Sequential(*(Layer(numel, *lasting) for _ in range(options.layers)))
        strategy = FROM_SCRATCH[options.strategy](
            model,
            lambda named: SGD([parameter for _, parameter in named], lr=0.1, fused=True),
            communicator,
            bucket_bytes=4 * numel,
            **chosen,
        )
        sides[name] = model, strategy
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    compute = _compute_s(sides[PLAIN][0]) if communicator.worker_index is not None else (0.0, 0.0)
    for repeat in range(-1, options.repeats):
        order = list(sides)
        for name in order if repeat % 2 else order[::-1]:
            communicator.barrier()
            step_s = _steps_s(communicator, *sides[name], options.steps)
            if repeat >= 0:
                seconds[name].append(step_s)
    for _, strategy in sides.values():
        strategy.close()
    return compute, seconds


def _steps_s(communicator: Communicator, model: nn.Module, strategy: FromScratch, count: int) -> float:
    """Of a step, the first one left out: of `count`, without a stop between them."""
    start_s = 0.0
    for number in range(count + 1):
        if number == 1:
            start_s = time.perf_counter()
        strategy.begin_step()
        if communicator.worker_index is not None:
            with strategy.synchronising(last=True):
                model(torch.zeros(1, requires_grad=True)).sum().backward()
        strategy.step()
    took_s = time.perf_counter() - start_s
    strategy.confirm()
    return took_s / count


def _compute_s(model: nn.Module, times: int = 5) -> tuple[float, float]:
    """Medians of forward and of backward, which last longer than they are told: a sleep is not exact."""
    forward, backward = [], []
    for _ in range(times):
        start_s = time.perf_counter()
        loss = model(torch.zeros(1, requires_grad=True)).sum()
        between_s = time.perf_counter()
        torch.autograd.grad(loss, list(model.parameters()))
        forward.append(between_s - start_s)
        backward.append(time.perf_counter() - between_s)
    return statistics.median(forward), statistics.median(backward)


def ideal_step_s(forward_s: float, backward_s: float, exchange_s: float, layers: int) -> float:
    """Seconds of a step, in the long run, if the exchange of a layer is interrupted at once for one needed sooner.

    Worked out from one event to the next: a layer's forward waits for its own exchange of the step before, and the link
    works on the lowest layer whose backward is over.
    """
    forward, backward, exchange = forward_s / layers, backward_s / layers, exchange_s / layers
    left = [0.0] * layers  # seconds of the link that each layer still needs
    now, ends = 0.0, []
    for _ in range(20):
        work = [(layer, forward) for layer in range(layers)] + [(layer, -backward) for layer in reversed(range(layers))]
        for layer, seconds in work:
            if seconds > 0:  # its own exchange first, with all that overtakes it
                now += sum(left[: layer + 1])
                left[: layer + 1] = [0.0] * (layer + 1)
            now += abs(seconds)
            _exchange(left, abs(seconds))
            if seconds < 0:
                left[layer] = exchange
        ends.append(now)
    return ends[-1] - ends[-2]


def _exchange(left: list[float], seconds: float) -> None:
    """The link works for so long, on the lowest layer first."""
    for layer, needed in enumerate(left):
        done = min(needed, seconds)
        left[layer] -= done
        seconds -= done


def overlapped_step_s(forward_s: float, backward_s: float, exchange_s: float, layers: int) -> float:
    """Seconds of a step whose exchange runs beside backward alone, in the order of backward."""
    backward, exchange = backward_s / layers, exchange_s / layers
    free_s = 0.0
    for layer in range(layers):
        free_s = max(free_s, (layer + 1) * backward) + exchange
    return forward_s + free_s


def _share(n: int, servers: int) -> float:
    """Bytes that cross the busiest card in one direction, in parts of the gradients: of a ring, or of a server."""
    return float(n - servers) if servers else 2 * (n - 1) / n


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = OneLineParser(prog="python -m torch_parallel bench schedule", allow_abbrev=False)
    names = [name for name, strategy in FROM_SCRATCH.items() if "schedule" in strategy.options]
    parser.add_argument("--strategy", default="ring_all_reduce", choices=names, metavar="NAME", help="what exchanges")
    parser.add_argument("--n_gpus", type=int, help="processes, a server among them (default: 2 workers)")
    help = "seconds of the exchange alone, in parts of those of forward and backward; one or more (default: 1)"
    parser.add_argument("--ratio", type=float, nargs="+", default=[1.0], help=help)
    parser.add_argument("--layers", type=int, default=8, help="default: 8")
    parser.add_argument("--layer_mb", type=float, default=1.0, help="MiB of each layer's gradient (default: 1)")
    parser.add_argument("--forward_ms", type=float, default=80.0, help="of all layers together (default: 80)")
    parser.add_argument("--backward_ms", type=float, default=160.0, help="of all layers together (default: 160)")
    parser.add_argument("--partition_mb", type=float, default=0.0625, help="of the arms that cut (default: 0.0625)")
    parser.add_argument("--credit_mb", type=float, default=0.25, help="of the arms that cut (default: 0.25)")
    parser.add_argument("--steps", type=int, default=5, help="of each arm in a repeat (default: 5)")
    parser.add_argument("--repeats", type=int, default=5, help="of each arm, in turns (default: 5)")
    parser.add_argument("--results_dir", default="results/runs", help="folder for a folder with the figures")
    options = parser.parse_args(arguments)
    servers = FROM_SCRATCH[options.strategy].server_count
    options.n_gpus = 2 + servers if options.n_gpus is None else options.n_gpus
    if options.n_gpus < 2 + servers:
        raise ConfigError(f"--n_gpus {options.n_gpus}: at least {2 + servers} are needed to exchange anything")
    for name in ("layer_mb", "forward_ms", "backward_ms", "partition_mb", "credit_mb"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"--{name} {value:g}: it must be > 0")
    for name in ("layers", "steps", "repeats"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: at least 1 is needed")
    if not all(0 < ratio < math.inf for ratio in options.ratio):
        raise ConfigError(f"--ratio {' '.join(map(str, options.ratio))}: each must be > 0")
    options.forward_ms, options.backward_ms = (
        options.forward_ms / options.layers,
        options.backward_ms / options.layers,
    )
    return options
