"""What is told of the experiments with transformers, against values worked out by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from torch_parallel.analysis import earlier_study, transformer_plots, transformers
from torch_parallel.analysis.figure import style
from torch_parallel.analysis.plots import PART_COLOURS
from torch_parallel.analysis.runs import Unequal, by_label, read_runs
from torch_parallel.analysis.transformers import told
from torch_parallel.results import COLUMNS

COMMON = {
    "kind": "measured",
    "strategy": "ring_all_reduce",
    "model": "bert_tiny",
    "dataset": "bbc_text",
    "train_size": 500,
    "test_size": 50,
    "device": "cpu",
    "dtype": "float32",
    "optimizer": "adamw",
    "lr": 2e-4,
    "threads": 1,
    "epoch": 1,
    "steps": 9,
    "train_loss": 1.0,
    "test_loss": 1.0,
    "test_accuracy": 0.5,
    "commit": "abc",
    "train_s": 1.0,
    "compute_s": 0.8,
    "exchange_s": 0.1,
    "wait_s": 0.1,
    "update_s": 0.0,
    "role": "worker",
    "exchanged_part": 0.1,
    "waited_part": 0.05,
}


def run(setup: str, each: int, per_1000_s: float, seed: int = 0, flags: str = "", **other: Any) -> dict[str, Any]:
    """The row of rank 0 of a run that takes so many seconds for 1,000 samples."""
    nodes, per_node = map(int, setup.split("_"))
    workers = nodes * per_node
    return (
        COMMON
        | {"setup": setup, "nodes": nodes, "n": workers, "workers": workers, "batch_size": workers * each, "seed": seed}
        | {"samples_per_s": 1000 / per_1000_s, "rank": 0, "command": f"python train.py --setup {setup} {flags}"}
        | {"options": json.dumps({"nodes": nodes, "workers_per_node": per_node} if nodes > 1 else {})}
        | other
    )


def written(folder: Path, rows: list[dict[str, Any]], cards: tuple[str, ...] = ()) -> Path:
    folder.mkdir(parents=True)
    with open(folder / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        runs = dict.fromkeys((row["command"], row["seed"], row["batch_size"], row["model"]) for row in rows)
        numbers = {key: str(number) for number, key in enumerate(runs)}
        for row in rows:
            key = (row["command"], row["seed"], row["batch_size"], row["model"])
            writer.writerow({"run_id": numbers[key]} | row)
    about = {"started": "2026-01-01T00:00:00", "status": "completed", "commit": "abc", "command": "python x"}
    about |= {"machine": {"processors": 2, "processor": "a processor"}, "cards": list(cards)}
    (folder / "manifest.json").write_text(json.dumps(about | {"versions": {"torch": "2", "python": "3"}}))
    return folder


def repeats(setup: str, each: int, seconds: list[float], **other: Any) -> list[dict[str, Any]]:
    return [run(setup, each, value, seed, **other) for seed, value in enumerate(seconds)]


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    """One worker, then two of one node and of two; 16 over all are 16, 8 and 8 a worker."""
    short = {"flags": "--max_steps 9"}
    return written(
        tmp_path / "results" / "transformers_batch" / "one",
        [
            *repeats("1_1", 1, [40.0, 44.0, 42.0], **short),
            *repeats("1_2", 1, [20.0, 22.0, 21.0], **short),
            *repeats("2_1", 1, [30.0, 33.0, 31.5], **short, waited_part=0.25, exchanged_part=0.2),
            *repeats("1_1", 16, [20.0, 22.0, 21.0], **short),
            *repeats("1_2", 16, [10.0, 12.0, 11.0], **short),
            *repeats("2_1", 16, [11.5, 12.5, 12.0], **short),
            *repeats("1_2", 8, [15.0, 16.0, 17.0], **short),
            *repeats("2_1", 8, [18.0, 19.0, 20.0], **short),
        ],
    )


def test_the_table_has_medians_with_their_spread_by_set_up_and_batch(batches: Path) -> None:
    lines = transformers.batch_table(batches).splitlines()
    assert lines[2].split("  ")[0] == "bert_tiny" and "8 a worker" not in lines[2]
    cells = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[3:]}
    assert cells == {
        "1_1": "42.00 (40.00 to 44.00) 21.00 (20.00 to 22.00) 21.00 (20.00 to 22.00)",
        "1_2": "21.00 (20.00 to 22.00) 11.00 (10.00 to 12.00) 16.00 (15.00 to 17.00)",
        "2_1": "31.50 (30.00 to 33.00) 12.00 (11.50 to 12.50) 19.00 (18.00 to 20.00)",
    }


def test_a_difference_is_claimed_only_where_ranges_do_not_overlap(batches: Path) -> None:
    said = transformers.batch_found(batches).splitlines()
    assert said[0] == (
        "bert_tiny, 1 a worker: 2_1 31.50 (30.00 to 33.00) s for 1,000 samples, 1_2 21.00 (20.00 to 22.00) s: "
        "1.50 times as long (2_1 exchanged 20 %, waited 25 %; 1_2 exchanged 10 %, waited 5 %)."
    )
    of_16 = next(line for line in said if "16 a worker: 2_1" in line)
    assert of_16.endswith("no difference can be told.")
    assert any("16 over all: 2_1 19.00" in line and "1.19 times as long" in line for line in said)  # 19 / 16


@pytest.mark.parametrize(
    ("some", "others", "do"),
    [
        ([1, 2, 2], [3, 4, 4], True),
        ([3, 4, 4], [1, 2, 2], True),
        ([1, 2, 3], [2, 3, 4], False),
        ([1, 1, 2], [2, 3, 3], False),
        ([1, 1], [3, 3, 3], False),
    ],
)
def test_ranges_that_touch_and_too_few_seeds_are_no_difference(
    some: list[float], others: list[float], do: bool
) -> None:
    assert transformers.differ(some, others) is do


def test_speed_beside_the_earlier_study_is_taken_seed_by_seed(tmp_path: Path) -> None:
    """The study had 470 and 146 s with a batch of 1; here each seed is 2, 2.5 and 4 times as fast as one worker."""
    rows = [*repeats("1_1", 1, [40.0, 50.0, 60.0]), *repeats("1_4", 1, [20.0, 20.0, 15.0])]
    rows += repeats("1_2", 1, [30.0, 30.0, 30.0])
    rows += repeats("2_2", 1, [40.0, 50.0, 60.0])
    said = earlier_study.batches_beside_study(written(tmp_path / "a", rows)).splitlines()
    assert said[1:] == [
        "bert_tiny, 1 a worker, 1_4: the study 3.22, here 2.50 (2.00 to 4.00)",
        "bert_tiny, 1 a worker, 2_2: the study 1.32, here 1.00 (1.00 to 1.00)",  # 470 / 357
        "bert_tiny, 1 a worker, 2_2 over 1_4 in time: the study 2.45, here 2.50 (2.00 to 4.00)",  # 357 / 146
    ]


def test_set_ups_of_which_the_study_had_none_are_said_to_be_so(batches: Path) -> None:
    assert earlier_study.batches_beside_study(batches).startswith("no set-up of the study was measured here")


def test_runs_that_differ_in_more_are_refused(batches: Path, tmp_path: Path) -> None:
    rows = [run("1_1", 1, 40.0), run("1_2", 1, 20.0, optimizer="sgd"), run("2_1", 1, 20.0)]
    with pytest.raises(Unequal, match="optimizer"):
        transformers.batch_table(written(tmp_path / "b", rows))


def test_what_was_held_equal_is_told_for_each_batch(batches: Path) -> None:
    told_of = transformers.held(batches)
    assert told_of.count("held equal: ") == 3  # 1, 16 and 8 a worker
    assert "42.000 s for 1,000 samples (40.000 to 44.000)" in told_of


def test_set_ups_of_as_many_workers_have_labels_of_their_own(batches: Path) -> None:
    labels = list(by_label(read_runs(batches)))
    assert labels == ["one process", "ring_all_reduce, 2 workers", "ring_all_reduce, 2 workers, set-up 2_1"]


def test_the_figure_has_a_line_for_each_set_up_at_its_medians(batches: Path) -> None:
    left, right = transformer_plots.seconds_by_batch(batches).axes
    labels = [bar.get_label() for bar in left.containers]
    assert labels == ["1_1", "1_2", "2_1"]
    assert [list(bar.lines[0].get_ydata()) for bar in left.containers] == [[42.0, 21.0], [21.0, 11.0], [31.5, 12.0]]
    assert [bar.get_height() for bar in right.patches] == [21.0, 16.0, 19.0]
    assert left.get_ylabel() == "seconds for 1,000 samples"


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    """Two epochs of three seeds; accuracy after the second is 60, 70 and 80 % with the large rate, 20 to 40 else."""
    rows = []
    for setup, flags, last in (
        ("1_1", "--lr 0.0002", 0.6),
        ("1_1", "--lr 2e-05", 0.2),
        ("1_2", "--lr 0.0002", 0.5),
        ("1_2", "--lr 0.0002 --scale_lr", 0.55),
        ("1_2", "--lr 2e-05", 0.2),
        ("1_2", "--lr 2e-05 --scale_lr", 0.45),
    ):
        for seed in (0, 1, 2):
            for epoch, accuracy in ((1, 0.1), (2, last + seed / 10)):
                rate = 4e-4 if "scale" in flags else 2e-4
                rows.append(run(setup, 8, 1.0, seed, flags, epoch=epoch, test_accuracy=accuracy, lr=rate))
    return written(tmp_path / "results" / "transformers_learning_rate" / "one", rows)


def test_rates_are_those_that_were_asked_for(rates: Path) -> None:
    assert [run.setting("rate") for run in read_runs(rates)][::3] == [
        *("0.0002", "2e-05", "0.0002"),
        *("0.0002 x workers", "2e-05", "2e-05 x workers"),
    ]
    lines = [line.split() for line in transformers.rate_table(rates).splitlines()[3:]]
    assert ["0.0002", "1_1", "70.00", "(60.00", "to", "80.00)"] in lines
    assert ["2e-05", "x", "workers", "1_2", "55.00", "(45.00", "to", "65.00)"] in lines


def test_rates_beside_each_other(rates: Path) -> None:
    assert transformers.rate_found(rates).splitlines() == [
        "1_1: 0.0002 70.00 (60.00 to 80.00) %, 2e-05 30.00 (20.00 to 40.00) %: +40.00 points",
        "1_2: 0.0002 60.00 (50.00 to 70.00) %, 2e-05 30.00 (20.00 to 40.00) %: +30.00 points",
        "1_2: 0.0002 x workers 65.00 (55.00 to 75.00) %, 0.0002 60.00 (50.00 to 70.00) %: no difference can be told",
        "1_2: 2e-05 x workers 55.00 (45.00 to 65.00) %, 2e-05 30.00 (20.00 to 40.00) %: +25.00 points",
    ]


def test_curves_of_both_rates_with_one_worker_in_both_panels(rates: Path) -> None:
    left, right = transformer_plots.accuracy_by_epoch(rates).axes
    plain = {"1_1, 0.0002", "1_1, 2e-05", "1_2, 0.0002", "1_2, 2e-05"}
    assert {line.get_label() for line in left.lines} == plain and len(left.lines) == 4
    by_name = {line.get_label(): line for line in right.lines}
    assert set(by_name) == {"1_1, 0.0002", "1_1, 2e-05", "1_2, 0.0002 x workers", "1_2, 2e-05 x workers"}
    assert list(by_name["1_2, 2e-05 x workers"].get_ydata()) == pytest.approx([10.0, 55.0])
    assert to_hex(by_name["1_1, 2e-05"].get_color()).upper() == style("1_1")["color"]


@pytest.fixture
def links(tmp_path: Path) -> Path:
    near, far = "--link 10gbit --latency 50us", "--link 1gbit --latency 5ms"
    return written(
        tmp_path / "results" / "propagation" / "one",
        [
            *repeats("1_2", 8, [10.0, 11.0, 12.0]),
            *repeats("2_1", 8, [12.0, 13.0, 14.0], flags=near, exchanged_part=0.25, waited_part=0.125),
            *repeats("2_1", 8, [24.0, 26.0, 28.0], flags=far, exchanged_part=0.5, waited_part=""),
        ],
    )


def test_steps_near_and_far(links: Path) -> None:
    """A batch of 16 at 10 s for 1,000 samples takes 160 ms."""
    lines = [" ".join(line.split()) for line in transformers.link_table(links).splitlines()[3:]]
    assert lines == [
        "one node 176.0 (160.0 to 192.0) exchanged 10 %, waited 5 %",
        "10gbit, 50us 208.0 (192.0 to 224.0) exchanged 25 %, waited 12 %",
        "1gbit, 5ms 416.0 (384.0 to 448.0) exchanged and waited 50 %",
    ]
    said = transformers.link_found(links).splitlines()
    assert said[0].startswith("bert_tiny: 1gbit, 5ms 26.00") and "2.00 times as long" in said[0]
    assert said[1].endswith("no difference can be told.")
    beside = earlier_study.links_beside_study(links).splitlines()
    assert "the study 2.57;" in beside[0]  # 303 / 118
    assert beside[1:] == ["bert_tiny, 1gbit, 5ms over 10gbit, 50us: 2.00 (2.00 to 2.00)"]


def test_bars_of_a_step_are_its_parts(links: Path) -> None:
    (axes,) = transformer_plots.step_parts(links).axes
    near = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == 1]
    assert [bar.get_width() for bar in near] == pytest.approx([0.625 * 208, 0.25 * 208, 0.125 * 208])
    assert [to_hex(bar.get_facecolor()).upper() for bar in near] == [
        PART_COLOURS[name] for name in ("compute", "exchange", "wait")
    ]
    hatched = [bar for bar in axes.patches if bar.get_hatch()]
    assert [bar.get_width() for bar in hatched] == pytest.approx([0.5 * 416])


def test_results_of_one_kind_are_enough_and_both_are_shown(links: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    alone = told(transformers.link_table, "propagation", results)
    assert alone.count("ms of a step") == 1 and "a processor" in alone
    written(results / "propagation_gpu" / "one", repeats("1_2", 8, [1.0, 2.0, 3.0]), cards=("a card", "a card"))
    both = told(transformers.link_table, "propagation", results)
    assert both.count("ms of a step") == 2 and "2 x a card" in both
    assert len(transformer_plots.drawn(transformer_plots.step_parts, "propagation", results).axes) == 2


def test_where_there_are_no_results_it_says_how_to_make_them(tmp_path: Path) -> None:
    line = "no results of propagation yet; make them with: python -m torch_parallel experiment propagation"
    assert told(transformers.link_table, "propagation", tmp_path) == line
    (text,) = transformer_plots.drawn(transformer_plots.step_parts, "propagation", tmp_path).texts
    assert text.get_text() == line
