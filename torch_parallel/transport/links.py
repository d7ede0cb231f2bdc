"""Emulated links: a receive from another node takes as long as its bytes would take over both nodes' network cards.

Each direction of a NIC is a resource with a time at which it is free again, in memory that all ranks share; all ranks
of a machine read one clock. A message takes its place in the queue of the sender's egress, then in the queue of the
receiver's ingress, which takes the bytes as they come:

  egress    |...others' messages...|===== n / B_out =====|
  ingress        |..others'..|      |======= n / B_in =======|     + latency
            now                                                     the receive returns

so that it ends at max(now, both free) + n/B + latency where both have bandwidth B. Who asks first is served first. The
message is really copied or added meanwhile; what is left of its time, the receiver sleeps.

A link is reserved when the receiver has woken up, not when the sender signalled: a transfer takes some hundredths to a
tenth of a millisecond more than this, so 2 % or less where it takes about 8 ms or longer.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from torch_parallel.topology import Topology
from torch_parallel.transport.buffer import Pull
from torch_parallel.transport.signals import WaitTimeout

SPIN_S = 0.001
"""The end of a sleep is not exact; the last millisecond is spent looking at the clock."""


class FileLock:
    """Mutual exclusion of processes: a lock on the first byte of a file that all have open; the kernel frees the lock
    of a process that dies.

    `with lock:` raises WaitTimeout at the deadline. It does not exclude threads of one process.
    """

    def __init__(self, fd: int, deadline_s: float) -> None:
        self._fd = fd
        self._deadline_s = deadline_s

    def __enter__(self) -> None:
        start_s = time.perf_counter()
        while not self._taken():  # the others hold it for microseconds
            if time.perf_counter() - start_s > self._deadline_s:
                raise WaitTimeout(f"the lock of the emulated links was not free for {self._deadline_s:.1f} s")
            os.sched_yield()

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def _taken(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError:
            return False
        return True


class EmulatedLinks:
    """One rank's end of the links; `memory`, of all ranks, holds `bytes_needed(topology)` bytes, zero at first."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        memory: memoryview,
        lock: AbstractContextManager[object],
        deadline_s: float,
    ) -> None:
        self._topology = topology
        self._rank = rank
        self._free_s = memory.cast("d")  # of each NIC: egress, ingress
        self._lock = lock
        self._by_one_thread = threading.Lock()  # the other lock keeps processes apart alone
        self._deadline_s = deadline_s

    @property
    def within_one_node(self) -> bool:
        """Whether nothing crosses a link."""
        return self._topology.node_count == 1

    @staticmethod
    def bytes_needed(topology: Topology | None) -> int:
        return 0 if topology is None else 2 * 8 * len(topology.bytes_per_s)

    def slowed(self, pull: Pull) -> Pull:
        """The same receive, taking its time where it comes from another node. Set-up; returns what to perform."""
        source, operation, theirs, reduce = pull
        if self._is_near(source):
            return pull

        def over_the_link(theirs: Tensor) -> None:
            end_s = self._reserve(source, self._rank, theirs.nbytes)
            operation(theirs)
            sleep_until(end_s)

        slow: Callable[[Tensor], Any] = over_the_link
        return source, slow, theirs, reduce

    def send(self, peer: int, nbytes: int) -> None:
        """Returns when so many bytes of this rank's have arrived at `peer`. Raises WaitTimeout."""
        if not self._is_near(peer):
            sleep_until(self._reserve(self._rank, peer, nbytes))

    def arrival_s(self, source: int, nbytes: int) -> float:
        """When so many bytes from `source` are here, of `time.perf_counter`; 0 if nothing lies between. Raises
        WaitTimeout."""
        return 0.0 if self._is_near(source) else self._reserve(source, self._rank, nbytes)

    def _is_near(self, peer: int) -> bool:
        """Whether nothing lies between this rank and that."""
        return self._topology.node_of[peer] == self._topology.node_of[self._rank]

    def _reserve(self, source: int, to: int, nbytes: int) -> float:
        """Takes the message's place in both queues; returns when it has arrived.

        Raises WaitTimeout where that is past the deadline.
        """
        topology, free_s = self._topology, self._free_s
        if nbytes == 0:  # a signal: it waits behind nothing
            return time.perf_counter() + topology.latency_s
        sender, receiver = topology.nic_of[source], topology.nic_of[to]
        egress, ingress = 2 * sender, 2 * receiver + 1
        with self._by_one_thread, self._lock:
            now_s = time.perf_counter()
            leaves_s = max(now_s, free_s[egress])
            enters_s = max(leaves_s, free_s[ingress])
            left_s = leaves_s + nbytes / topology.bytes_per_s[sender]
            entered_s = enters_s + nbytes / topology.bytes_per_s[receiver]
            end_s = max(left_s, entered_s) + topology.latency_s
            if end_s - now_s > self._deadline_s:
                raise WaitTimeout(
                    f"{nbytes:,} bytes from rank {source} take {end_s - now_s:.1f} s over the emulated link, longer "
                    f"than the deadline of {self._deadline_s:g} s"
                )
            free_s[egress], free_s[ingress] = left_s, entered_s
        return end_s


def sleep_until(end_s: float) -> None:
    """Returns at `end_s` of `time.perf_counter`, to some microseconds if there is a processor."""
    left_s = end_s - time.perf_counter()
    if left_s > SPIN_S:
        time.sleep(left_s - SPIN_S)
    while time.perf_counter() < end_s:
        os.sched_yield()
