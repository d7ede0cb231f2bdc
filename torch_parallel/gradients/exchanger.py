"""One thread a rank that performs exchanges beside backward, several at a time, and sleeps while none can go on.

An operation is a generator of waits (`transport/channels.py`). The exchanger runs each as far as it goes, then the
next; where all wait it sleeps in the kernel until a peer, or this rank's own training thread, rings, or until the first
emulated message is there. So it uses no processor that backward could have.

    training    | backward of layer 3 | of layer 2 | of layer 1 |  next forward
                        | ready             | ready       | ready
    exchanger   . . . . [ bucket 0 . . . [ 1 ] . 0 ] . . [ 2 ] . .          a dot: asleep
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import torch

from torch_parallel.status import RUNNING
from torch_parallel.transport.base import Transport
from torch_parallel.transport.bells import Bells
from torch_parallel.transport.channels import Channel, Steps, Wait
from torch_parallel.transport.signals import SLICE_S, Patience, WaitTimeout


class Operation:
    """One in flight."""

    def __init__(self, number: int, channel: Channel, steps: Steps, deadline_s: float) -> None:
        self.number = number
        self.channel = channel
        self.wait: Wait | None = None
        self.is_done = False
        self._steps = steps
        self._deadline_s = deadline_s
        self._patience: Patience | None = None

    def advance(self) -> bool:
        """Goes on as far as it can; whether that was at all. Raises what its steps raise."""
        moved = False
        while not self.is_done and (self.wait is None or self.wait.is_over()):
            moved, self._patience = True, None
            self.wait = next(self._steps, None)
            self.is_done = self.wait is None
        return moved

    def be_patient(self) -> None:
        """Raises TransportError where nobody will come, or nobody has for too long."""
        wait = self.wait
        if wait is None or wait.peer is None:
            return
        if self._patience is None:
            status, compare = self.channel.status, self.channel._signals.compare
            self._patience = Patience(status, [wait.peer], self._deadline_s, wait.is_over, compare)
        try:
            self._patience.check()
        except WaitTimeout as timeout:
            raise self.channel.failed(timeout, wait.doing) from None


class Exchanger:
    """The thread of one rank. `next_operation()`, called in it, gives what is to be started now, if anything is."""

    def __init__(
        self,
        transport: Transport,
        bells: Bells,
        next_operation: Callable[[], Operation | None],
        may_start: Callable[[], bool],
        ended: Callable[[int], None],
        deadline_s: float,
    ) -> None:
        self._deadline_s = deadline_s
        self._transport, self._bells = transport, bells
        self._next_operation, self._may_start, self._ended = next_operation, may_start, ended
        self.in_flight: list[Operation] = []
        self._moves = 0  # operations begun and ended
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="exchanger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ring(self) -> None:
        """There may be something to start."""
        self._bells.ring(self._transport.rank)

    def wait_until(self, come: Callable[[], bool], idle: Wait | None) -> None:
        """Sleeps until what the thread does has made it so. While nothing is in flight it is `idle` that is waited for.

        Raises what an operation has raised, and WaitTimeout for `idle`.
        """
        status, start_s, whom = self._transport.status, time.perf_counter(), -1
        patience: Patience | None = None
        seen = self._moves

        def goes_on() -> bool:
            return come() or (idle is not None and idle.is_over())

        while self._error is None and not come():
            under_way = [*self.in_flight]
            waits = [wait for each in under_way if (wait := each.wait) is not None and wait.peer is not None]
            wait = waits[0] if waits else None if under_way else idle
            if wait is not None and wait.peer is not None:
                whom = wait.peer
                status.waiting(whom, wait.doing)
            if under_way or idle is None or idle.peer is None or seen != self._moves:
                patience, seen = None, self._moves
            elif patience is None:
                patience = Patience(status, [idle.peer], self._deadline_s, goes_on, lambda: None)
            else:
                patience.check()
            with self._changed:
                if self._error is None and not come():
                    if not self._thread.is_alive():
                        raise RuntimeError("the exchanger has ended: make no step after close()")
                    self._changed.wait(SLICE_S)
        if self._error is not None:
            raise self._error
        if whom >= 0:
            status.done_waiting()
            self._transport.waited_s[whom] += time.perf_counter() - start_s

    def close(self) -> None:
        """Ends the thread, whatever it is doing."""
        self._closed = True
        self.ring()
        self._thread.join()

    def _run(self) -> None:
        board, rank = self._transport.status.board, self._transport.rank
        try:
            with torch.no_grad():
                while not self._closed and board.over(rank) == RUNNING:
                    if not self._advance():
                        self._sleep()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._changed.notify_all()

    def _advance(self) -> bool:
        moved = False
        while (operation := self._next_operation()) is not None:
            self._moves += 1
            self.in_flight.append(operation)
            moved = True
        for operation in [*self.in_flight]:
            if operation.advance():
                moved = True
            if operation.is_done:
                self._moves += 1
                self.in_flight.remove(operation)
                self._ended(operation.number)
                with self._changed:
                    self._changed.notify_all()
        return moved

    def _sleep(self) -> None:
        heard = self._bells.lie_down()
        try:
            waits = [operation.wait for operation in self.in_flight if operation.wait is not None]
            if self._closed or self._may_start() or any(wait.is_over() for wait in waits):
                return
            self._bells.sleep(heard, _seconds(waits))
        finally:
            self._bells.get_up()
        for operation in self.in_flight:
            operation.be_patient()


def _seconds(waits: Iterable[Wait]) -> float:
    """Until the first message is there; not much longer than a moment, to look around then."""
    now_s = time.perf_counter()
    return max(0.0, min([SLICE_S, *(wait.until_s - now_s for wait in waits if wait.until_s)]))
