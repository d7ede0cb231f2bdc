"""Latency and bandwidth from timings, and how well they predict timings that they were not made from.

In shared memory one alpha, beta and gamma cannot serve all sizes: what fits into the caches moves faster. So beta and
gamma are fitted at a few sizes of the buffer, and in between they follow a straight line over the logarithm of the size
(as in the parameterized LogP model of Kielmann, Bal and Verstoep, "Bandwidth-efficient collective communication for
clustered wide area systems", 2000). Fitted are the relative errors, so that the small count as much as the large.

Fitted on the fewest ranks and every other size; all else is predicted: the sizes between, and the other numbers of
ranks, with as many processors as there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy
from scipy.optimize import least_squares

from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.collectives.cost import Rates, predicted_s

SMALLEST_ANCHOR = 1 << 20
"""Bytes of a buffer from which on its size counts; below, alpha rules."""
SMALL = 64 << 10


@dataclass(frozen=True)
class Measured:
    """One timing of an all-reduce."""

    algorithm: str
    n: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Rates by the size of the buffer."""

    alpha_s: float
    anchors: tuple[tuple[int, float, float, float], ...]
    """Bytes, beta and gamma in seconds a byte, and the contention, in the order of the bytes."""

    def at(self, nbytes: int) -> Rates:
        """The rates for a buffer of that size; beyond the anchors those of the nearest."""
        sizes = [math.log(anchor[0]) for anchor in self.anchors]
        columns = list(zip(*self.anchors, strict=True))[1:]
        return Rates(self.alpha_s, *(float(numpy.interp(math.log(nbytes), sizes, column)) for column in columns))

    def predicted_s(self, algorithm: str, n: int, nbytes: int, processors: int) -> float:
        return predicted_s(ALL_REDUCE[algorithm], n, nbytes, self.at(nbytes), processors)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


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
    if not sizes or not small:
        raise ValueError("a fit needs sizes of at most 64 KiB, for the latency, and of at least 1 MiB")
    first = [timing for timing in of_fewest if timing.nbytes == sizes[0]]
    alpha_s = _solved([*small, *first], processors, None).alpha_s
    anchors = []
    for size in sizes:
        rates = _solved([timing for timing in of_fewest if timing.nbytes == size], processors, alpha_s)
        anchors.append((size, rates.beta_s_per_byte, rates.gamma_s_per_byte, rates.contention))
    return Fit(alpha_s, tuple(anchors))


def _solved(timings: list[Measured], processors: int, alpha_s: float | None) -> Rates:
    """The rates, alpha unless it is known, with the least squares of the logarithms of the errors."""

    def rates(logarithms: Any) -> Rates:
        values = [math.exp(each) for each in logarithms]
        return Rates(*values) if alpha_s is None else Rates(alpha_s, *values)

    def errors(logarithms: Any) -> list[float]:
        tried = rates(logarithms)
        return [
            math.log(predicted_s(ALL_REDUCE[each.algorithm], each.n, each.nbytes, tried, processors) / each.seconds)
            for each in timings
        ]

    start = [math.log(each) for each in (2e-6, 2e-10, 1e-10, 0.1)][0 if alpha_s is None else 1 :]
    return rates(least_squares(errors, start).x)


def compared(timings: list[Measured], made: Fit, processors: int) -> list[dict[str, Any]]:
    """A row for each timing: measured, predicted, their ratio, and whether the fit had seen it."""
    fewest = min(timing.n for timing in timings)
    seen = {anchor[0] for anchor in made.anchors}
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


def told(rows: list[dict[str, Any]]) -> list[str]:
    """How far the predictions from 1 MiB on that were not fitted are off, by the number of ranks."""
    lines = []
    for n in sorted({row["n"] for row in rows}):
        errors = sorted(
            abs(row["predicted_over_measured"] - 1)
            for row in rows
            if row["n"] == n and not row["fitted"] and row["size_bytes"] >= SMALLEST_ANCHOR
        )
        if errors:
            within = sum(error <= 0.15 for error in errors)
            lines.append(
                f"predicted, {n} processes: {within} of {len(errors)} timings from 1 MiB on within 15 %, "
                f"median {100 * errors[len(errors) // 2]:.0f} %, largest {100 * errors[-1]:.0f} %"
            )
    return lines
