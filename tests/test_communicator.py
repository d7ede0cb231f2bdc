"""Collective operations on ordinary tensors, and who is who; on threads where processes show nothing more."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transports import in_threads

from torch_parallel import communicator as communicator_module
from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import WorkerFailure, launch
from torch_parallel.mailbox import mailbox
from torch_parallel.status import StatusBoard
from torch_parallel.transport.base import TransportError
from torch_parallel.transport.local import LocalGroup


def on_threads(world_size: int, function: Callable[..., Any], *arguments: Any, server_count: int = 0) -> list[Any]:
    """The results of `function(communicator, *arguments)`, by rank."""
    group = LocalGroup(world_size, deadline_s=10.0)
    board = StatusBoard(memoryview(bytearray(StatusBoard.bytes_needed(world_size))), world_size)
    results: dict[int, Any] = {}
    inbox, outbox = mailbox()

    def body(rank: int) -> None:
        communicator = Communicator(group.transport(rank), board.reporter(rank), outbox, server_count)
        try:
            results[rank] = function(communicator, *arguments)
        except Exception as error:
            results[rank] = error

    in_threads(body, world_size, limit_s=30)
    inbox.close()
    for rank in range(world_size):
        if isinstance(results[rank], Exception):
            raise results[rank]
    return [results[rank] for rank in range(world_size)]


def filled(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> Tensor:
    numel = torch.Size(shape).numel()
    return ((rank + 1) * torch.arange(1, numel + 1)).to(dtype).view(shape)


def all_reduce_shapes(communicator: Communicator, algorithm: str) -> list[Tensor]:
    results = []
    for shape in [(), (1,), (0, 3), (7,), (2, 3), (2, 1, 5)]:
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            tensor = filled(shape, communicator.rank, dtype)
            assert communicator.all_reduce(tensor, algorithm) is tensor
            results.append(tensor)
    return results


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_all_reduce_of_every_shape(world_size: int, algorithm: str) -> None:
    total = world_size * (world_size + 1) // 2  # of 1, 2, ..., world_size: 6 for 3 ranks, 10 for 4, 36 for 8
    for results in on_threads(world_size, all_reduce_shapes, algorithm):
        remaining = iter(results)
        for shape in [(), (1,), (0, 3), (7,), (2, 3), (2, 1, 5)]:
            for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
                tensor = next(remaining)
                assert tensor.shape == shape and tensor.dtype == dtype
                assert torch.equal(tensor, total * filled(shape, 0, dtype))


def all_reduce_views(communicator: Communicator) -> dict[str, Tensor]:
    rank, base = communicator.rank, torch.zeros(4, 6)
    transposed, column, parameter = base.t(), base[:, 2], torch.nn.Parameter(torch.full((3,), float(rank)))
    base += torch.arange(24.0).view(4, 6) + rank
    communicator.all_reduce(column)
    after_column = base.clone()
    communicator.all_reduce(transposed)
    communicator.all_reduce(parameter)
    return {"after column": after_column, "base": base, "parameter": parameter.detach()}


def test_all_reduce_of_views_and_parameters() -> None:
    start = torch.arange(24.0).view(4, 6)
    for rank, results in enumerate(on_threads(3, all_reduce_views)):
        expected = start + rank
        expected[:, 2] = 3 * start[:, 2] + 3  # ranks add 0, 1 and 2
        assert torch.equal(results["after column"], expected)
        everything = 3 * start + 3
        everything[:, 2] = 9 * start[:, 2] + 9
        assert torch.equal(results["base"], everything)
        assert results["parameter"].tolist() == [3.0, 3.0, 3.0]


MANY_SIZES = [*range(1, 140), 5000, 3, 70_000, 139, 1]


def many_sizes(communicator: Communicator, sizes: list[int]) -> list[int]:
    """More sizes than are remembered, up and down, in two dtypes, each result one number that must be everywhere."""
    sums = []
    for numel in sizes:
        for dtype in (torch.int64, torch.float64):
            result = communicator.all_reduce(torch.full((numel,), 10**communicator.rank * numel, dtype=dtype))
            assert bool((result == result[0]).all())
            sums.append(int(result[0]))
    return sums


def test_one_buffer_serves_every_size() -> None:
    expected = [111 * numel for numel in MANY_SIZES for _ in range(2)]
    assert on_threads(3, many_sizes, MANY_SIZES) == [expected] * 3


def broadcast_from_all(communicator: Communicator) -> list[list[float]]:
    seen = []
    for root in range(communicator.world_size):
        tensor = torch.full((2, 2), float(communicator.rank))
        assert communicator.broadcast(tensor, root) is tensor
        seen.append(tensor.flatten().tolist())
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_broadcast_from_every_root(world_size: int) -> None:
    assert on_threads(world_size, broadcast_from_all) == [[[float(r)] * 4 for r in range(world_size)]] * world_size


def plain_collectives(communicator: Communicator) -> dict[str, Any]:
    """Each on small tables: rank r's row k holds 10 r + k, twice."""
    c, n = communicator, communicator.world_size
    table = torch.tensor([[10.0 * c.rank + k] * 2 for k in range(n)])
    given, row = table.clone(), torch.tensor([[c.rank]], dtype=torch.int64)
    held = {
        "reduce": c.reduce(torch.full((3,), 10.0**c.rank), root=n - 1).tolist(),
        "gather": c.gather_tensor(row, root=n - 1),
        "scatter": c.scatter(table, root=n - 1).tolist(),
        "all_gather": c.all_gather(row).tolist(),
        "scalars": c.all_gather(torch.tensor(float(c.rank))).tolist(),
        "reduce_scatter": c.reduce_scatter(table).tolist(),
        "all_to_all": c.all_to_all(table).tolist(),
        "empty": tuple(c.all_to_all(torch.ones(n, 0, 2)).shape),
    }
    assert torch.equal(table, given)  # what is passed in stays, but for all_reduce, reduce and broadcast
    return held


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_plain_collectives_by_hand(n: int) -> None:
    for rank, held in enumerate(on_threads(n, plain_collectives)):
        is_root = rank == n - 1
        assert held["reduce"] == [(10.0**n - 1) / 9 if is_root else 10.0**rank] * 3  # 1, 11, 111, ...
        assert (held["gather"] is None) != is_root
        if is_root:
            assert held["gather"].tolist() == [[[k]] for k in range(n)]
        assert held["scatter"] == [10.0 * (n - 1) + rank] * 2
        assert held["all_gather"] == [[[k]] for k in range(n)]
        assert held["scalars"] == [float(k) for k in range(n)]
        assert held["reduce_scatter"] == [10.0 * n * (n - 1) / 2 + n * rank] * 2
        assert held["all_to_all"] == [[10.0 * k + rank] * 2 for k in range(n)]
        assert held["empty"] == (n, 0, 2)


TABLE_OF_2 = "a table of shape [2, 4] has not one row for each of 3 ranks"


@pytest.mark.parametrize("name", ["scatter", "reduce_scatter", "all_to_all"])
def test_a_table_without_a_row_for_each_rank(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(TABLE_OF_2)):
        on_threads(3, lambda communicator: getattr(communicator, name)(torch.ones(2, 4)))


def test_alone_nothing_changes_and_nothing_is_sent() -> None:
    def alone(communicator: Communicator) -> tuple[list[float], list[float], list[int]]:
        tensor = torch.tensor([1.5, float("inf")])
        communicator.barrier()
        return (
            communicator.all_reduce(tensor).tolist(),
            communicator.broadcast(tensor).tolist(),
            communicator.transport.received_bytes,
        )

    assert on_threads(1, alone) == [([1.5, float("inf")], [1.5, float("inf")], [0])]


def gathered_in_pieces(c: Communicator, sizes: list[int], root: int) -> tuple[Any, int]:
    """What arrives, twice, and the bytes of the buffer that it went through."""
    thing = {"rank": c.rank, "bytes": bytes([c.rank + 1]) * sizes[c.rank]}
    first, second = c.gather(thing, root), c.gather(c.rank, root)
    assert second == (list(range(c.world_size)) if c.rank == root else None)
    return first, sum(each.local.numel() for (_, dtype), each in c._scratch.items() if dtype == torch.uint8)


@pytest.mark.parametrize(
    ("sizes", "root"), [([0, 0, 0], 0), ([5000, 0, 1], 1), ([1, 2048, 9000], 2), ([4096, 4096, 4096], 0), ([7777], 0)]
)
def test_objects_of_any_size_go_through_a_small_buffer(
    sizes: list[int], root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator_module, "GATHER_BYTES", 2048)
    results = on_threads(len(sizes), gathered_in_pieces, sizes, root)
    expected = [{"rank": rank, "bytes": bytes([rank + 1]) * size} for rank, size in enumerate(sizes)]
    assert [things for things, _ in results] == [expected if rank == root else None for rank in range(len(sizes))]
    assert max(buffer_bytes for _, buffer_bytes in results) <= 2048


@pytest.mark.parametrize("root", [-1, 3])
@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather_tensor", "scatter"])
def test_a_root_that_is_no_rank(name: str, root: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"root {root} is not a rank: ranks are 0..2")):
        on_threads(3, lambda communicator: getattr(communicator, name)(torch.ones(3), root))


def test_an_unknown_algorithm_is_named_with_the_known_ones() -> None:
    message = f"unknown algorithm 'star': choose from {', '.join(ALL_REDUCE)}"
    with pytest.raises(ValueError, match=re.escape(message)):
        on_threads(2, lambda communicator: communicator.all_reduce(torch.ones(1), "star"))


DIFFERENT = [
    (
        lambda c: c.all_reduce(torch.ones(3 + (c.rank == 1))),
        "rank 0 wants to all_reduce 3 elements of torch.float32 by ring, "
        "but rank 1 wants to all_reduce 4 elements of torch.float32 by ring",
    ),
    (
        lambda c: c.all_reduce(torch.ones(3, dtype=torch.float64 if c.rank == 1 else torch.float32)),
        "rank 0 wants to all_reduce 3 elements of torch.float32 by ring, "
        "but rank 1 wants to all_reduce 3 elements of torch.float64 by ring",
    ),
    (
        lambda c: c.broadcast(torch.ones(3), root=c.rank),
        "rank 0 wants to broadcast from rank 0 3 elements of torch.float32 by broadcast, "
        "but rank 1 wants to broadcast from rank 1 3 elements of torch.float32 by broadcast",
    ),
    (
        lambda c: c.barrier() if c.rank == 1 else c.all_reduce(torch.ones(3)),
        "rank 0 wants to all_reduce 3 elements of torch.float32 by ring, but rank 1 wants to meet at a barrier",
    ),
    (
        lambda c: c.share(5) if c.rank == 1 else c.barrier(),
        "rank 0 wants to meet at a barrier, but rank 1 wants to share 5 elements of torch.float32",
    ),
]


@pytest.mark.parametrize("operation, message", DIFFERENT)
def test_ranks_that_do_different_things_are_told_so(operation: Callable[[Communicator], Any], message: str) -> None:
    with pytest.raises(TransportError) as raised:
        on_threads(2, operation)
    assert str(raised.value) == f"call 1: {message}: all ranks must call the same operations in the same order"


def roles(communicator: Communicator) -> tuple[Any, ...]:
    c = communicator
    return c.rank, c.world_size, c.worker_count, c.worker_index, c.is_server, c.first_worker


@pytest.mark.parametrize(
    "servers, expected",
    [
        (0, [(0, 3, 3, 0, False, 0), (1, 3, 3, 1, False, 0), (2, 3, 3, 2, False, 0)]),
        (1, [(0, 3, 2, None, True, 1), (1, 3, 2, 0, False, 1), (2, 3, 2, 1, False, 1)]),
        (2, [(0, 3, 1, None, True, 2), (1, 3, 1, None, True, 2), (2, 3, 1, 0, False, 2)]),
    ],
)
def test_servers_come_first_and_are_no_workers(servers: int, expected: list[tuple[Any, ...]]) -> None:
    assert on_threads(3, roles, server_count=servers) == expected


# ---- in processes ----


@pytest.mark.parametrize("pipes", [False, True])
def test_the_same_in_processes(pipes: bool) -> None:
    sizes = [1, 2, 3, 70_000, 5, 1]
    expected = [111 * numel for numel in sizes for _ in range(2)]
    assert launch(many_sizes, 3, sizes, signal_pipes=pipes, threads=1, deadline_s=20.0) == [expected] * 3
    broadcasts = launch(broadcast_from_all, 3, signal_pipes=pipes, threads=1, deadline_s=20.0)
    assert broadcasts == [[[0.0] * 4, [1.0] * 4, [2.0] * 4]] * 3


def test_different_sizes_end_the_run_and_name_both() -> None:
    with pytest.raises(WorkerFailure) as raised:
        launch(lambda c: c.all_reduce(torch.ones(3 + c.rank)), 2, threads=1, deadline_s=10.0)
    text = str(raised.value)
    assert re.search(
        r"rank [01] failed: TransportError: call 1: rank [01] wants to all_reduce [34] elements of torch\.float32 by "
        r"ring, but rank [01] wants to all_reduce [34] elements of torch\.float32 by ring",
        text,
    )


def count_descriptors(communicator: Communicator) -> list[int]:
    counts = []
    for numel in (10, 3000, 100_000, *range(1, 400), 100_000):
        communicator.all_reduce(torch.ones(numel))
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


@pytest.mark.parametrize("pipes", [False, True])
def test_descriptors_stay_flat_in_a_worker(pipes: bool) -> None:
    for counts in launch(count_descriptors, 2, signal_pipes=pipes, threads=1, deadline_s=20.0):
        assert counts[0] == counts[2] == counts[-1] == max(counts)


def test_one_thread_at_a_time_calls() -> None:
    def work(communicator: Communicator) -> list[str]:
        said = []
        for call in (lambda: communicator.all_reduce(torch.ones(3)), communicator.barrier):
            with communicator._by_one_thread(), pytest.raises(TransportError) as raised:
                call()
            said.append(str(raised.value))
        return said

    for rank, said in enumerate(launch(work, 2, deadline_s=30.0)):
        expected = f"rank {rank}: two threads are in calls of one communicator; let them take turns, by a lock"
        assert said == [expected, expected]
