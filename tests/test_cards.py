"""The names of GPUs are asked of a library that stands in for the driver's, and no CUDA is started for them; peaks."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from torch_parallel import results
from torch_parallel.cards import card_names, peak_flops, utilisation

UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]
NAMES = ["Card A", "Card B", "Card C"]


class Nvml:
    """Three cards; `refuses` is the function that answers with an error."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.refuses:
                return 9
            if name == "nvmlDeviceGetCount_v2":
                arguments[0]._obj.value = 3
            elif name == "nvmlDeviceGetHandleByIndex_v2":
                arguments[1]._obj.value = arguments[0] + 1
            elif name in ("nvmlDeviceGetName", "nvmlDeviceGetUUID"):
                texts = NAMES if name == "nvmlDeviceGetName" else UUIDS
                assert isinstance(arguments[0], ctypes.c_void_p) and arguments[0].value
                arguments[1].value = texts[arguments[0].value - 1].encode()
            return 0

        return function


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "ABC"),
        ("", ""),
        ("2,0", "CA"),
        (" 1 , 2", "BC"),
        ("GPU-cc,GPU-ab22", "CB"),
        ("GPU-a", ""),  # it may be the first or the second
        ("0,7,1", "A"),  # nothing from the first on that there is not
        ("1,-1,2", "B"),
        ("1,1", ""),
        ("MIG-1234", ""),
    ],
)
def test_the_cards_that_cuda_would_show(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml()
    assert card_names(nvml) == [f"Card {letter}" for letter in expected]
    assert (nvml.calls[0], nvml.calls[-1]) == ("nvmlInit_v2", "nvmlShutdown")


@pytest.mark.parametrize("refuses", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetName"])
def test_a_library_that_refuses_is_no_error(refuses: str) -> None:
    assert card_names(Nvml(refuses)) == []


def test_a_library_that_is_too_old_is_no_error() -> None:
    assert card_names(ctypes.CDLL(None)) == []


def test_what_is_told_of_the_machine_starts_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: Any) -> None:
        raise AssertionError("CUDA was started")

    for name in ("get_device_name", "get_device_properties", "_lazy_init", "init"):
        monkeypatch.setattr(torch.cuda, name, started)
    monkeypatch.setattr("torch_parallel.cards.ctypes.CDLL", lambda name: Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for built, expected in ((True, NAMES), (False, [])):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda built=built: built)
        assert results.environment()["cards"] == expected


@pytest.mark.parametrize(
    ("card", "full", "bf16"),
    [
        ("NVIDIA H200", 67, 989.4),
        ("NVIDIA H100 80GB HBM3", 67, 989.4),
        ("NVIDIA H100 PCIe", 51.2, 756.4),
        ("NVIDIA A100-SXM4-80GB", 19.5, 312),
        ("NVIDIA A100 80GB PCIe", 19.5, 312),
        ("Tesla V100-SXM2-16GB", 15.7, None),
        ("Tesla V100-PCIE-32GB", 14, None),
        ("NVIDIA L4", 30.3, 121),
        ("Tesla T4", 8.1, None),
        ("NVIDIA GeForce RTX 4090", 82.6, 165.2),
        # other cards, whose names hold those of known ones
        ("NVIDIA L40S", None, None),
        ("NVIDIA A10G", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("", None, None),
    ],
)
def test_peaks_as_they_are_published(card: str, full: float | None, bf16: float | None) -> None:
    for precision, tera in (("full", full), ("bf16", bf16)):
        assert peak_flops(card, precision) == (None if tera is None else pytest.approx(tera * 1e12))


def test_tensor_cores_have_half_in_tf32_and_old_ones_float16_alone() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert (peak_flops("Tesla T4", "tf32"), peak_flops("Tesla T4", "fp16")) == (None, 65e12)
    with pytest.raises(ValueError, match=r"^precision is 'half'; choose from full, tf32, fp16, bf16$"):
        peak_flops("Tesla T4", "half")


def test_utilisation_is_a_part_of_what_all_cards_can_do() -> None:
    """Two A100 do 624e12 operations in bf16 in a second, so 156e12 in half a second are half of what they can."""
    cards = 2 * ["NVIDIA A100-SXM4-80GB"]
    assert utilisation(156e12, 0.5, cards, "bf16") == pytest.approx(0.5)
    assert utilisation(39e12, 1.0, cards) == pytest.approx(1.0)
    for flops, of in ((None, cards), (156e12, []), (156e12, [*cards, "Card A"])):
        assert utilisation(flops, 0.5, of, "bf16") is None
