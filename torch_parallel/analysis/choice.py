"""The table by which training chooses its all-reduce (`collectives/choice.py`), made from what benches measured."""

from __future__ import annotations

from pathlib import Path

from torch_parallel.analysis.runs import ExperimentMissing, bench_rows, newest
from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.collectives.choice import COLUMNS

BENCHES = {
    "bench_collectives": "cpu",
    "bench_all_reduce": "cpu",
    "bench_all_reduce_gpu": "cuda",
    "bench_all_reduce_gpu_n4": "cuda",
}
"""Where all-reduces were timed, and on what. Later ones count where two have the same size."""
TIMES = {"cpu": "time_us", "cuda": "back_to_back_us"}
"""The column that counts."""
AS_USED = ", auto"
"""Behind the names of algorithms on GPUs, performed as training does it."""


def fastest_table(results_dir: str | Path = "results") -> str:
    """The table, as CSV; on GPUs by calls back to back, as buckets follow each other.

    What leaves the sums in one memory for all is left out there: that lies on one GPU, and the others' reading of it
    was not timed.
    """
    fastest: dict[tuple[str, int, int], str] = {}
    for bench, device in BENCHES.items():
        try:
            folder = newest(bench, results_dir)
        except ExperimentMissing:
            continue
        rows = [row for row in bench_rows(folder) if row["collective"] == "all_reduce"]
        times: dict[tuple[str, int, int], dict[str, float]] = {}
        for row in rows:
            algorithm = row["way"].removesuffix(AS_USED if device == "cuda" else "")
            if algorithm in ALL_REDUCE and not (device == "cuda" and ALL_REDUCE[algorithm].common_result):
                place = (device, int(row["n"]), int(row["size_bytes"]))
                times.setdefault(place, {})[algorithm] = float(row[TIMES[device]])
        fastest |= {place: min(of_place, key=of_place.__getitem__) for place, of_place in times.items()}
    lines = [",".join(COLUMNS), *(",".join(map(str, (*place, fastest[place]))) for place in sorted(fastest))]
    return "\n".join(lines) + "\n"
