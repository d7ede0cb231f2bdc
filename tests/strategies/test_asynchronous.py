"""Servers that do not wait for everybody, in scripts whose every number is worked out by hand.

Server and workers are threads of this process; each push of a worker is let go by the script, so what comes after what
is no matter of luck.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from torch_parallel.communicator import Communicator
from torch_parallel.status import StatusBoard
from torch_parallel.strategies import ASYNCHRONOUS, FromScratch
from torch_parallel.transport.local import LocalGroup

LIMIT_S = 20.0


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))


@dataclass
class Began:
    """A worker began a step: with the samples from `first` on, with this weight."""

    first: int
    w: float


@dataclass
class Script:
    """One epoch of `samples` samples. `gradient(worker, w, first)` is that of each sample of a step."""

    name: str
    workers: int
    samples: int
    batch_size: int
    gradient: Callable[[int, float, int], float]
    lr: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Script:
        self.group = LocalGroup(self.workers + 1, LIMIT_S)
        self.changed = threading.Condition()
        self.began: list[list[Began]] = [[] for _ in range(self.workers)]
        self.ended: dict[int, float] = {}  # by rank: the weight that it holds at the end
        self.errors: list[BaseException] = []
        self.updates = 0
        self.go = [threading.Semaphore(0) for _ in range(self.workers)]
        self.server: FromScratch
        threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(self.workers + 1)]
        self.threads = threads
        for thread in threads:
            thread.start()
        self.wait(lambda: all(self.began))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            for thread in self.threads:
                thread.join(LIMIT_S)
                assert not thread.is_alive()
            assert not self.errors

    def wait(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: what() or bool(self.errors), LIMIT_S)
        if self.errors:
            raise self.errors[0]

    def push(self, *workers: int) -> None:
        """Lets these workers push, and waits until each has begun its next step or has ended its epoch."""
        before = [len(each) for each in self.began]
        self.let_go(*workers)
        for worker in workers:
            self.wait(lambda worker=worker: len(self.began[worker]) > before[worker])  # type: ignore[misc]

    def let_go(self, *workers: int) -> None:
        for worker in workers:
            self.go[worker].release()

    def stays(self, what: Callable[[], Any]) -> bool:
        """Whether it is the same after a while as now."""
        now = what()
        with self.changed:
            return not self.changed.wait_for(lambda: what() != now, 0.3)

    def _run(self, rank: int) -> None:
        try:
            self._train(rank)
        except BaseException as error:
            self.errors.append(error)
        with self.changed:
            self.changed.notify_all()

    def _train(self, rank: int) -> None:
        board = StatusBoard(memoryview(bytearray(StatusBoard.bytes_needed(self.workers + 1))), self.workers + 1)
        communicator = Communicator(self.group.transport(rank), board.reporter(rank), None, server_count=1)  # type: ignore[arg-type]
        model = Weight()
        strategy = ASYNCHRONOUS[self.name](
            model,
            lambda named: torch.optim.SGD([each for _, each in named], lr=self.lr),
            communicator,
            **self.options,
        )
        if rank == 0:
            self.server = strategy
        for share in strategy.shares(self.samples, self.batch_size):
            strategy.begin_step()
            if rank > 0:
                w, first = model.w.item(), share.places.start
                with self.changed:
                    self.began[rank - 1].append(Began(first, w))
                    self.changed.notify_all()
                assert self.go[rank - 1].acquire(timeout=LIMIT_S)
                count = share.places.stop - first
                (model.w * self.gradient(rank - 1, w, first) * count / share.count).backward()
            strategy.step()
            with self.changed:
                self.updates += rank == 0
                self.changed.notify_all()
        self.ended[rank] = model.w.item()


# ---- every push an update ----


def by_slice(worker: int, w: float, first: int) -> float:
    """1, 10, 100, ... for slices 0, 1, 2, ...: the digits of the weight say which are in it."""
    return 10.0**first


def test_a_push_is_an_update_and_its_staleness_is_counted() -> None:
    """Five slices of one sample. Worker 1 works on slice 1 while worker 0 has slices 0 and 2 applied."""
    with Script("param_server_async", workers=2, samples=5, batch_size=2, gradient=by_slice) as script:
        assert script.began == [[Began(0, 0.0)], [Began(1, 0.0)]]
        script.push(0)  # slice 0, of 0 updates ago
        script.push(0)  # slice 2, 0
        assert script.began[0][1:] == [Began(2, -1.0), Began(3, -101.0)]
        script.push(1)  # slice 1, 2
        assert script.began[1][1:] == [Began(4, -111.0)]
        script.let_go(0)  # slice 3, 1: pulled after the second update, applied as the fourth
        script.wait(lambda: script.updates == 4)
        script.let_go(1)  # slice 4, 1
    assert script.ended == dict.fromkeys(range(3), -11111.0)  # all take the last update's parameters
    assert script.server.tally is not None
    assert script.server.tally.staleness_counts == [2, 2, 1]
    assert script.server.tally.updates == 5


def test_two_pushes_from_the_same_version_make_two_steps() -> None:
    """f = (w - 3)^2 / 2 from w = 0 at a rate of 0.1: both gradients are -3, and each is a step of 0.3. One step of
    their mean, the synchronous one, would be 0.3."""
    script = Script("param_server_async", 2, samples=2, batch_size=2, gradient=lambda worker, w, first: w - 3, lr=0.1)
    with script:
        assert script.began == [[Began(0, 0.0)], [Began(1, 0.0)]]
        script.let_go(0, 1)
    assert script.ended == dict.fromkeys(range(3), pytest.approx(0.6))
    assert script.server.tally is not None and script.server.tally.staleness_counts == [1, 1]


def test_a_worker_that_does_not_come_holds_nobody_up() -> None:
    """Worker 1 keeps its first slice for itself; the other does all the rest of the epoch."""
    with Script("param_server_async", workers=2, samples=12, batch_size=2, gradient=by_slice) as script:
        for _ in range(10):
            script.push(0)
        script.let_go(0)
        script.wait(lambda: script.updates == 11)
        assert [began.first for began in script.began[0]] == [0, *range(2, 12)]
        script.let_go(1)
    assert script.ended[2] == -111111111111.0
    assert script.server.tally is not None
    assert script.server.tally.staleness_counts == [11] + [0] * 10 + [1]


def test_fewer_slices_than_workers() -> None:
    script = Script("param_server_async", workers=1, samples=1, batch_size=5, gradient=by_slice)
    with script:
        script.let_go(0)
    assert script.ended == {0: -1.0, 1: -1.0}


def test_a_push_that_is_not_finite_is_left_out_and_counted() -> None:
    def gradient(worker: int, w: float, first: int) -> float:
        return float("inf") if first == 1 else 10.0**first

    options = {"skip_not_finite": True}
    with Script("param_server_async", 2, samples=4, batch_size=2, gradient=gradient, options=options) as script:
        script.push(0)
        script.push(1)  # the infinite one
        script.let_go(0)
        script.wait(lambda: script.updates == 3)
        script.let_go(1)
    assert script.ended == dict.fromkeys(range(3), -1101.0)
    assert script.server.skipped_steps == 1
    assert script.server.tally is not None
    assert (script.server.tally.updates, script.server.tally.staleness_counts) == (3, [2, 2])


def test_each_update_is_clipped() -> None:
    options = {"clip_norm": 2.0}
    with Script("param_server_async", 1, samples=3, batch_size=1, gradient=by_slice, options=options) as script:
        script.push(0)
        script.push(0)
        script.let_go(0)
    assert script.ended[1] == pytest.approx(-(1 + 2 + 2), abs=1e-6)


# ---- bounded staleness ----


def towards(worker: int, w: float, first: int) -> float:
    """Of w^2 / 2 + k w, with k = 1 on one worker and 3 on the other."""
    return w + (1.0, 3.0)[worker]


def test_a_worker_may_be_k_steps_ahead_and_no_more() -> None:
    """K = 2: while worker 1 keeps step 0, worker 0 pushes steps 0, 1 and 2, and does not begin step 3."""
    options = {"staleness": 2}
    with Script(
        "param_server_bounded", 2, samples=16, batch_size=2, gradient=towards, lr=0.125, options=options
    ) as script:
        script.push(0)
        script.push(0)
        script.let_go(0)
        assert script.stays(lambda: len(script.began[0]))
        assert [began.w for began in script.began[0]] == [0.0, 0.0, 0.0]
        assert script.updates == 0
        script.push(1)  # step 0 is complete: mean gradient (1 + 3) / 2, so version 1 is -0.25
        script.wait(lambda: len(script.began[0]) == 4)
        assert script.began[0][3] == Began(6, -0.25)
        script.let_go(0)
        assert script.stays(lambda: len(script.began[0]))
        assert script.updates == 1
        script.let_go(*[0] * 10, *[1] * 10)
    # Every version follows from what the workers say that they held; and they held none older than two steps.
    versions, counts = [0.0], [0, 0, 0]
    for step in range(8):
        held = [began[step].w for began in script.began]
        versions.append(versions[-1] - 0.125 * (held[0] + 1 + held[1] + 3) / 2)
        for w in held:
            counts[step - max(index for index, version in enumerate(versions[: step + 1]) if version == w)] += 1
    assert versions == sorted(set(versions), reverse=True)  # exact in binary, and each tells its number
    assert script.ended == dict.fromkeys(range(3), versions[8])
    assert script.server.tally is not None
    assert script.server.tally.staleness_counts == counts[: max(step for step in range(3) if counts[step]) + 1]
    assert script.server.tally.updates == 8


def test_without_staleness_nobody_begins_before_all_have_pushed() -> None:
    with Script("param_server_bounded", 2, samples=4, batch_size=2, gradient=by_slice) as script:
        script.let_go(0)
        assert script.stays(lambda: len(script.began[0]))
        script.push(1)
        script.wait(lambda: len(script.began[0]) == 2)
        assert script.began[0][1] == Began(2, -5.5)
        script.let_go(0, 1)
    assert script.ended[0] == -(1 + 10 + 100 + 1000) / 2


# ---- backup workers ----


def test_the_late_push_is_thrown_away_and_the_rest_is_rescaled() -> None:
    """Batches of 4 in shares of 2, 1 and 1; the gradients of a sample are 1, 10 and 100 on the three workers."""

    def gradient(worker: int, w: float, first: int) -> float:
        return (1.0, 10.0, 100.0)[worker]

    options = {"backup_workers": 1}
    with Script("param_server_backup", 3, samples=12, batch_size=4, gradient=gradient, options=options) as script:
        script.push(0, 1)  # (1 + 1 + 10) / 3
        assert [script.began[worker][1] for worker in (0, 1)] == [Began(4, -4.0), Began(6, -4.0)]
        script.push(0, 1)
        assert script.began[0][2] == Began(8, -8.0)
        script.push(2)  # of step 0: late
        assert script.began[2] == [Began(3, 0.0), Began(11, -8.0)]  # and it goes on with step 2
        script.let_go(0, 2)  # (1 + 1 + 100) / 3
        script.wait(lambda: script.updates == 3)
        script.let_go(1)  # late too, and the epoch is over
    assert script.ended == dict.fromkeys(range(4), pytest.approx(-42.0, abs=1e-12))
    tally = script.server.tally
    assert tally is not None
    assert (tally.updates, tally.dropped, tally.samples_lost, tally.staleness_counts) == (3, 3, 3, [6])


def test_samples_are_waited_for_where_workers_outnumber_them() -> None:
    """One sample for three workers, of whom two have nothing to do: they do not make the step without it."""
    options = {"backup_workers": 2}
    with Script("param_server_backup", 3, samples=1, batch_size=1, gradient=by_slice, options=options) as script:
        script.let_go(1, 2)
        assert script.stays(lambda: script.updates)
        script.let_go(0)
    assert script.ended == dict.fromkeys(range(4), -1.0)
    assert script.server.tally is not None
    assert (script.server.tally.dropped, script.server.tally.samples_lost) == (0, 0)
