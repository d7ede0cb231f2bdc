"""A folder of images by train.py and by both controls, which train the same."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.exhaustive
def test_the_three_programs_take_a_folder(tmp_path: Path) -> None:
    for index, name in enumerate(("red roses", "Ölbaum")):
        (tmp_path / "my flowers" / name).mkdir(parents=True)
        for number in range(10):
            colour = (60 * index + 10 * number, 100, 5 * number)
            Image.new("RGB", (20, 30), colour).save(tmp_path / "my flowers" / name / f"{number}.jpg")
    losses = []
    for program in ("train.py", "param_server_builtin.py", "ring_all_reduce_builtin.py"):
        words = [sys.executable, str(ROOT / program), "--dataset", "my flowers", "--device", "cpu", "--n_gpus", "1"]
        words += ["--model", "cnn", "--epochs", "1", "--batch_size", "5"]
        words += ["--data_dir", str(tmp_path), "--results_dir", str(tmp_path / program)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=200, cwd=ROOT)
        assert ended.returncode == 0, ended.stderr
        assert f"my flowers from {tmp_path}/my flowers (2 classes; 2 of 20 images drawn for testing; " in ended.stdout
        (table,) = (tmp_path / program).glob("*/runs.csv")
        with open(table, newline="", encoding="utf-8") as file:
            (row,) = csv.DictReader(file)
        losses.append(float(row["train_loss"]))
        assert (row["train_size"], row["test_size"], row["dataset"]) == ("18", "2", "my flowers")
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
