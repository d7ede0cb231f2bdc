"""Buckets alone, on one rank's memory: no process, no exchange."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from torch_parallel.gradients import buckets
from torch_parallel.gradients.buckets import Bucket, cut_into_buckets
from torch_parallel.gradients.layout import in_memory_order, views_of
from torch_parallel.transport.buffer import SharedBuffer


def share(numel: int, dtype: torch.dtype) -> SharedBuffer:
    return SharedBuffer([torch.zeros(numel, dtype=dtype)], rank=0)


def named(*parameters: Parameter) -> list[tuple[str, Parameter]]:
    return [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]


def names(groups: list[list[tuple[str, Parameter]]]) -> list[list[str]]:
    return [[name for name, _ in group] for group in groups]


def test_groups_are_in_reverse_order_and_within_their_size() -> None:
    parameters = named(*(Parameter(torch.zeros(size)) for size in (1, 2, 3, 4, 100, 5)))
    # 4 bytes an element, at most 40 bytes: 5 | 100 alone | 4 3 2 are 9 elements | the last group has at most 5 bytes
    assert names(cut_into_buckets(parameters, 40)) == [["p5"], ["p4"], ["p3", "p2", "p1"], ["p0"]]
    # all fit into one
    assert names(cut_into_buckets(parameters, 460)) == [["p5", "p4", "p3", "p2", "p1", "p0"]]
    # one too few: the last has at most 57 bytes, 14 elements, of which 1 2 3 4 are 10
    assert names(cut_into_buckets(parameters, 459)) == [["p5", "p4"], ["p3", "p2", "p1", "p0"]]


def test_every_trainable_parameter_is_in_exactly_one_group_whatever_the_size() -> None:
    """201 tensors: a cut by count into groups of 50 once left the last one out."""
    parameters = named(*(Parameter(torch.zeros(1 + index % 7)) for index in range(201)))
    for bucket_bytes in (1, 4, 28, 50, 200, 10**9):
        groups = names(cut_into_buckets(parameters, bucket_bytes))
        assert sorted(name for group in groups for name in group) == sorted(name for name, _ in parameters)


def test_one_dtype_a_group_and_frozen_parameters_in_none() -> None:
    parameters = named(
        Parameter(torch.zeros(2)),
        Parameter(torch.zeros(2, dtype=torch.float64)),
        Parameter(torch.zeros(2), requires_grad=False),
        Parameter(torch.zeros(2)),
    )
    assert names(cut_into_buckets(parameters, 1000)) == [["p3", "p0"], ["p1"]]


def test_tied_parameters_are_exchanged_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    (group,) = cut_into_buckets(model.named_parameters(), 1000)
    assert [name for name, _ in group] == ["0.weight"]


def test_nothing_trainable_is_an_error() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        cut_into_buckets(named(Parameter(torch.zeros(2), requires_grad=False)), 1000)
    with pytest.raises(ValueError, match="no trainable parameter"):
        cut_into_buckets([], 1000)


def test_views_lie_one_behind_the_other_in_their_shapes() -> None:
    parameters = named(Parameter(torch.zeros(2, 3)), Parameter(torch.tensor(0.0)), Parameter(torch.zeros(0, 4)))
    flat = torch.arange(7.0)
    matrix, scalar, empty = views_of(flat, parameters)
    assert matrix.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert scalar.shape == () and scalar.item() == 6
    assert empty.shape == (0, 4)
    assert matrix.data_ptr() == flat.data_ptr()  # views, not copies


def test_views_have_the_strides_of_their_parameters_if_those_have_no_gaps() -> None:
    """As autograd makes gradients, which fused optimizers rely on."""
    columns = Parameter(torch.zeros(3, 2).t())  # [2, 3], element (i, j) at 2 j + i
    image = Parameter(torch.zeros(2, 3, 1, 4).to(memory_format=torch.channels_last))
    with_gaps = Parameter(torch.zeros(2, 4)[:, ::2])
    flat = torch.arange(34.0)
    turned, of_image, dense = views_of(flat, named(columns, image, with_gaps))
    assert turned.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert of_image.stride() == image.stride() and of_image[1, 2, 0, 3].item() == 6 + 12 + 3 * 3 + 2
    assert dense.tolist() == [[30, 31], [32, 33]] and dense.is_contiguous()
    assert all(view.untyped_storage().data_ptr() == flat.data_ptr() for view in (turned, of_image, dense))
    for view, parameter in ((turned, columns), (of_image, image), (dense, with_gaps)):
        values = torch.randn(parameter.shape)
        view.copy_(values)
        first = view.storage_offset()
        assert torch.equal(in_memory_order(values, parameter), flat[first : first + parameter.numel()])


def test_backward_writes_into_the_flat_buffer_and_marks_what_was_used() -> None:
    used, unused = Parameter(torch.tensor([1.0, 2.0])), Parameter(torch.tensor([5.0]))
    bucket = Bucket(0, named(used, unused), share)
    bucket.zero()
    (3 * used).sum().backward()
    bucket.publish()
    # two gradients of 3, nothing for the unused one, then the marks
    assert bucket.shared.local.tolist() == [3, 3, 0, 1, 0]
    bucket.collect()
    assert used.grad is not None and used.grad.tolist() == [3, 3]
    assert used.grad.data_ptr() == bucket.flat.data_ptr()
    assert unused.grad is None


def test_nothing_of_the_last_step_is_left() -> None:
    """A parameter used in one step and not in the next, while another starts anew."""
    first, second = Parameter(torch.tensor([1.0, 2.0])), Parameter(torch.tensor([5.0]))
    bucket = Bucket(0, named(first, second), share)
    bucket.zero()
    (3 * first).sum().backward()
    second.sum().backward()
    bucket.publish()
    assert bucket.shared.local.tolist() == [3, 3, 1, 1, 1]
    bucket.zero()
    (4 * second).sum().backward()
    bucket.complete()
    assert bucket.gradients.tolist() == [0, 0, 4]
    bucket.publish()
    assert bucket.shared.local.tolist() == [0, 0, 4, 0, 1]


def test_what_must_be_done_before_gradients_are_written_is_asked_for_before_the_first() -> None:
    """What the last step left in the bucket is still there then, and every parameter has it."""
    first, second = Parameter(torch.tensor([1.0])), Parameter(torch.tensor([1.0]))
    seen: list[list[float]] = []
    bucket = Bucket(0, named(first, second), share, lambda: seen.append(bucket.flat[:2].tolist()))
    for factor in (2.0, 3.0):
        bucket.zero()
        (factor * first + 10 * factor * second).backward()
        bucket.complete()
    assert seen == [[0, 0], [2, 20]]


def test_a_mark_of_any_rank_keeps_the_gradient() -> None:
    """The exchange sums the marks; collect acts on the sum."""
    first, second = Parameter(torch.tensor([1.0])), Parameter(torch.tensor([1.0]))
    bucket = Bucket(0, named(first, second), share)
    bucket.zero()
    bucket.publish()
    bucket.shared.local.add_(torch.tensor([0.5, 0.0, 1.0, 0.0]))  # another rank used the first, and not the second
    bucket.collect()
    assert first.grad is not None and first.grad.item() == 0.5
    assert second.grad is None


def test_what_a_rank_uses_itself_needs_no_mark_of_others() -> None:
    """Then nobody reads the marks, which on a GPU would mean waiting for it. Here the sum of marks is lost."""
    weight = Parameter(torch.tensor([1.0]))
    bucket = Bucket(0, named(weight), share)
    bucket.zero()
    (2 * weight).backward()
    bucket.publish()
    assert bucket.shared.local.tolist() == [2, 1]
    bucket.shared.local[1] = 0.0
    bucket.collect()
    assert weight.grad is not None and weight.grad.tolist() == [2]


def test_sums_that_lie_elsewhere() -> None:
    """`.grad` is where the sums are until the next step, or, if they are not to be written, a copy."""
    used, unused = Parameter(torch.tensor([1.0, 2.0])), Parameter(torch.tensor([5.0]))
    bucket = Bucket(0, named(used, unused), share)
    for copy in (False, True, False):
        bucket.zero()
        (3 * used).sum().backward()
        bucket.publish()
        bucket.result = torch.tensor([30.0, 40.0, 0.0, 2.0, 0.0])  # what an exchange would put there
        bucket.collect(copy)
        assert used.grad is not None and used.grad.tolist() == [30, 40]
        assert unused.grad is None
        assert bucket.gradients.tolist() == [30, 40, 0]
        used.grad.mul_(2)
        assert bucket.result[:2].tolist() == ([30, 40] if copy else [60, 80])
    bucket.zero()
    assert used.grad is None
    (7 * used).sum().backward()
    bucket.complete()
    assert used.grad is not None and used.grad.tolist() == [7, 7]
    assert used.grad.data_ptr() == bucket.shared.local.data_ptr() == bucket.gradients.data_ptr()


@pytest.mark.parametrize("together_bytes", [0, 1 << 20])
def test_micro_batches_add_up(together_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether gradients go to the buffer one by one or together."""
    monkeypatch.setitem(buckets.COPIED_TOGETHER_BYTES, "cpu", together_bytes)
    weight = Parameter(torch.tensor([0.0]))
    bucket = Bucket(0, named(weight), share)
    bucket.zero()
    for x in (1.0, 2.0, 4.0):
        (weight * x).sum().backward()
    bucket.publish()
    assert bucket.shared.local.tolist() == [7, 1]


@pytest.mark.parametrize("together_bytes", [0, 1 << 20])
def test_a_cleared_grad_is_found_again(together_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """optimizer.zero_grad() sets .grad to None; the next backward then makes a tensor outside the buffer."""
    monkeypatch.setitem(buckets.COPIED_TOGETHER_BYTES, "cpu", together_bytes)
    weight = Parameter(torch.tensor([2.0]))
    bucket = Bucket(0, named(weight), share)
    bucket.zero()
    weight.grad = None
    (weight * 3).sum().backward()
    bucket.complete()
    assert bucket.gradients.tolist() == [3]
    assert weight.grad is not None and weight.grad.data_ptr() == bucket.flat.data_ptr()


def test_gradients_that_are_copied_together_are_so_with_the_last_of_their_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the midst of backward: so their memory is free for the next bucket's."""
    copies: list[int] = []
    copy_together = torch._foreach_copy_

    def counted(views: list[Tensor], gradients: list[Tensor]) -> None:
        copies.append(len(views))
        copy_together(views, gradients)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    late, early, unused = Parameter(torch.zeros(3)), Parameter(torch.zeros(2)), Parameter(torch.zeros(1))
    first, last = Bucket(0, named(early), share), Bucket(1, named(late, unused), share)
    for bucket in (first, last):
        bucket.zero()
    (2 * early).sum().backward()
    assert copies == [1] and first.gradients.tolist() == [2, 2]
    (5 * late).sum().backward()
    assert copies == [1]  # `unused` may still come
    last.complete()
    assert copies == [1, 1] and last.gradients.tolist() == [5, 5, 5, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_non_contiguous_and_expanded_gradients(dtype: torch.dtype) -> None:
    matrix, wide = Parameter(torch.zeros(2, 3, dtype=dtype)), Parameter(torch.zeros(3, dtype=dtype))
    bucket = Bucket(0, named(matrix, wide), share)
    bucket.zero()
    weights = torch.arange(6, dtype=dtype).view(3, 2)
    ((matrix.t() * weights).sum() + wide.sum()).backward()  # one arrives transposed, one with stride 0
    bucket.complete()
    assert bucket.gradients.tolist() == [0, 2, 4, 1, 3, 5, 1, 1, 1]


def test_a_parameters_gradients_go_to_the_last_bucket_that_was_made_of_it() -> None:
    """As where a model gets a new strategy, because a parameter was frozen and is not any more."""
    weight = Parameter(torch.zeros(2))
    old = Bucket(0, named(weight), share)
    old.zero()
    (3 * weight).sum().backward()
    old.leave()
    new = Bucket(0, named(weight), share)
    new.zero()
    (5 * weight).sum().backward()
    new.complete()
    assert new.gradients.tolist() == [5, 5]
    assert old.gradients.tolist() == [3, 3]


def test_sparse_gradients_are_added_into_the_dense_buffer() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    bucket = Bucket(0, list(embedding.named_parameters()), share)
    bucket.zero()
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    bucket.complete()
    assert bucket.gradients.view(4, 2).tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]
