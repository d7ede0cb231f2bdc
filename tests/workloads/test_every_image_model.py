"""MNIST, CIFAR-10, digits and a folder of images, each with every model for images: one step on a few samples."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from torch_parallel.workloads.dataset import Dataset
from torch_parallel.workloads.load import Choice, load_workload, of_images
from torch_parallel.workloads.models import IMAGES, MODELS
from torch_parallel.workloads.models.sizes import IMAGE_SIDES
from torch_parallel.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
OF_IMAGES = [name for name, model in MODELS.items() if IMAGES in model.takes]


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCH_PARALLEL_DATA", raising=False)


def write_mnist(folder: Path) -> None:
    """Ten images of each part, in the real format."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for part in ("train", "t10k"):
        pixels = torch.randint(256, (10, 28, 28), generator=generator, dtype=torch.uint8).numpy().tobytes()
        images = struct.pack(">4I", 0x803, 10, 28, 28) + pixels
        labels = struct.pack(">2I", 0x801, 10) + bytes(range(10))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def one_step(workload: Workload, device: str, rows: int = 4) -> tuple[list[int], Tensor]:
    """The shape that the model is fed, and the mean loss, after which every parameter has a gradient."""
    task = workload.task
    with torch.device(device):
        model = workload.make_model()
    train = {name: each[:rows] for name, each in workload.samples.train.items()}
    batch = {name: each.to(device) for name, each in task.prepare(train, torch.float32).items()}
    loss = task.loss_sum(task.forward(model, batch), batch)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return list(batch["inputs"].shape), loss.detach() / rows


@pytest.mark.parametrize("model", OF_IMAGES)
@pytest.mark.parametrize("data", ["mnist", "cifar10", "digits", "folder"])
def test_one_step(model: str, data: str, tmp_path: Path) -> None:
    size = "tiny" if MODELS[model].sizes else None
    if data == "mnist":
        write_mnist(tmp_path / "mnist")
    if data == "folder":
        for name in ("a", "b"):
            (tmp_path / "pictures" / name).mkdir(parents=True)
            for number in range(4):
                Image.effect_noise((50, 40 + number), 60).convert("RGB").save(
                    tmp_path / f"pictures/{name}/{number}.png"
                )
    choice = Choice(model, {"folder": "pictures"}.get(data, data), data_dir=str(tmp_path), model_size=size)
    if data == "cifar10":  # its files have a test of their own
        images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        targets = torch.arange(8)
        workload = of_images(Dataset("cifar10", images, targets, images, targets, 10), choice)
    else:
        workload, _ = load_workload(choice)
    side = {"mnist": 28, "cifar10": 32, "digits": 8, "folder": 64}[data] if size is None else IMAGE_SIDES[size]
    channels = 1 if data in ("mnist", "digits") else 3
    on_meta = model == "torchvision_vit"  # 114 million parameters at its only size: shapes alone
    shape, loss = one_step(workload, "meta" if on_meta else "cpu")
    assert shape == [4, channels, side, side] and loss.shape == ()
    assert on_meta or 0 < loss.item() < 30
