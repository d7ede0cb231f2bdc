"""The names of GPUs are asked of a library that stands in for the driver's, and no CUDA is started for them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from torch_parallel import results
from torch_parallel.cards import card_names

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
