"""Quantities as people write them, `100mbit` or `50us`, as numbers in bytes a second and in seconds; and back."""

from __future__ import annotations

import math
import re

BYTES_PER_S = {
    "bit": 1 / 8,
    "kbit": 1e3 / 8,
    "mbit": 1e6 / 8,
    "gbit": 1e9 / 8,
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
}
"""Bits in any case of letters. Bytes exactly so, for some write Gb for a gigabit and others for a gigabyte."""
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bytes_per_s(text: str) -> float:
    """`1gbit`, `100mbit/s`, `2.5GB`: a rate > 0 in bytes a second; k, M and G are powers of 1000. Raises ValueError."""
    text = text.strip().removesuffix("/s")
    rate = _parse(text.lower() if text.lower().endswith("bit") else text, BYTES_PER_S)
    if not rate:
        raise ValueError(
            f"{text!r} is no bandwidth: write a number > 0 and one of {', '.join(BYTES_PER_S)}, as in 1gbit"
        )
    return rate


def parse_seconds(text: str) -> float:
    """`50us`, `1.5ms`, `2s`: a time >= 0 in seconds. Raises ValueError."""
    seconds = _parse(text.strip(), SECONDS)
    if seconds is None:
        raise ValueError(f"{text!r} is no time: write a number and one of us, ms, s, as in 50us")
    return seconds


def bytes_text(nbytes: int) -> str:
    """`24 B`, `39.9 KiB`, `25 MiB`: to four digits."""
    exponent = min(max(nbytes.bit_length() - 1, 0) // 10, 3)
    return f"{nbytes / 1024**exponent:.4g} {('B', 'KiB', 'MiB', 'GiB')[exponent]}"


def _parse(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Zµ]+)", text, flags=re.ASCII)
    if match is None or match[2] not in units:
        return None
    value = float(match[1]) * units[match[2]]
    return value if math.isfinite(value) else None
