"""The names of the GPUs, asked of the driver's library for management (NVML): to ask CUDA would start it.

A process that has started CUDA holds memory on a GPU, and children that are forked from it cannot use any.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96


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
