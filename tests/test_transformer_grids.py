"""The experiments with transformers: what their cells are, on a CPU and on GPUs, and with which data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_parallel import fetched
from torch_parallel.cells import Cell
from torch_parallel.fetched import at_hand
from torch_parallel.grids import EXPERIMENTS, Experiment, train_py

TRANSFORMERS = ("transformers_batch", "transformers_learning_rate", "propagation")


def flags(experiment: Experiment, **wanted: Any) -> list[dict[str, Any]]:
    every = [dict(cell.flags) for cell in experiment.cells]
    return [each for each in every if all(each.get(name) == value for name, value in wanted.items())]


@pytest.mark.parametrize("gpus", [0, 4])
def test_every_set_up_has_every_batch_of_a_worker(gpus: int) -> None:
    found = flags(EXPERIMENTS["transformers_batch"].on(gpus), model="bert")
    pairs = {(each["setup"], each["per_gpu_batch"]) for each in found if "per_gpu_batch" in each}
    assert pairs == {(setup, size) for setup in ("1_1", "1_2", "1_4", "2_1", "2_2") for size in (1, 4, 16)}


@pytest.mark.parametrize("gpus", [0, 4])
def test_every_set_up_has_a_batch_of_16_over_all_workers_once(gpus: int) -> None:
    workers = {"1_1": 1, "1_2": 2, "1_4": 4, "2_1": 2, "2_2": 4}
    found = flags(EXPERIMENTS["transformers_batch"].on(gpus), model="bert")
    whole = [
        (each["setup"], each.get("batch_size") or each["per_gpu_batch"] * workers[each["setup"]]) for each in found
    ]
    assert sorted(setup for setup, size in whole if size == 16) == ["1_1", "1_2", "1_4", "2_1", "2_2"]


def test_vit_has_as_many_cells_as_bert_on_gpus_only() -> None:
    on_gpus = EXPERIMENTS["transformers_batch"].on(4)
    assert len(flags(on_gpus, model="vit")) == len(flags(on_gpus, model="bert")) == 17
    assert {each["setup"] for each in flags(EXPERIMENTS["transformers_batch"], model="vit")} == {"1_1", "1_2", "2_1"}


def test_models_are_larger_on_gpus() -> None:
    for name in TRANSFORMERS:
        for gpus, size in ((0, "tiny"), (4, "small")):
            assert {each["model_size"] for each in flags(EXPERIMENTS[name].on(gpus))} == {size}


def test_two_gpus_run_what_has_two_workers_but_where_no_times_are_compared() -> None:
    for name in TRANSFORMERS:
        on_two = flags(EXPERIMENTS[name].on(2))
        of_four = {"1_4"} if name == "transformers_learning_rate" else set()  # workers may share GPUs there
        assert on_two and {each["setup"] for each in on_two} <= {"1_1", "1_2", "2_1"} | of_four


def test_both_rates_on_all_workers_and_times_the_workers_where_there_are_several() -> None:
    found = flags(EXPERIMENTS["transformers_learning_rate"])
    assert {each["epochs"] for each in found} == {5}
    seen = [(each["setup"], each["lr"], each.get("scale_lr", False)) for each in found]
    several = [(setup, rate, scaled) for setup in ("1_2", "1_4") for rate in (2e-4, 2e-5) for scaled in (False, True)]
    assert sorted(seen) == sorted([("1_1", 2e-4, False), ("1_1", 2e-5, False), *several])


def test_near_and_far_differ_in_nothing_but_the_links() -> None:
    for model in ("bert", "vit"):
        found = flags(EXPERIMENTS["propagation"], model=model)
        assert [(each["setup"], each.get("link"), each.get("latency")) for each in found] == [
            ("1_2", None, None),
            ("2_1", "10gbit", "50us"),
            ("2_1", "1gbit", "5ms"),
            ("2_1", "200mbit", "30ms"),
        ]
        rest = [
            {name: value for name, value in each.items() if name not in ("setup", "link", "latency")} for each in found
        ]
        assert all(each == rest[0] for each in rest)


def test_a_flag_that_is_true_has_no_value_and_workers_are_those_of_all_nodes() -> None:
    cell = Cell("train.py", (("setup", "2_3"), ("scale_lr", True), ("lr", 2e-4)), threads=1)
    assert cell.command(0).endswith("train.py --setup 2_3 --scale_lr --lr 0.0002 --seed 0")
    assert cell.workers == 6


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_quick_form_has_the_same_set_ups_and_data_of_every_machine(name: str) -> None:
    quick = EXPERIMENTS[name].quick()
    assert len(quick.cells) == len(EXPERIMENTS[name].cells)
    data = {"bert": "python_docs", "vit": "digits"}
    assert all(each["dataset"] == data[each["model"]] for each in flags(quick))
    assert at_hand(quick) == (quick, [])
    for kept in ("setup", "per_gpu_batch", "batch_size", "scale_lr", "link"):
        before = [each.get(kept) for each in flags(EXPERIMENTS[name])]
        assert sorted(map(str, before)) == sorted(str(each.get(kept)) for each in flags(quick))


def test_data_that_are_not_there_are_replaced_and_a_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # ./data is looked into
    monkeypatch.setenv("TORCH_PARALLEL_DATA", str(tmp_path))
    monkeypatch.setattr(
        fetched, "load_dataset", lambda *_, **__: (Named("digits"), "digits from sklearn, because gone")
    )
    found, lines = at_hand(EXPERIMENTS["propagation"])
    assert {(each["model"], each["dataset"]) for each in flags(found)} == {("bert", "python_docs"), ("vit", "digits")}
    assert len(lines) == 2 and all("\n" not in line for line in lines)
    assert lines[0].startswith("python_docs in the place of bbc_text, because bbc_text was not found")
    assert lines[1] == "digits in the place of mnist, because gone; TORCH_PARALLEL_DATA may name its folder"


def test_data_that_are_there_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bbc-text.csv").write_text("category,text\n")
    monkeypatch.setenv("TORCH_PARALLEL_DATA", str(tmp_path))
    monkeypatch.setattr(fetched, "load_dataset", lambda *_, **__: (Named("mnist"), "mnist from a folder"))
    assert at_hand(EXPERIMENTS["transformers_batch"]) == (EXPERIMENTS["transformers_batch"], [])


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


def test_the_data_of_other_models_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched, "load_dataset", None)  # it is not called
    other = Experiment("other", [train_py("ring_all_reduce", 2, model="cnn", dataset="mnist")])
    assert at_hand(other) == (other, [])


@pytest.mark.parametrize("model", ["bert", "vit", "gpt2"])
def test_learning_is_one_run_a_seed_on_all_data_of_a_gpu_and_less_of_it_on_a_laptop(model: str) -> None:
    experiment = EXPERIMENTS[f"learning_{model}"]
    on_gpu, on_laptop = flags(experiment.on(1)), flags(experiment.on(0))
    assert len(on_gpu) == len(on_laptop) == 1
    assert (on_gpu[0]["setup"], on_laptop[0]["setup"]) == ("1_1", "1_2")
    assert "train_size" not in on_gpu[0] and on_gpu[0]["epochs"] >= on_laptop[0]["epochs"]
    assert len(experiment.seeds) == (5 if model == "bert" else 3)
