"""Collectives of a user's own: proved when they are registered, and known by name wherever the package's are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from torch_parallel import RunConfig, launch
from torch_parallel.collectives import (
    ALL_REDUCE,
    COLLECTIVES,
    RING_ALL_GATHER,
    RING_ALL_REDUCE,
    Collective,
    Receive,
    RegistryError,
    Send,
    register,
)
from torch_parallel.collectives.registry import adopt, is_all_reduce, registered
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import WorkerFailure
from torch_parallel.strategies import FROM_SCRATCH, STRATEGIES, SYNCHRONOUS
from torch_parallel.training.config import ConfigError, command_line_parser

ALL_STRATEGIES = (STRATEGIES, FROM_SCRATCH, SYNCHRONOUS)


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    """What a test registers is gone after it."""
    from torch_parallel.collectives import registry

    registries: list[Any] = [COLLECTIVES, ALL_REDUCE, *ALL_STRATEGIES]
    registries += [registry._registered, registry._known_from_the_launcher]
    before = [each.copy() for each in registries]
    yield
    for each, was in zip(registries, before, strict=True):
        each.clear()
        each.update(was)


def to_all(rank: int, world_size: int) -> Iterator[list[Any]]:
    """Everybody's buffer goes to rank 0, which adds it, and the sum comes back: a chain of one round each."""
    for other in range(1, world_size):
        if rank == 0:
            yield [Receive(other, range(0, 1), reduce=True)]
        elif rank == other:
            yield [Send(0, range(0, 1))]
    for other in range(1, world_size):
        if rank == 0:
            yield [Send(other, range(0, 1))]
        elif rank == other:
            yield [Receive(0, range(0, 1), reduce=False)]


MINE = Collective(
    name="mine",
    rounds=to_all,
    chunk_count=lambda world_size: 1,
    contributors=lambda rank, world_size, chunk: frozenset(range(world_size)),
    round_count=lambda rank, world_size: 2 * (world_size - 1) if rank == 0 else 2,
    message_count=lambda rank, world_size: world_size - 1 if rank == 0 else 1,
    sent_elements=lambda rank, world_size, numel: numel * (world_size - 1 if rank == 0 else 1),
)


def test_one_is_known_by_its_name_at_once() -> None:
    with pytest.raises(ConfigError, match="--strategy mine_all_reduce: choose from"):
        RunConfig(strategy="mine_all_reduce")
    assert register(MINE) is MINE
    assert COLLECTIVES["mine"] is ALL_REDUCE["mine"] is MINE and registered() == (MINE,)
    assert all("mine_all_reduce" in strategies for strategies in ALL_STRATEGIES)
    assert RunConfig(strategy="mine_all_reduce").in_step
    assert RunConfig(strategy="all_reduce", algorithm="mine").algorithm == "mine"
    parsed = command_line_parser().parse_args(["--strategy", "all_reduce", "--algorithm", "mine"])
    assert parsed.algorithm == "mine"
    assert register(MINE) is MINE  # as when a cell is run again


def test_what_is_no_all_reduce_is_a_collective_only() -> None:
    register(replace(RING_ALL_GATHER, name="mine"))
    assert "mine" in COLLECTIVES and "mine" not in ALL_REDUCE and "mine_all_reduce" not in STRATEGIES


def test_which_of_the_packages_are_all_reduces() -> None:
    for world_size in (2, 3, 5):
        found = {name for name, each in COLLECTIVES.items() if is_all_reduce(each, world_size)}
        assert found >= set(ALL_REDUCE)
        assert not found & {
            "ring_all_gather",
            "ring_reduce_scatter",
            "broadcast",
            "reduce",
        }


# Refused, by one line, and then not there.


def never_added(rank: int, world_size: int) -> Iterator[list[Any]]:
    for this in to_all(rank, world_size):
        yield [replace(each, reduce=False) if isinstance(each, Receive) else each for each in this]


def for_two_only(rank: int, world_size: int) -> Iterator[list[Any]]:
    if world_size > 2:
        raise ValueError("two ranks at most")
    yield from to_all(rank, world_size)


def stuck(rank: int, world_size: int) -> Iterator[list[Any]]:
    if world_size > 4:
        yield [Receive((rank + 1) % world_size, range(0, 1), reduce=True)]
    yield from to_all(rank, world_size)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rounds": never_added}, "for 2 ranks: rank 0 ends with chunk 0 lacking rank 0's contribution"),
        ({"rounds": for_two_only}, r"for 3 ranks: rank 0 fails in round 0: ValueError\('two ranks at most'\)"),
        ({"rounds": stuck}, "for 5 ranks: .*"),
        ({"round_count": lambda rank, n: 2}, "for 1 ranks: its round_count is 2 on rank 0, and its schedule has 0"),
        ({"message_count": lambda rank, n: n - 1}, "for 3 ranks: its message_count is 2 on rank 1, .* has 1"),
        ({"sent_elements": lambda rank, n, numel: 0}, "for 2 ranks: its sent_elements of 7 is 0 .* has 7"),
        ({"chunk_count": lambda n: 1 + 0 // (n - 4)}, "for 4 ranks: ZeroDivisionError"),
        ({"contributors": lambda rank, n: frozenset()}, "TypeError: "),
    ],
)
def test_a_wrong_one_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(RegistryError, match=f"^mine is wrong .*({said})") as error:
        register(replace(MINE, **changed))
    assert "\n" not in str(error.value)
    assert "mine" not in COLLECTIVES and registered() == ()


@pytest.mark.parametrize("name", ["ring", "reduce_scatter ring", "", "a-b", "two words", None])
def test_a_name_that_is_taken_or_no_word(name: Any) -> None:
    with pytest.raises(RegistryError, match=r"is taken: choose another|is no word"):
        register(replace(MINE, name=name))
    assert COLLECTIVES["ring"] is RING_ALL_REDUCE


@pytest.mark.parametrize("given", [to_all, "mine", None])
def test_what_is_no_collective(given: Any) -> None:
    with pytest.raises(RegistryError, match=f"a Collective is wanted, not {type(given).__name__}"):
        register(given)


def test_a_name_of_ones_own_is_given_up_on_purpose_only() -> None:
    register(MINE)
    other = replace(MINE)
    with pytest.raises(RegistryError, match="the name mine is taken: give replace=True"):
        register(other)
    assert ALL_REDUCE["mine"] is MINE
    register(other, replace=True)
    assert ALL_REDUCE["mine"] is other
    with pytest.raises(RegistryError, match="the name ring is taken: choose another"):
        register(replace(MINE, name="ring"), replace=True)


def test_what_a_launcher_knows_may_be_registered_again_by_its_module() -> None:
    """A worker that imports the user's module runs its call of register once more."""
    adopt([MINE])
    again = replace(MINE)
    assert register(again) is ALL_REDUCE["mine"] is again


# In workers.


def sums(communicator: Communicator, algorithm: Any) -> list[float]:
    mine = torch.arange(5.0) * 10**communicator.rank
    return communicator.all_reduce(mine, algorithm=algorithm).tolist()


@pytest.mark.exhaustive
def test_workers_know_it_by_name_and_take_it_as_an_object() -> None:
    expected = [[0.0, 111.0, 222.0, 333.0, 444.0]] * 3
    assert launch(sums, 3, MINE, deadline_s=30) == expected  # without a word to the registry
    with pytest.raises(WorkerFailure, match="unknown algorithm 'mine': choose from ring"):
        launch(sums, 3, "mine", deadline_s=30)
    register(MINE)
    assert launch(sums, 3, "mine", deadline_s=30) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (RING_ALL_GATHER, "ring_all_gather is no all-reduce"),
        (replace(MINE, rounds=never_added), "mine is wrong for 2 ranks"),
        (replace(MINE, rounds=stuck, contributors=lambda rank, n, chunk: frozenset({0})), "mine is no all-reduce"),
    ],
)
def test_a_wrong_object_is_refused(given: Collective, said: str) -> None:
    with pytest.raises(WorkerFailure, match=said):
        launch(sums, 2, given, deadline_s=30)
