"""A fit finds the rates that timings were made with, and says how far its predictions are off."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from torch_parallel import bench
from torch_parallel.analysis.communication import fit_found
from torch_parallel.bench.common import write_table
from torch_parallel.bench.fit import Fit, Measured, compared, fit, fitted_sizes, working_set
from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.collectives.cost import Rates, predicted_s
from torch_parallel.training.config import ConfigError

SIZES = [4 << 10, 64 << 10, *(1 << power for power in range(20, 27))]
TRUE = Rates(3e-6, 2e-10, 1e-10, contention=0.25)


def told(rows: list[dict[str, Any]], folder: Path) -> list[str]:
    write_table(folder / "fit.csv", rows)
    return fit_found(folder).splitlines()


def made_with(rates: Rates, counts: tuple[int, ...], processors: int) -> list[Measured]:
    return [
        Measured(name, n, size, predicted_s(ALL_REDUCE[name], n, size, rates, processors))
        for name in ("ring", "tree", "one_shot", "reduce_broadcast", "all_gather_average")
        for n in counts
        for size in SIZES
    ]


def test_it_finds_the_rates_and_predicts_the_sizes_between_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    timings = made_with(TRUE, (2, 4), processors=8)
    found = fit(timings, processors=8)
    assert found.alpha_s == pytest.approx(3e-6, rel=0.02)
    assert found.contention == pytest.approx(0.25, rel=0.02)
    for _, beta, gamma in found.anchors:
        assert beta == pytest.approx(2e-10, rel=0.02) and gamma == pytest.approx(1e-10, rel=0.02)
    rows = compared(timings, found, processors=8)
    assert all(row["predicted_over_measured"] == pytest.approx(1, abs=0.02) for row in rows)
    fitted = {(row["n"], row["size_bytes"]) for row in rows if row["fitted"]}
    assert fitted == {(2, size) for size in (4 << 10, 64 << 10, 1 << 20, 1 << 22, 1 << 24, 1 << 26)}
    # 5 algorithms at 2, 8 and 32 MiB, and at all 7 sizes from 1 MiB on with four ranks
    assert [line.partition(" timings")[0] for line in told(rows, tmp_path)] == [
        "predicted, 2 processes: 15 of 15",
        "predicted, 4 processes: 35 of 35",
    ]


def test_errors_are_told_as_they_are(tmp_path: Path) -> None:
    timings = [Measured("ring", 2, 1 << 21, 1.0), Measured("ring", 2, 1 << 20, 1.0)]
    rates = Fit(0.0, 0.0, ((1 << 20, 1.0 / (1 << 20), 0.0),), seen=(1 << 20,))  # a second for each MiB that is moved
    rows = compared(timings, rates, processors=2)
    # a ring of two moves half of the buffer twice: 2 MiB take 2 s and 1 MiB takes 1 s
    assert [(row["predicted_over_measured"], row["fitted"]) for row in rows] == [(2, False), (1, True)]
    assert told(rows, tmp_path) == [
        "predicted, 2 processes: 0 of 1 timings from 1 MiB on within 15 %, median 100 %, largest 100 %"
    ]


def test_between_two_sizes_the_rates_follow_the_logarithm_of_the_size() -> None:
    rates = Fit(1e-6, 0.5, ((1 << 20, 1e-10, 4e-10), (1 << 24, 3e-10, 2e-10)))
    assert rates.at(1 << 22) == Rates(1e-6, pytest.approx(2e-10), pytest.approx(3e-10), 0.5)
    assert rates.at(1 << 10) == Rates(1e-6, 1e-10, 4e-10, 0.5)
    assert rates.at(1 << 30) == Rates(1e-6, 3e-10, 2e-10, 0.5)


def test_the_working_set_is_all_memory_of_all_ranks() -> None:
    """A ring works in place; one shot sums elsewhere; a common result is there once; a root gathers three more."""
    sets = {name: working_set(name, 4, 10) for name in ("ring", "one_shot", "two_shot_in_place", "gather_scatter")}
    assert sets == {"ring": 40, "one_shot": 80, "two_shot_in_place": 50, "gather_scatter": 70}


def test_what_is_fitted() -> None:
    megabytes = [size << 20 for size in (1, 2, 4, 8, 16, 32)]
    assert fitted_sizes([4096, *megabytes]) == [size << 20 for size in (1, 4, 16, 32)]
    with pytest.raises(ValueError, match="a fit needs sizes"):
        fit([Measured("ring", 2, 4096, 1e-5)], processors=2)


def test_a_bench_is_fitted_anew_from_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"collective": "all_reduce", "way": each.algorithm, "n": each.n, "size_bytes": each.nbytes}
        | {"time_us": 1e6 * each.seconds}
        for each in made_with(TRUE, (2,), 2)
    ]
    write_table(tmp_path / "bench.csv", rows)
    (tmp_path / "manifest.json").write_text(json.dumps({"machine": {"processors": 2}}))
    bench.main(["fit", str(tmp_path)])
    assert json.loads((tmp_path / "fit.json").read_text())["alpha_s"] == pytest.approx(3e-6, rel=0.02)
    assert "15 of 15" in capsys.readouterr().out
    bench.main(["fit", str(tmp_path), "--n", "2", "--mb", "4"])
    told = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert set(told) == set(ALL_REDUCE)
    expected_us = 1e6 * predicted_s(ALL_REDUCE["ring"], 2, 1 << 22, TRUE, 2)
    assert float(told["ring"][0].replace(",", "")) == pytest.approx(expected_us, rel=0.03)
    for bad in (["--n", "1"], ["--n", "999999999"], ["--n", "2", "--mb", "1e305"], ["--n", "2", "--mb", "nan"]):
        with pytest.raises(ConfigError, match="2 to 256 ranks, and more than 0 and at most 1,048,576 MiB"):
            bench.main(["fit", str(tmp_path), *bad])
    fitted = tmp_path / "fit.json"
    for damage in (fitted.unlink, partial(fitted.write_text, "[]"), partial(fitted.write_text, '{"anchors": 1')):
        damage()
        with pytest.raises(ConfigError, match=r"no fit to predict by .* make it by `python -m "):
            bench.main(["fit", str(tmp_path), "--n", "4"])
    with pytest.raises(ConfigError, match="no timings to fit there"):
        bench.main(["fit", str(tmp_path / "nothing")])
