"""Gradients that are NaN or infinite are found, whatever their type, and those that are only huge are not taken for
such."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torch_parallel.gradients.buckets import Bucket
from torch_parallel.gradients.finite import FiniteCheck, NamedCheck, NotFinite, SumNotFinite
from torch_parallel.transport.buffer import SharedBuffer

CPU = torch.device("cpu")
on_gpu = pytest.param(
    torch.device("cuda", 0),
    id="later, on a gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU")],
)
at_once_and_later = pytest.mark.parametrize(
    "enqueues_on", [pytest.param(None, id="at once"), pytest.param(CPU, id="later"), on_gpu]
)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def bucket_on(device: torch.device, dtype: torch.dtype) -> Bucket:
    """Of a [3] and b [2, 2]; `gradients` are [7], all 1."""
    parameters = [(name, nn.Parameter(torch.zeros(*shape, device=device, dtype=dtype))) for name, shape in SHAPES]

    def share(numel: int, dtype: torch.dtype) -> SharedBuffer:
        return SharedBuffer([torch.zeros(numel, dtype=dtype, device=device)], 0)

    bucket = Bucket(0, parameters, share)
    bucket.gradients.fill_(1.0)
    return bucket


SHAPES = (("a", (3,)), ("b", (2, 2)))


def steps(check: FiniteCheck, *looks: Callable[[], object]) -> None:
    """A step whose gradients are looked at so, and the beginning of the next one."""
    for look in looks:
        look()
    check.end_step()
    check.confirm(late=True)


@at_once_and_later
@every_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("place", "name"), [(2, "a"), (6, "b")])
def test_it_is_named(enqueues_on: torch.device | None, dtype: torch.dtype, value: float, place: int, name: str) -> None:
    bucket = bucket_on(enqueues_on or CPU, dtype)
    check = FiniteCheck([bucket], enqueues_on)
    steps(check, lambda: check.look_at_own(bucket))
    bucket.gradients[place] = value
    with pytest.raises(NotFinite, match=f"^the gradient of {name} is NaN or infinite$") as raised:
        steps(check, lambda: check.look_at_own(bucket))
    assert raised.value.late == (enqueues_on is not None) and not isinstance(raised.value, SumNotFinite)
    with pytest.raises(SumNotFinite, match=f"workers' gradients of {name} is NaN"):
        steps(check, lambda: check.look_at_sums(0, bucket.gradients, bucket.named_views()))
    bucket.gradients.fill_(1.0)
    steps(check, lambda: check.look_at_own(bucket))


@at_once_and_later
@every_dtype
def test_what_is_huge_is_finite(enqueues_on: torch.device | None, dtype: torch.dtype) -> None:
    """Also where its sum, and the sum of its squares, are not."""
    bucket = bucket_on(enqueues_on or CPU, dtype)
    check = FiniteCheck([bucket], enqueues_on)
    bucket.gradients.fill_(torch.finfo(dtype).max)
    steps(
        check,
        lambda: check.look_at_own(bucket),
        lambda: check.look_at_sums(0, bucket.gradients, bucket.named_views()),
        lambda: check.look_at_sums(0, bucket.gradients[:0], ()),
    )


@at_once_and_later
def test_who_gave_what_is_huge_is_not_blamed_for_what_a_peer_added(enqueues_on: torch.device | None) -> None:
    """The sums lie where this rank's own gradients were when it is asked whose the infinity was."""
    bucket = bucket_on(enqueues_on or CPU, torch.float32)
    check = FiniteCheck([bucket], enqueues_on)
    bucket.gradients.fill_(torch.finfo(torch.float32).max)
    with pytest.raises(SumNotFinite):
        steps(
            check,
            lambda: check.look_at_own(bucket),
            lambda: bucket.gradients[:1].fill_(math.nan),
            lambda: check.look_at_sums(0, bucket.gradients, bucket.named_views()),
        )


@at_once_and_later
def test_buckets_of_several_types_are_looked_at_together(enqueues_on: torch.device | None) -> None:
    buckets = [bucket_on(enqueues_on or CPU, torch.float64), bucket_on(enqueues_on or CPU, torch.float32)]
    buckets[1].index = 1
    check = FiniteCheck(buckets, enqueues_on)
    buckets[0].gradients.fill_(1e300)
    steps(check, *(lambda bucket=bucket: check.look_at_own(bucket) for bucket in buckets))
    buckets[1].gradients[4] = math.inf
    with pytest.raises(NotFinite, match="gradient of b is"):
        steps(check, *(lambda bucket=bucket: check.look_at_own(bucket) for bucket in buckets))


later = pytest.mark.parametrize("device", [pytest.param(CPU, id="later"), on_gpu])


@later
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_it_is_named_a_step_later_by_who_looks_at_each(device: torch.device, value: float) -> None:
    """Though the gradients have other values by then, are of several types, one is empty, and one was not there."""
    a, b, c = (
        torch.full((3,), torch.finfo(dtype).max, dtype=dtype, device=device)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    )
    empty = torch.empty(0, 3, device=device)
    check = NamedCheck(4, device)
    check.confirm()
    for _ in range(3):
        check.look([("a", a), ("empty", empty), ("b", b), ("c", c)])
    c[1] = value
    check.look([("a", a), ("c", c)])
    c.zero_()
    with pytest.raises(NotFinite, match=r"^the gradient of c is NaN or infinite$") as raised:
        check.look([("a", a), ("b", b), ("c", c)])
    assert raised.value.late
    b[0] = value
    check.look([("b", b)])
    with pytest.raises(NotFinite, match="gradient of b is") as raised:
        check.confirm()
    assert not raised.value.late
    for nothing in ([], [("empty", empty)]):
        check.look(nothing)
        check.confirm()
