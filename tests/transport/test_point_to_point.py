"""Two ranks alone: who has come is seen without waiting, parts are read and written, and nobody else takes part."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transports import GPU_MARKS, MEMORIES, TRANSPORTS, every_transport, on_all_ranks

from torch_parallel.collectives import broadcast_from
from torch_parallel.launcher import WorkerFailure
from torch_parallel.transport.base import Transfer, Transport, TransportError

# by the kernel an operation ends with its readers, so `settle` leaves nothing
every_memory_and_gpus = pytest.mark.parametrize("kind", [*MEMORIES, pytest.param("gpu plain", marks=GPU_MARKS)])
every_transport_and_gpus = pytest.mark.parametrize("kind", [*TRANSPORTS, pytest.param("gpu plain", marks=GPU_MARKS)])


@every_transport_and_gpus
def test_a_look_takes_nothing_and_does_not_wait(kind: str) -> None:
    def look(transport: Transport) -> list[bool]:
        seen = []
        if transport.rank == 1:
            transport.hear(0, "the first word")
            transport.tell(0)
            transport.hear(0, "the last word")
        else:
            seen.append(transport.told(1))  # it says nothing before it has heard of us
            transport.tell(1)
            end = time.monotonic() + 10
            while not transport.told(1) and time.monotonic() < end:
                time.sleep(0.001)
            seen += [transport.told(1), transport.told(1)]
            transport.hear(1, "what was seen")
            seen.append(transport.told(1))
            transport.tell(1)
        return seen

    assert on_all_ranks(kind, 2, look)[0] == [False, True, True, False]


@every_transport_and_gpus
def test_whoever_comes_is_served_and_the_others_are_not_waited_for(kind: str) -> None:
    def serve(transport: Transport) -> Any:
        if transport.rank == 0:
            came: list[int] = []
            while len(came) < 2:  # rank 1 does not come before it is told to
                came += transport.arrivals([1, 2, 3], "anybody")
            waited_s = list(transport.waited_s)
            transport.tell(1)
            return sorted(came), transport.arrivals([1, 2, 3], "the last"), waited_s[1]
        if transport.rank == 1:
            transport.hear(0, "my turn")
        transport.tell(0)
        return None

    assert on_all_ranks(kind, 4, serve)[0] == ([2, 3], [1], 0.0)


@every_transport_and_gpus
def test_all_who_have_come_are_returned_in_rank_order(kind: str) -> None:
    def serve(transport: Transport) -> Any:
        if transport.rank == 0:
            end = time.monotonic() + 10
            while not all(transport.told(peer) for peer in (1, 2, 3)) and time.monotonic() < end:
                time.sleep(0.001)
            return transport.arrivals([1, 3], "two of them"), transport.arrivals([2], "the third")
        transport.tell(0)
        return None

    assert on_all_ranks(kind, 4, serve)[0] == ([1, 3], [2])


@every_transport_and_gpus
def test_reading_and_writing_the_part_of_one_peer(kind: str) -> None:
    def exchange(transport: Transport) -> Any:
        buffer = transport.share(3, torch.float64)
        buffer.local.fill_(10.0**transport.rank)
        seen: list[Transfer] = []
        transport.observer = seen.append
        if transport.rank == 0:
            for peer in (1, 2):
                transport.hear(peer, "filled")
            transport.read(buffer, 2, add=False, purpose="copied")
            transport.read(buffer, 1, add=True, purpose="added")
            transport.put(buffer, 2)
            transport.tell(2)
        else:
            transport.tell(0, pushed=[buffer])
            if transport.rank == 2:
                transport.hear(0, "the sum", put=[buffer])
        told = [(each.source, each.to, each.bytes, each.purpose, each.reduce) for each in seen]
        return buffer.local.tolist(), list(transport.received_bytes), told

    assert on_all_ranks(kind, 3, exchange) == [
        ([110.0] * 3, [0, 24, 24], [(2, 0, 24, "copied", False), (1, 0, 24, "added", True)]),
        ([10.0] * 3, [0, 0, 0], []),
        ([110.0] * 3, [24, 0, 0], [(0, 2, 24, "the sum", False)]),
    ]


@every_transport
def test_where_nobody_comes_all_are_named(kind: str) -> None:
    def wait(transport: Transport) -> None:
        if transport.rank == 0:
            transport.arrivals([1, 2], "a push of any worker")
        else:
            time.sleep(1)

    with pytest.raises((TransportError, WorkerFailure)) as raised:
        on_all_ranks(kind, 3, wait, deadline_s=0.3)
    assert "rank 0, a push of any worker: no signal from any of ranks 1, 2 for 0.3 s" in str(raised.value)


@every_memory_and_gpus
def test_memory_of_one_rank_that_all_reach(kind: str) -> None:
    def write(transport: Transport) -> Any:
        before, alone, after = (transport.share(5, torch.int64, owner) for owner in (None, 1, None))
        if transport.rank == 1:
            alone.local.copy_(torch.arange(5))
        transport.agree("look at it")
        untouched = all(not part.count_nonzero() for buffer in (before, after) for part in buffer.parts)
        return [len(part) for part in alone.parts], alone.parts[1].tolist(), untouched

    assert on_all_ranks(kind, 3, write) == [([0, 5, 0], [0, 1, 2, 3, 4], True)] * 3


@every_memory_and_gpus
def test_the_newest_messages_may_be_left_unread(kind: str) -> None:
    """Rank 1 reads the second message only after rank 0 has settled all but that one."""

    def leave_one(transport: Transport) -> list[float]:
        buffers = [transport.share(2, torch.float64) for _ in range(2)]
        if transport.rank == 0:
            for value, buffer in enumerate(buffers):
                buffer.local.fill_(value + 1.0)
                transport.perform(broadcast_from(0), buffer)
            transport.settle(leave=1)
            buffers[0].local.fill_(7.0)
            transport.settle(leave=1)  # nothing more to wait for
            transport.tell(1)
            transport.settle()
            buffers[1].local.fill_(7.0)
        else:
            transport.perform(broadcast_from(0), buffers[0])
            # the second message comes before the last word, so that what is waited for is seen in rank 0's memory
            end = time.monotonic() + 10
            while buffers[0].parts[0][0] != 7.0 and time.monotonic() < end:
                time.sleep(0.001)
            transport.perform(broadcast_from(0), buffers[1])
            transport.hear(0, "the last word")
        return [buffer.local[0].item() for buffer in buffers]

    assert on_all_ranks(kind, 2, leave_one, deadline_s=5) == [[7.0, 7.0], [1.0, 2.0]]
