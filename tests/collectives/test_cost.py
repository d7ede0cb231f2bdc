"""The clocks of the cost model beside the textbook's formulas, and beside what is worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

from torch_parallel.collectives import ALL_REDUCE, COLLECTIVES, Receive, Send
from torch_parallel.collectives.cost import Rates, predicted_s

RATES = Rates(alpha_s=3e-6, beta_s_per_byte=7e-10, gamma_s_per_byte=2e-10)
A, B, G = RATES.alpha_s, RATES.beta_s_per_byte, RATES.gamma_s_per_byte
S = 3 * 2**20 * 5 * 7  # bytes that all the world sizes below divide


def priced(name: str, world_size: int, nbytes: int = S) -> float:
    return predicted_s(COLLECTIVES[name], world_size, nbytes, RATES)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 16])
def test_formulas_for_every_number_of_ranks(n: int) -> None:
    share = (n - 1) / n * S
    assert priced("ring", n) == pytest.approx(2 * (n - 1) * A + 2 * share * B + share * G)
    assert priced("two_shot", n) == pytest.approx(2 * (n - 1) * A + 2 * share * B + share * G)
    # the second shot moves no byte
    assert priced("two_shot_in_place", n) == pytest.approx(2 * (n - 1) * A + share * B + share * G)
    for through_a_root in ("reduce_broadcast", "gather_scatter"):
        assert priced(through_a_root, n) == pytest.approx(2 * (n - 1) * (A + S * B) + (n - 1) * S * G)
    assert priced("all_gather_average", n) == pytest.approx((n - 1) * (A + S * B + S * G))
    assert priced("barrier", n) == pytest.approx((n - 1).bit_length() * A)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_formulas_for_powers_of_two(n: int) -> None:
    share = (n - 1) / n * S
    assert priced("halving_doubling", n) == pytest.approx(2 * log2(n) * A + 2 * share * B + share * G)
    assert priced("tree", n) == pytest.approx(2 * log2(n) * (A + S * B) + log2(n) * S * G)


def test_folding_a_rank_in_and_out_costs_the_buffer_twice() -> None:
    assert priced("halving_doubling", 5) == pytest.approx(priced("halving_doubling", 4) + 2 * (A + S * B) + S * G)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_no_all_reduce_beats_the_lower_bounds(name: str, n: int) -> None:
    """Patarasuk and Yuan: 2(P-1)/P of the buffer; with a common result half of that is not moved."""
    moved = (n - 1) / n * S * (1 if ALL_REDUCE[name].common_result else 2)
    if n == 2 and name in ("one_shot", "all_gather_average"):
        moved = S  # one swap of the whole buffers
    assert priced(name, n) >= moved * B * 0.999999
    assert priced(name, n, nbytes=0) >= (n - 1).bit_length() * A * 0.999999


def test_one_shot_of_three_by_hand() -> None:
    """In rank order 1 and 2 both begin with 0, and 2 must wait; then 1 must wait for 2, which 0 reads. In units of A:

    0 reads    1  2         1 reads    0  -  2        2 reads    -  0  1
    """
    assert predicted_s(COLLECTIVES["one_shot"], 3, 0, RATES) == pytest.approx(3 * A)


def test_the_small_prefer_few_messages_and_the_large_few_bytes() -> None:
    def fastest(nbytes: int) -> str:
        return min(("ring", "halving_doubling"), key=lambda name: priced(name, 12, nbytes))

    assert fastest(8) == "halving_doubling"  # 8 messages in a row, 22 of the ring
    assert fastest(2**28) == "ring"  # 12 is no power of two: halving and doubling pays for the folded ranks


def test_in_shared_memory_processors_are_shared_and_memory_is_not() -> None:
    """A ring of four on one processor: its 4 * 6 moves one after the other; on four, and on eight, as over links."""
    n, moved = 4, 6 * S / 4
    one = predicted_s(COLLECTIVES["ring"], n, S, RATES, processors=1)
    assert one == pytest.approx(n * (6 * A + moved * B + moved / 2 * G))
    for processors in (4, 8):
        assert predicted_s(COLLECTIVES["ring"], n, S, RATES, processors) == pytest.approx(priced("ring", n))
    for name in ALL_REDUCE:  # on one processor all moves of all ranks come one after the other, own ones too
        costs = [_moves_s(name, 3, rank) for rank in range(3)]
        assert predicted_s(COLLECTIVES[name], 3, S, RATES, processors=1) == pytest.approx(sum(costs)), name
    # all read from all at once: over links a rank is read by one at a time
    assert predicted_s(COLLECTIVES["one_shot"], 3, 0, RATES, processors=3) == pytest.approx(2 * A)


def _moves_s(name: str, world_size: int, rank: int) -> float:
    """What the moves of one rank cost in shared memory."""
    collective = COLLECTIVES[name]
    chunk_count, common = collective.chunk_count(world_size), collective.common_chunks(world_size)
    seconds = 0.0
    for actions in collective.rounds(rank, world_size):
        for action in actions:
            if not isinstance(action, Send):
                is_common = bool(action.chunks) and action.chunks.start in common
                nbytes = 0 if is_common else len(action.chunks) * S / chunk_count
                seconds += nbytes * (B + G * action.reduce) + A * isinstance(action, Receive)
    return seconds


def test_a_schedule_that_gets_stuck() -> None:
    both_wait = [[Receive(1, range(1), True)], [Send(1, range(1))]], [[Receive(0, range(1), True)], [Send(0, range(1))]]
    stuck = replace(COLLECTIVES["broadcast"], rounds=lambda rank, world_size: iter(both_wait[rank]))
    with pytest.raises(ValueError, match="stuck"):
        predicted_s(stuck, 2, 8, RATES)


def test_the_latency_of_emulated_links_does_not_keep_a_root_busy() -> None:
    """The root's three messages leave one behind the other, each arriving a latency later; a ring waits for each."""
    rates = Rates(10.0, 1.0, latency_is_on_the_way=True)
    assert predicted_s(COLLECTIVES["broadcast"], 4, 8, rates) == 3 * 8 + 10
    assert predicted_s(COLLECTIVES["ring"], 4, 8, rates) == 6 * (10 + 2)
