"""The names of the GPUs, asked of the driver's library for management (NVML): to ask CUDA would start it.

A process that has started CUDA holds memory on a GPU, and children that are forked from it cannot use any.

And what these GPUs can do at most, by their names, which training is held to.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96


class Peak(NamedTuple):
    """Dense operations in a second, in units of 10**12, as the maker publishes them. None: the card has no such unit.

    "full" is float32 without tensor cores, which torch takes for matrix multiplications unless it is told otherwise.
    "tf32", "fp16" and "bf16" are those of tensor cores, with sums in float32.
    """

    full: float
    tf32: float | None
    fp16: float | None
    bf16: float | None


# From NVIDIA's data sheet of each card. Where it has figures with sparsity alone, half of them. Those of the RTX 4090
# are from the white paper of its architecture (Ada).
# The first whose words are all in a card's name holds, so a variant comes before what it is a variant of.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    ("GH200", Peak(67.0, 494.7, 989.4, 989.4)),
    ("H200 NVL", Peak(60.0, 417.5, 835.5, 835.5)),
    ("H200", Peak(67.0, 494.7, 989.4, 989.4)),
    ("H100 NVL", Peak(60.0, 417.5, 835.5, 835.5)),
    ("H100 PCIe", Peak(51.2, 378.2, 756.4, 756.4)),
    ("H100", Peak(67.0, 494.7, 989.4, 989.4)),
    ("A100", Peak(19.5, 156.0, 312.0, 312.0)),
    ("A10", Peak(31.2, 62.5, 125.0, 125.0)),
    ("V100 PCIe", Peak(14.0, None, 112.0, None)),
    ("V100", Peak(15.7, None, 125.0, None)),
    ("L4", Peak(30.3, 60.5, 121.0, 121.0)),
    ("T4", Peak(8.1, None, 65.0, None)),
    ("RTX 4090", Peak(82.6, 82.6, 165.2, 165.2)),
)
_LESS = {"mig", "laptop", "mobile", "d"}
"""Words in the names of parts of a card, of cards for laptops, and of an RTX 4090 that is made smaller."""


def peak_flops(card: str, precision: str = "full") -> float | None:
    """Dense floating-point operations that a card by this name can do in a second: see `Peak` for the precisions.

    None for a card that is not in the table, and for what it has no unit for. Raises ValueError for another precision.
    """
    if precision not in Peak._fields:
        raise ValueError(f"precision is {precision!r}; choose from {', '.join(Peak._fields)}")
    words = _words(card)
    if _LESS & words:
        return None
    for name, peak in _PEAKS:
        if _words(name) <= words:
            tera = getattr(peak, precision)
            return None if tera is None else 1e12 * tera
    return None


def utilisation(flops: float | None, seconds: float, cards: list[str], precision: str = "full") -> float | None:
    """The part of what these cards can do together that `flops` operations in so many seconds are, 0..1.

    None where the operations or the peak of a card are not known, or there is no card.
    """
    peaks = [peak_flops(card, precision) for card in cards]
    if flops is None or not peaks or seconds <= 0:
        return None
    known = [peak for peak in peaks if peak is not None]
    return flops / seconds / sum(known) if len(known) == len(peaks) else None


def _words(name: str) -> set[str]:
    """In lower case: "NVIDIA A100-SXM4-80GB" has nvidia, a100, sxm4, 80gb."""
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def card_names(nvml: Any = None) -> list[str]:
    """Of the GPUs that CUDA_VISIBLE_DEVICES lets this process see, in its order; [] where NVML does not tell."""
    try:
        nvml = nvml or ctypes.CDLL(_LIBRARY)
        _check(nvml.nvmlInit_v2())
        try:
            return _names(nvml)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, or an old one
        return []


def _names(nvml: Any) -> list[str]:
    count = ctypes.c_uint()
    _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    cards = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        _check(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
        cards.append(handle)
    uuids = [_text(nvml.nvmlDeviceGetUUID, card) for card in cards]
    return [_text(nvml.nvmlDeviceGetName, cards[index]) for index in visible(uuids)]


def visible(uuids: list[str]) -> list[int]:
    """Which of these CUDA shows: numbers or beginnings of names, up to the first that there is not; none twice."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in asked.split(","):
        word = word.strip()
        matches = [index for index, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
        if word.isdigit() and int(word) < len(uuids):
            matches = [int(word)]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return []
        chosen += matches
    return chosen


def _text(function: Any, card: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    _check(function(card, buffer, ctypes.c_uint(_TEXT_BYTES)))
    return buffer.value.decode(errors="replace")


def _check(code: int) -> None:
    if code:
        raise OSError(f"NVML answered {code}")
