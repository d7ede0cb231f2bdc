"""Messages arrive whole, in order, or not at all; whoever stops half-way holds nobody up."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_parallel.mailbox import Inbox, Outbox, mailbox


@pytest.fixture
def both_ends() -> Iterator[tuple[Inbox, Outbox]]:
    inbox, outbox = mailbox()
    yield inbox, outbox
    inbox.close()
    if outbox.fd >= 0:
        os.close(outbox.fd)


def received(inbox: Inbox, count: int, limit_s: float = 10.0) -> list[tuple[str, Any]]:
    """The next `count` messages."""
    messages: list[tuple[str, Any]] = []
    end = time.monotonic() + limit_s
    while len(messages) < count:
        assert time.monotonic() < end
        messages += inbox.receive()
        time.sleep(0.001)
    return messages


def test_in_order_and_then_nothing(both_ends: tuple[Inbox, Outbox]) -> None:
    inbox, outbox = both_ends
    assert inbox.receive() == []
    outbox.send("message", {"loss": 0.5})
    outbox.send("message", None)
    outbox.send("result", [1, "two", (3.0,)])
    assert inbox.receive() == [("message", {"loss": 0.5}), ("message", None), ("result", [1, "two", (3.0,)])]
    assert inbox.receive() == []


def test_more_than_the_pipe_holds(both_ends: tuple[Inbox, Outbox]) -> None:
    inbox, outbox = both_ends
    tensor = torch.arange(5_000_000, dtype=torch.float32)  # 20 MB; a pipe holds 64 kB
    sender = threading.Thread(target=outbox.send, args=("result", tensor))
    sender.start()
    ((kind, content),) = received(inbox, 1)
    sender.join(10)
    assert kind == "result" and torch.equal(content, tensor)


def test_half_a_message_is_no_message(both_ends: tuple[Inbox, Outbox]) -> None:
    """A worker was killed while it wrote: what came before counts, the rest never does, and nobody waits for it."""
    inbox, outbox = both_ends
    outbox.send("message", "whole")
    os.write(outbox.fd, struct.pack("<Q", 1000) + b"the first bytes")
    os.close(outbox.fd)
    outbox.fd = -1
    start_s = time.monotonic()
    assert inbox.receive() == [("message", "whole")]
    assert inbox.receive() == []
    assert time.monotonic() - start_s < 1


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 20])
def test_a_message_that_arrives_in_two_pieces(both_ends: tuple[Inbox, Outbox], cut: int) -> None:
    inbox, outbox = both_ends
    other_inbox, other_outbox = mailbox()
    other_outbox.send("message", "in two pieces")
    whole = os.read(other_inbox.fd, 1000)
    other_inbox.close()
    os.close(other_outbox.fd)
    os.write(outbox.fd, whole[:cut])
    assert inbox.receive() == []
    os.write(outbox.fd, whole[cut:] + whole)
    assert inbox.receive() == [("message", "in two pieces")] * 2


def test_what_cannot_be_pickled_leaves_the_pipe_as_it_was(both_ends: tuple[Inbox, Outbox]) -> None:
    inbox, outbox = both_ends
    with pytest.raises(TypeError, match="lock"):
        outbox.send("message", threading.Lock())
    outbox.send("message", "after it")
    assert inbox.receive() == [("message", "after it")]


def _cannot_be_loaded() -> None:
    raise ValueError("not here")


class CannotBeLoaded:
    def __reduce__(self) -> tuple[Any, ...]:
        return _cannot_be_loaded, ()


def test_what_cannot_be_read_raises(both_ends: tuple[Inbox, Outbox]) -> None:
    inbox, outbox = both_ends
    outbox.send("message", CannotBeLoaded())
    with pytest.raises(ValueError, match="not here"):
        inbox.receive()


def test_threads_may_send_at_the_same_time(both_ends: tuple[Inbox, Outbox]) -> None:
    """Each message is larger than the pipe, so that a write is never whole."""
    inbox, outbox = both_ends

    def send_all(sender: int) -> None:
        for index in range(5):
            outbox.send("message", (sender, index, bytes([sender]) * 200_000))

    senders = [threading.Thread(target=send_all, args=(sender,), daemon=True) for sender in range(4)]
    for thread in senders:
        thread.start()
    messages = [content for _, content in received(inbox, 20)]
    assert sorted((sender, index) for sender, index, _ in messages) == [(s, i) for s in range(4) for i in range(5)]
    for sender, _, body in messages:
        assert body == bytes([sender]) * 200_000


def test_closing_twice_does_no_harm() -> None:
    inbox, outbox = mailbox()
    os.close(outbox.fd)
    inbox.close()
    inbox.close()
    assert inbox.fd == -1
