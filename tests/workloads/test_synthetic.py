"""Made-up samples of the shape that a name says, for images and for texts."""

from __future__ import annotations

import pytest
import torch

from torch_parallel.workloads import DataError, load_dataset, synthetic
from torch_parallel.workloads.load import Choice, load_workload


def test_a_shape_and_classes_of_ones_own() -> None:
    dataset, line = load_dataset("synthetic:1x5x7:4", None, None, seed=0)
    assert dataset.image_shape == (1, 5, 7) and dataset.class_count == 4 and dataset.name == "synthetic_1x5x7_4"
    assert (len(dataset.train_inputs), len(dataset.test_inputs)) == (1024, 128)
    assert set(dataset.train_targets.tolist()) == {0, 1, 2, 3} and line.startswith("synthetic_1x5x7_4 from random")
    again, _ = load_dataset("synthetic:1x5x7:4", None, None, seed=9)
    assert torch.equal(dataset.train_inputs, again.train_inputs) and torch.equal(
        dataset.test_targets, again.test_targets
    )
    mean = float(dataset.train_inputs.double().mean())
    assert abs(mean - 127.5) < 5 * 73.9 / (1024 * 35) ** 0.5  # five deviations of the mean of so many bytes
    assert load_dataset("synthetic:3x4x4", None, None, 0)[0].class_count == 1000


def test_as_many_samples_as_are_asked_for() -> None:
    """More than there are by default too."""
    dataset, _ = load_dataset("synthetic:3x4x5:2", None, 3000, 0, 7)
    assert dataset.train_inputs.shape == (3000, 3, 4, 5) and dataset.test_inputs.shape == (7, 3, 4, 5)
    assert len({tuple(image) for image in dataset.train_inputs.flatten(1).tolist()}) == 3000


@pytest.mark.parametrize(
    "name",
    ["synthetic:", "synthetic:3x4", "synthetic:3x4x0", "synthetic:3x4x5:0", "synthetic:3x4x5:a", "synthetic:-1x4x5"],
)
def test_a_shape_that_is_none(name: str) -> None:
    with pytest.raises(DataError, match=rf"^--dataset {name}: channels, height, width, and classes if you like"):
        load_dataset(name, None, None, 0)


def test_memory_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,152 images of 3 x 1000 x 1000 take 3,456,000,000 bytes."""
    monkeypatch.setattr(synthetic, "free_memory_bytes", lambda: 1 << 30)
    with pytest.raises(DataError, match=r"synthetic:3x1000x1000 takes 3\.219 GiB of memory, and 1 GiB are free"):
        load_dataset("synthetic:3x1000x1000", None, None, 0)


def test_texts_for_models_of_text() -> None:
    sizes = {"train_size": 6, "test_size": 3}
    bert, line = load_workload(Choice("bert", "synthetic", model_size="tiny", length=9, **sizes))
    assert {name: (list(each.shape), each.dtype) for name, each in bert.samples.train.items()} == {
        "tokens": ([6, 9], torch.int32),
        "mask": ([6, 9], torch.bool),
        "targets": ([6], torch.int64),
    }
    assert line.startswith("synthetic from random numbers") and bool(bert.samples.train["mask"].all())
    assert int(bert.samples.train["tokens"].max()) > 10_000  # of 30,522: of 54 tokens the largest is, but for 1e-26
    gpt2, _ = load_workload(Choice("gpt2", "synthetic", model_size="tiny", **sizes))
    assert gpt2.samples.train["tokens"].shape == (6, 257) and gpt2.samples.train["tokens"].dtype == torch.uint8
    assert gpt2.samples.test["count"].tolist() == [256] * 3
    with pytest.raises(DataError, match="synthetic:3x4x5: it says the shape of images, and gpt2 takes texts"):
        load_workload(Choice("gpt2", "synthetic:3x4x5"))


@pytest.mark.parametrize("model", ["bert", "distilbert", "gpt2"])
def test_texts_can_be_trained_on(model: str) -> None:
    workload, _ = load_workload(Choice(model, "synthetic", model_size="tiny", length=5, train_size=3, test_size=2))
    net, task = workload.make_model(), workload.task
    batch = task.prepare(workload.samples.train, torch.float32)
    loss = task.loss_sum(task.forward(net, batch), batch)
    loss.backward()
    targets = 15 if model == "gpt2" else 3
    assert 0 < loss.item() / targets < 20
