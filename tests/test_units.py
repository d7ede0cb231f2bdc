"""Quantities as people write them."""

from __future__ import annotations

import pytest

from torch_parallel.units import bytes_text, parse_bytes_per_s, parse_seconds


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("8bit", 1),
        ("8 kbit", 1_000),
        ("1mbit", 125_000),
        ("100mbit", 12_500_000),
        ("1gbit", 125_000_000),
        ("10Gbit/s", 1_250_000_000),
        ("2.5GBIT", 312_500_000),
        (" .5 Mbit ", 62_500),
        ("3B", 3),
        ("3kB", 3_000),
        ("3MB/s", 3_000_000),
        ("1.5GB", 1_500_000_000),
    ],
)
def test_bandwidths(text: str, bytes_per_s: float) -> None:
    assert parse_bytes_per_s(text) == pytest.approx(bytes_per_s, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["", "1", "gbit", "0gbit", "-1gbit", "1Gb", "1gb", "1mB", "1e9bit", "infgbit", "1gbit/h", "1 g bit", "٣gbit"],
)
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no bandwidth: .* as in 1gbit"):
        parse_bytes_per_s(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50us", 5e-5), ("50µs", 5e-5), ("1.5ms", 1.5e-3), ("2 s", 2), ("0s", 0), ("10ms", 0.01)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "5", "ms", "-5ms", "5min", "5MS", "nan s", "1e3s", "9" * 400 + "s"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no time: .* as in 50us"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (24, "24 B"), (1023, "1023 B"), (1024, "1 KiB"), (40864, "39.91 KiB"), (25 << 20, "25 MiB")]
    + [((1 << 20) - 1, "1024 KiB"), (3 << 29, "1.5 GiB"), (1 << 41, "2048 GiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text
