"""When buckets leave, and in which order: buckets of one rank, and a list in the place of the exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from torch_parallel.gradients.buckets import Bucket
from torch_parallel.gradients.pipeline import Pipeline
from torch_parallel.transport.buffer import SharedBuffer


class Scales(nn.Module):
    """x times some of a, b and c, in that order: gradients come in the reverse one. All are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, x: Tensor, names: str = "abc") -> Tensor:
        for name in names:
            x = x * self.get_parameter(name)
        return x.sum()


def share(numel: int, dtype: torch.dtype) -> SharedBuffer:
    return SharedBuffer([torch.zeros(numel, dtype=dtype)], rank=0)


def pipeline_of(model: nn.Module, *groups: str) -> tuple[Pipeline, list[Bucket], list[str]]:
    """A bucket for each group of parameters, and what happens: a bucket that leaves, with its gradients' sum."""
    log: list[str] = []
    buckets = [
        Bucket(index, [(name, model.get_parameter(name)) for name in group], share)
        for index, group in enumerate(groups)
    ]
    for bucket in buckets:
        bucket.zero()
    return Pipeline(buckets, lambda each: log.append(f"{each.index}: {each.gradients.sum():g}"), None), buckets, log


def begin_step(pipeline: Pipeline, buckets: list[Bucket]) -> None:
    pipeline.begin_step()
    for bucket in buckets:
        bucket.zero()


def test_a_bucket_leaves_as_soon_as_all_its_gradients_have_come() -> None:
    """With x = [2, 3] every gradient is [2, 3]. That of c comes first, then b's, then a's."""
    model = Scales()
    pipeline, _, log = pipeline_of(model, "c", "ba")
    for name in "abc":
        model.get_parameter(name).register_post_accumulate_grad_hook(lambda each, name=name: log.append(name))
    with pipeline.during_backward():
        model(torch.tensor([2.0, 3.0])).backward()
    assert log == ["0: 5", "c", "b", "1: 10", "a"]  # bucket 0 had left before b's gradient came
    pipeline.finish()
    assert len(log) == 5


def test_whatever_order_gradients_come_in_buckets_leave_in_one_order() -> None:
    """All ranks must exchange in one order, and one may use parameters in another order than its peers."""
    model = Scales()
    pipeline, _, log = pipeline_of(model, "a", "b", "c")
    with pipeline.during_backward():
        model(torch.tensor([2.0, 3.0])).backward()
        assert log == ["0: 5", "1: 5", "2: 5"]  # all when a's has come, which is last


def test_buckets_leave_in_the_order_that_they_are_told_to_from_the_next_step_on() -> None:
    """That of backward is c, b, a: places 2, 1, 0 of the buckets a, b, c."""
    model = Scales()
    pipeline, buckets, log = pipeline_of(model, "a", "b", "c")
    with pipeline.during_backward():
        model(torch.tensor([2.0, 3.0])).backward()
    pipeline.finish()
    assert pipeline.places == [2, 1, 0]
    pipeline.leave_in_order_of([2.0, 1.0, 0.0])
    log.clear()
    begin_step(pipeline, buckets)
    model.b.register_post_accumulate_grad_hook(lambda _: log.append("b has come"))
    with pipeline.during_backward():
        model(torch.tensor([2.0, 3.0])).backward()
    assert log == ["2: 5", "1: 5", "b has come", "0: 5"]


def test_a_bucket_that_backward_has_not_completed_has_the_last_place() -> None:
    model = Scales()
    pipeline, buckets, log = pipeline_of(model, "b", "c", "a")
    with pipeline.during_backward():
        model(torch.tensor([2.0, 3.0]), "ac").backward()
    pipeline.finish()
    assert pipeline.places == [3, 0, 1] and log == ["0: 0", "1: 5", "2: 5"]
    begin_step(pipeline, buckets)
    pipeline.finish()  # a step without samples
    assert pipeline.places == [3, 3, 3]
    pipeline.leave_in_order_of([6.0, 3.0, 6.0])  # ties are left in the order of the buckets
    log.clear()
    pipeline.finish()
    assert [entry[0] for entry in log] == ["1", "0", "2"]


def test_a_backward_that_raised_leaves_nothing_behind_for_the_next_step() -> None:
    def fail(gradient: Tensor) -> None:
        raise ValueError("in the middle of backward")

    model = Scales()
    pipeline, buckets, log = pipeline_of(model, "c", "b", "a")
    handle = model.b.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle of backward"), pipeline.during_backward():
        model(torch.tensor([2.0, 3.0])).backward()
    assert log == ["0: 5"]
    handle.remove()
    begin_step(pipeline, buckets)
    with pipeline.during_backward():
        model(torch.tensor([2.0, 3.0])).backward()
    assert log[1:] == ["0: 5", "1: 5", "2: 5"]


def test_nor_for_a_step_without_a_backward() -> None:
    """That of a rank without samples, whose peers count on every bucket."""
    model = Scales()
    pipeline, buckets, log = pipeline_of(model, "c", "b", "a")
    handle = model.a.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError), pipeline.during_backward():
        model(torch.tensor([2.0, 3.0])).backward()
    assert log == ["0: 5", "1: 5"]
    handle.remove()
    begin_step(pipeline, buckets)
    pipeline.finish()
    assert log[2:] == ["0: 0", "1: 0", "2: 0"] and pipeline.places == [3, 3, 3]


def test_what_got_a_second_gradient_when_it_was_complete_waits_for_the_end_from_then_on() -> None:
    """c's gradient comes twice in one backward, as activation checkpointing that enters autograd again makes it. In the
    first step the bucket of a holds it up; in the next the order would let it leave too soon."""
    model = Scales()
    pipeline, buckets, log = pipeline_of(model, "a", "c", "b")
    for _ in range(2):
        with pipeline.during_backward():
            model(torch.tensor([2.0, 3.0]), "c").backward()
            model(torch.tensor([2.0, 3.0])).backward()
        pipeline.finish()
        assert sorted(log) == ["0: 5", "1: 10", "2: 5"]
        assert pipeline.places == [1, 3, 0]  # b, a, and at the end c
        pipeline.leave_in_order_of([1.0, 3.0, 0.0])
        begin_step(pipeline, buckets)
        last, log[:] = log[-1], []
    assert last == "1: 10"


def test_what_is_not_used_leaves_when_backward_is_over_and_holds_up_what_is_behind() -> None:
    model = Scales()
    pipeline, buckets, log = pipeline_of(model, "c", "b", "a")
    with pipeline.during_backward():
        model(torch.tensor([2.0, 3.0]), "ac").backward()
    assert log == ["0: 5"]
    pipeline.finish()
    assert log == ["0: 5", "1: 0", "2: 5"]
    begin_step(pipeline, buckets)  # and the next step begins anew
    with pipeline.during_backward():
        model(torch.tensor([2.0, 3.0])).backward()
    assert log[3:] == ["0: 5", "1: 5", "2: 5"]


def test_of_several_micro_batches_only_the_last_sends() -> None:
    model = Scales()
    pipeline, _, log = pipeline_of(model, "c", "b", "a")
    model(torch.tensor([2.0, 3.0])).backward()
    assert log == []
    with pipeline.during_backward():
        model(torch.tensor([1.0, 1.0]), "ca").backward()
    assert log == ["0: 7"]  # b's is complete as it is, which only the end of backward shows
    pipeline.finish()
    assert log == ["0: 7", "1: 5", "2: 7"]


def test_a_rank_without_samples_sends_zeros_in_the_same_order() -> None:
    pipeline, _, log = pipeline_of(Scales(), "c", "b", "a")
    pipeline.finish()
    assert log == ["0: 0", "1: 0", "2: 0"]


def test_a_gradient_that_comes_after_its_bucket_has_left_is_an_error() -> None:
    """As activation checkpointing that enters autograd again makes them."""
    model = Scales()
    pipeline, buckets, _ = pipeline_of(model, "c", "b", "a")
    with pipeline.during_backward():
        model(torch.tensor([2.0, 3.0])).backward()
        with pytest.raises(RuntimeError, match=r"parameter c got a gradient twice .*--no_overlap"):
            model(torch.tensor([2.0, 3.0]), "c").backward()
    pipeline.finish()
    begin_step(pipeline, buckets)
    model(torch.tensor([2.0, 3.0]), "c").backward()


def test_gradients_reach_their_buffer_on_the_stream_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a bucket is complete autograd's tensors are dropped: another stream might read what is no longer theirs."""
    model = Scales()
    pipeline, buckets, log = pipeline_of(model, "c", "ba")

    @contextmanager
    def on_stream() -> Iterator[None]:
        log.append(f"another stream, loose {[len(bucket._loose) for bucket in buckets]}")
        yield
        log.append("back")

    monkeypatch.setattr(pipeline, "_on_stream", on_stream)
    with pipeline.during_backward():
        model(torch.tensor([2.0, 3.0])).backward()
    assert log == ["another stream, loose [0, 0]", "0: 5", "back", "another stream, loose [0, 0]", "1: 10", "back"]
