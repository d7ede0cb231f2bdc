"""Latency and bandwidth from timings, and how well they predict timings that they were not made from.

In shared memory one alpha, beta and gamma cannot serve all sizes: what fits into the caches moves faster. So beta and
gamma are fitted at a few sizes of the working set, which is all memory of all ranks that the collective uses, and in
between they follow a straight line over the logarithm of the size (as in the parameterized LogP model of Kielmann, Bal
and Verstoep, "Bandwidth-efficient collective communication for clustered wide area systems", 2000).
Fitted are the logarithms of the ratios of predicted to measured, so that the small count as much as the large.

Fitted on the fewest ranks and every other size; all else is predicted: the sizes between, and the other numbers of
ranks, with as many processors as there are.

Only the sum of beta and gamma is well determined: what an algorithm copies and what it adds grow together, so one of
the two may take over a part of the other, and neither is to be read by itself.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from torch_parallel.bench.common import write_table
from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.collectives.cost import Rates, predicted_s
from torch_parallel.usage import ConfigError, OneLineParser

SMALLEST_ANCHOR = 1 << 20
"""Bytes of a buffer from which on its size counts; below, alpha rules."""
SMALL = 64 << 10
APART = 2.5
MOST_RANKS, MOST_MB = 256, 1 << 20
"""What is predicted: schedules of more ranks take long to go through."""


@dataclass(frozen=True)
class Measured:
    """One timing of an all-reduce."""

    algorithm: str
    n: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Rates by the size of the working set."""

    alpha_s: float
    contention: float
    anchors: tuple[tuple[int, float, float], ...]
    """Bytes, beta and gamma in seconds a byte, in the order of the bytes."""
    seen: tuple[int, ...] = ()
    """The sizes of buffers that were fitted."""

    def at(self, nbytes: int) -> Rates:
        """The rates for a working set of that size; beyond the anchors those of the nearest."""
        sizes = [math.log(anchor[0]) for anchor in self.anchors]
        beta, gamma = (
            float(numpy.interp(math.log(nbytes), sizes, [anchor[index] for anchor in self.anchors])) for index in (1, 2)
        )
        return Rates(self.alpha_s, beta, gamma, self.contention)

    def predicted_s(self, algorithm: str, n: int, nbytes: int, processors: int) -> float:
        """Seconds of an all-reduce of a buffer of `nbytes` by that algorithm."""
        rates = self.at(working_set(algorithm, n, nbytes))
        return predicted_s(ALL_REDUCE[algorithm], n, nbytes, rates, processors)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, entries: dict[str, Any]) -> Fit:
        """What `as_json` gave; raises KeyError where an entry is missing."""
        anchors = tuple((int(nbytes), float(beta), float(gamma)) for nbytes, beta, gamma in entries["anchors"])
        return cls(entries["alpha_s"], entries["contention"], anchors, tuple(entries["seen"]))


def working_set(algorithm: str, n: int, nbytes: int) -> int:
    """Bytes of memory that all ranks together use for a buffer of `nbytes`; a common result is there once."""
    collective = ALL_REDUCE[algorithm]
    regions = sum(collective.region_count(rank, n) for rank in range(n))
    return nbytes * (regions - (n - 1) * collective.common_result)


def fitted_sizes(sizes: Iterable[int]) -> list[int]:
    """Every other size from SMALLEST_ANCHOR on, the first and the last among them."""
    large = sorted({size for size in sizes if size >= SMALLEST_ANCHOR})
    return sorted({*large[::2], large[-1]}) if large else []


def fit(timings: list[Measured], processors: int) -> Fit:
    """From the timings on the fewest ranks, at some of the sizes. Raises ValueError where there are none to fit."""
    fewest = min(timing.n for timing in timings)
    of_fewest = [timing for timing in timings if timing.n == fewest]
    sizes = fitted_sizes(timing.nbytes for timing in of_fewest)
    small = [timing for timing in of_fewest if timing.nbytes <= SMALL]
    large = [timing for timing in of_fewest if timing.nbytes in sizes]
    if not large or not small:
        raise ValueError("a fit needs sizes of at most 64 KiB, for the latency, and of at least 1 MiB")
    first = [timing for timing in large if timing.nbytes == sizes[0]]
    alpha_s = _solved([*small, *first], [SMALLEST_ANCHOR], processors, None).alpha_s
    solved = _solved(large, _anchors(large), processors, alpha_s)
    return replace(solved, seen=tuple(sizes))


def _anchors(timings: list[Measured]) -> list[int]:
    """The working sets of the timings, none less than APART times the one before."""
    anchors: list[int] = []
    for size in sorted({working_set(each.algorithm, each.n, each.nbytes) for each in timings}):
        if not anchors or size >= APART * anchors[-1]:
            anchors.append(size)
    return anchors


def _solved(timings: list[Measured], anchors: list[int], processors: int, alpha_s: float | None) -> Fit:
    """The rates at the anchors, alpha unless it is known, with the least squares of the logarithms of the ratios."""

    def made(logarithms: Any) -> Fit:
        contention, *values = (math.exp(each) for each in logarithms)
        alpha = values.pop() if alpha_s is None else alpha_s
        pairs = zip(anchors, values[::2], values[1::2], strict=True)
        return Fit(alpha, contention, tuple(pairs))

    def errors(logarithms: Any) -> list[float]:
        tried = made(logarithms)
        return [
            math.log(tried.predicted_s(each.algorithm, each.n, each.nbytes, processors) / each.seconds)
            for each in timings
        ]

    start = [0.1, *([2e-10, 1e-10] * len(anchors)), *([2e-6] if alpha_s is None else [])]
    from scipy.optimize import least_squares  # here, since every worker of a bench imports this package: 40 MB

    return made(least_squares(errors, [math.log(each) for each in start], bounds=(-30, 3)).x)


def compared(timings: list[Measured], made: Fit, processors: int) -> list[dict[str, Any]]:
    """A row for each timing: measured, predicted, their ratio, and whether the fit had seen it."""
    fewest = min(timing.n for timing in timings)
    seen = set(made.seen)
    rows = []
    for each in timings:
        predicted = made.predicted_s(each.algorithm, each.n, each.nbytes, processors)
        rows.append(
            {
                "way": each.algorithm,
                "n": each.n,
                "size_bytes": each.nbytes,
                "measured_us": round(1e6 * each.seconds, 2),
                "predicted_us": round(1e6 * predicted, 2),
                "predicted_over_measured": round(predicted / each.seconds, 3),
                "fitted": each.n == fewest and (each.nbytes in seen or each.nbytes <= SMALL),
            }
        )
    return rows


def save_fit(folder: Path, processors: int) -> None:
    """Of the bench.csv there makes fit.json, the rates, and fit.csv, what they predict. Raises ValueError as `fit`."""
    with open(folder / "bench.csv", newline="", encoding="utf-8") as file:
        timings = [
            Measured(row["way"], int(row["n"]), int(row["size_bytes"]), float(row["time_us"]) / 1e6)
            for row in csv.DictReader(file)
            if row["way"] in ALL_REDUCE
        ]
    made = fit(timings, processors)
    rows = compared(timings, made, processors)
    (folder / "fit.json").write_text(
        json.dumps(made.as_json() | {"processors": processors}, indent=2) + "\n", encoding="utf-8"
    )
    write_table(folder / "fit.csv", rows)
    from torch_parallel.analysis.communication import fit_found  # likewise: matplotlib

    if found := fit_found(folder):
        print(found)


def foretold(folder: Path, n: int, nbytes: int) -> str:
    """What the fit.json there predicts of every all-reduce, in microseconds. Raises OSError, ValueError, KeyError."""
    entries = json.loads((folder / "fit.json").read_text(encoding="utf-8"))
    made = Fit.of_json(entries)
    lines = [f"{nbytes:,} bytes, {n} ranks on {entries['processors']} processors, predicted:"]
    for name in ALL_REDUCE:
        lines.append(f"  {name:20}{1e6 * made.predicted_s(name, n, nbytes, entries['processors']):12,.1f} us")
    return "\n".join(lines)


def bench_fit(arguments: list[str]) -> None:
    """`python -m torch_parallel bench fit FOLDER`: fits anew what a bench of collectives has measured.

    With `--n 4 --mb 1` says instead what the fit that lies there predicts for a buffer of that size.
    """
    parser = OneLineParser(prog="python -m torch_parallel bench fit", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="folder with the bench.csv of a bench of collectives")
    parser.add_argument("--n", type=int, help="predict each all-reduce of so many ranks, by the fit.json there")
    parser.add_argument("--mb", type=float, default=1.0, help="MiB of the buffer to predict for (default: 1)")
    options = parser.parse_args(arguments)
    folder = options.folder
    if (options.n is not None and not 2 <= options.n <= MOST_RANKS) or not 0 < options.mb <= MOST_MB:
        raise ConfigError(
            f"--n {options.n} --mb {options.mb}: it takes 2 to {MOST_RANKS} ranks, and more than 0 and at most "
            f"{MOST_MB:,} MiB"
        )
    try:
        if options.n is not None:
            print(foretold(folder, options.n, round(options.mb * 2**20)))
        else:
            save_fit(
                folder, json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["machine"]["processors"]
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if options.n is not None:
            remedy = f"make it by `python -m torch_parallel bench fit {folder}`"
            raise ConfigError(f"{folder}: no fit to predict by there ({error}); {remedy}") from None
        raise ConfigError(f"{folder}: no timings to fit there ({error})") from None
