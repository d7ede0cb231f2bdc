"""The board of what every rank is doing, on ordinary memory."""

from __future__ import annotations

import time

import pytest

from torch_parallel.status import (
    COMPUTING,
    EVALUATING,
    EXCHANGING,
    PHASES,
    RETURNING,
    SAVING,
    STARTING,
    UPDATING,
    Status,
    StatusBoard,
)


def new_board(world_size: int) -> StatusBoard:
    return StatusBoard(memoryview(bytearray(StatusBoard.bytes_needed(world_size))), world_size)


def test_a_rank_that_has_only_begun() -> None:
    board = new_board(2)
    board.reporter(1)
    status = board.read(1)
    assert (status.phase, status.epoch, status.step, status.samples, status.waiting_for) == (STARTING, 0, 0, 0, None)
    assert str(status) == "rank 1 was starting"


def test_every_field_comes_back() -> None:
    board = new_board(3)
    reporter = board.reporter(1)
    assert reporter.phase(COMPUTING) == STARTING
    reporter.back_to(STARTING)
    assert reporter.phase(EXCHANGING) == STARTING
    reporter.step(2, 17, 1088)
    reporter.waiting(2, "gradients of bucket 3, round 1")
    status = board.read(1)
    expected = Status(1, EXCHANGING, 2, 17, 1088, status.silent_s, 2, "gradients of bucket 3, round 1")
    assert status == expected
    assert (
        str(status) == "rank 1 was exchanging step 17 of epoch 2, waiting for rank 2 (gradients of bucket 3, round 1)"
    )
    reporter.done_waiting()
    assert board.read(1).waiting_for is None
    assert str(board.read(1)) == "rank 1 was exchanging step 17 of epoch 2"


def test_waiting_for_rank_0_is_a_wait() -> None:
    board = new_board(1)
    board.reporter(0).waiting(0, "x")
    assert board.read(0).waiting_for == 0


def test_ranks_do_not_write_over_each_other() -> None:
    board = new_board(3)
    reporters = [board.reporter(rank) for rank in range(3)]
    for rank in (1, 0, 2):
        reporters[rank].phase(rank)
        reporters[rank].step(rank + 1, 10 + rank, 100 + rank)
        reporters[rank].waiting(2 - rank, f"{rank}" * 300)
    for rank in range(3):
        status = board.read(rank)
        assert (status.phase, status.epoch, status.step, status.samples) == (rank, rank + 1, 10 + rank, 100 + rank)
        assert status.waiting_for == 2 - rank
        assert status.doing == f"{rank}" * 200  # what is longer than the record is cut


@pytest.mark.parametrize("text", ["", "x" * 199, "x" * 200, "é" * 100])
def test_texts_that_fit(text: str) -> None:
    board = new_board(2)
    board.reporter(0).waiting(1, "another, and a longer one " * 5)
    board.reporter(0).waiting(1, text)
    assert board.read(0).doing == text


def test_a_character_cut_in_the_middle_can_still_be_read() -> None:
    board = new_board(1)
    board.reporter(0).waiting(0, "x" * 199 + "é")
    assert board.read(0).doing.startswith("x" * 199)


def test_silence_is_counted_from_the_last_beat() -> None:
    board = new_board(1)
    reporter = board.reporter(0)
    assert 0 <= board.read(0).silent_s < 0.1
    for sign_of_life in (reporter.beat, lambda: reporter.step(1, 1, 0), lambda: reporter.waiting(0, "x")):
        time.sleep(0.06)
        assert board.read(0).silent_s >= 0.06
        sign_of_life()
        assert board.read(0).silent_s < 0.05


def test_phases_have_their_names() -> None:
    named = {
        STARTING: "starting",
        COMPUTING: "computing",
        EXCHANGING: "exchanging",
        UPDATING: "updating",
        EVALUATING: "evaluating",
        SAVING: "saving a checkpoint",
        RETURNING: "returning its result",
    }
    assert [named[phase] for phase in range(len(PHASES))] == list(PHASES)
