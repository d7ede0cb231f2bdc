"""The drawing of a schedule says what a hand drawing says."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from torch_parallel.collectives import COLLECTIVES, Collective, Receive, Round, Send, ring
from torch_parallel.collectives.moves import Message, Table, is_complete, moves, states
from torch_parallel.collectives.proof import ProofError
from torch_parallel.collectives.show import MOST_RANKS, main, overview, show

RING = COLLECTIVES["ring"]
WHOLE = range(0, 1)


def written(*programs: list[Round], promised: frozenset[int] | None = None) -> Collective:
    """A collective of one chunk from literal rounds, one list a rank."""
    return Collective(
        name="written",
        rounds=lambda rank, world_size: iter(programs[rank]),
        chunk_count=lambda world_size: 1,
        contributors=lambda rank, world_size, chunk: promised,
        round_count=lambda rank, world_size: len(programs[rank]),
        message_count=lambda rank, world_size: 0,
        sent_elements=lambda rank, world_size, numel: 0,
    )


def table(*rows: str) -> Table:
    """A table from letters: "ab c" is a rank with the sum of ranks 0 and 1 in chunk 0, and rank 2's in chunk 1."""
    return [[Counter("abcdefgh".index(letter) for letter in chunk) for chunk in row.split()] for row in rows]


# ---- what ranks hold, by hand ----


def test_states_of_a_ring_of_three() -> None:
    assert states(RING, 3) == [
        table("a a a", "b b b", "c c c"),
        table("a ac a", "b b ab", "bc c c"),
        table("abc ac a", "b abc ab", "bc c abc"),
        table("abc ac abc", "abc abc ab", "bc abc abc"),
        table("abc abc abc", "abc abc abc", "abc abc abc"),
    ]


def test_messages_of_a_ring_of_three() -> None:
    rounds = moves(RING, 3)
    assert [len(messages) for messages in rounds] == [3, 3, 3, 3]
    assert rounds[0] == [
        Message(2, 0, range(1, 2), reduce=True),
        Message(0, 1, range(2, 3), reduce=True),
        Message(1, 2, range(0, 1), reduce=True),
    ]
    assert rounds[3][0] == Message(2, 0, range(1, 2), reduce=False)


def test_states_of_the_rooted_ones() -> None:
    assert states(COLLECTIVES["reduce"], 3) == [table("a", "b", "c"), table("abc", "b", "c")]
    assert states(COLLECTIVES["push"], 3) == [table("a", "b", "c"), table("bc", "b", "c")]
    assert states(COLLECTIVES["broadcast"], 3) == [table("a", "b", "c"), table("a", "a", "a")]


def test_a_contribution_counts_as_often_as_it_is_added() -> None:
    twice = written(
        [[Send(1, WHOLE)], [Send(1, WHOLE)]], [[Receive(0, WHOLE, reduce=True)], [Receive(0, WHOLE, reduce=True)]]
    )
    assert states(twice, 2)[-1] == table("a", "aab")
    assert "aab" in show(twice, 2)


# ---- rounds ----


def test_a_message_arrives_when_both_sides_are_there() -> None:
    """A chain: rank 1 must have rank 2's chunk before it sends to rank 0, which waits for two rounds."""
    chain = written(
        [[Receive(1, WHOLE, reduce=True)]],
        [[Receive(2, WHOLE, reduce=True)], [Send(0, WHOLE)]],
        [[Receive(3, WHOLE, reduce=True)], [Send(1, WHOLE)]],
        [[Send(2, WHOLE)]],
    )
    assert [[(m.source, m.to) for m in messages] for messages in moves(chain, 4)] == [[(3, 2)], [(2, 1)], [(1, 0)]]
    assert states(chain, 4)[1:] == [
        table("a", "b", "cd", "d"),
        table("a", "bcd", "cd", "d"),
        table("abcd", "bcd", "cd", "d"),
    ]


def test_a_late_receive_holds_up_those_listed_after_it() -> None:
    late = written(
        [[Receive(1, WHOLE, reduce=True), Receive(2, WHOLE, reduce=True)]],
        [[Receive(3, WHOLE, reduce=True)], [Send(0, WHOLE)]],
        [[Send(0, WHOLE)]],
        [[Send(1, WHOLE)]],
    )
    assert [[(m.source, m.to) for m in messages] for messages in moves(late, 4)] == [[(3, 1)], [(1, 0), (2, 0)]]
    assert states(late, 4)[-1] == table("abcd", "bd", "c", "d")


def test_a_message_arrives_once() -> None:
    """Rank 1 has had rank 0's first message, and must wait for the second until rank 0 has heard from rank 2."""
    nothing = range(0, 0)
    two = written(
        [[Send(1, nothing)], [Receive(2, WHOLE, reduce=True)], [Send(1, WHOLE)]],
        [[Receive(0, nothing, reduce=False)], [Receive(0, WHOLE, reduce=True)]],
        [[Send(0, WHOLE)]],
    )
    arrivals = [[(m.source, m.to, len(m.chunks)) for m in messages] for messages in moves(two, 3)]
    assert arrivals == [[(0, 1, 0)], [(2, 0, 1)], [(0, 1, 1)]]
    assert states(two, 3)[-1] == table("ac", "abc", "c")
    assert "  signals:  0 --> 1\n" in show(two, 3)


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_message_is_shown_once_and_every_promise_kept(name: str, world_size: int) -> None:
    collective = COLLECTIVES[name]
    rounds, tables = moves(collective, world_size), states(collective, world_size)
    assert len(tables) == len(rounds) + 1
    assert all(rounds), "a round in which nothing arrives"
    sent = Counter(message.source for messages in rounds for message in messages if message.source != message.to)
    assert [sent[rank] for rank in range(world_size)] == [
        collective.message_count(rank, world_size) for rank in range(world_size)
    ]
    for rank in range(world_size):
        for chunk in range(collective.total_chunks(rank, world_size)):
            promised = collective.promised(rank, world_size, chunk) is not None
            assert is_complete(collective, tables[-1], rank, chunk) == promised


def test_a_wrong_schedule_is_not_drawn() -> None:
    stuck = written([[Receive(1, WHOLE, reduce=True)]], [])
    with pytest.raises(ProofError, match="rank 0 waits in round 0 to receive from rank 1"):
        show(stuck, 2)


# ---- text ----


def test_the_drawing_of_a_ring_of_two_literally() -> None:
    assert show(RING, 2).splitlines() == [
        "ring: 2 ranks, 2 chunks, 2 rounds, 4 messages",
        "  a b          what ranks 0..1 contribute",
        "  upper case   complete; S = a + b",
        "  [ ]          sent in the next round",
        "  0 -k-> 1     rank 0 sends chunk k to rank 1",
        "",
        "  before      chunk 0  chunk 1",
        "    rank 0       a       [a]",
        "    rank 1      [b]       b",
        "",
        "round 1",
        "  added:    0 -1-> 1  1 -0-> 0",
        "  after       chunk 0  chunk 1",
        "    rank 0      [S]       a",
        "    rank 1       b       [S]",
        "",
        "round 2",
        "  replaced: 0 -0-> 1  1 -1-> 0",
        "  after       chunk 0  chunk 1",
        "    rank 0       S        S",
        "    rank 1       S        S",
    ]


def test_the_drawing_is_the_one_in_ring_py() -> None:
    by_hand, drawn = (re.findall(r"rank \d +(.*\S)", text) for text in (ring.__doc__ or "", show(RING, 4)))
    assert len(by_hand) == 20  # it stops after round 4 of 6
    assert [row.split() for row in by_hand] == [row.split() for row in drawn if "->" not in row and "sends" not in row][
        :20
    ]


def test_a_complete_part_is_in_upper_case() -> None:
    text = show(COLLECTIVES["push"], 3)
    assert "    rank 0       BC\n" in text
    assert "S =" not in text
    assert "  added:    2 -0-> 0\n  replaced: 1 -0-> 0\n" in text


def test_the_drawing_of_one_shot_literally() -> None:
    assert show(COLLECTIVES["one_shot"], 3).splitlines() == [
        "one_shot: 3 ranks, 1 chunk, 1 round, 6 messages",
        "  a b c        what ranks 0..2 contribute",
        "  upper case   complete; S = a + b + c",
        "  [ ]          sent in the next round",
        "  0 -k-> 1     rank 0 sends chunk k to rank 1",
        "  0 -k-> 1:j   which puts it, or the sum, into its chunk j",
        "  moved        between a rank's own chunks, without any message",
        "  -            nothing yet",
        "",
        "  before      chunk 0   result 1",
        "    rank 0      [a]        -",
        "    rank 1      [b]        -",
        "    rank 2      [c]        -",
        "",
        "round 1",
        "  added:    0 -0-> 1:1  1 -0-> 0:1  1 -0-> 2:1  2 -0-> 0:1  2 -0-> 1:1",
        "  replaced: 0 -0-> 2:1",
        "  moved:    2 -0-> 2:1",
        "  after       chunk 0   result 1",
        "    rank 0       a         S",
        "    rank 1       b         S",
        "    rank 2       c         S",
    ]


def test_a_common_result_is_drawn_below_as_far_as_each_rank_knows_it() -> None:
    lines = show(COLLECTIVES["two_shot_in_place"], 2).splitlines()
    after_1 = lines.index("round 1")
    assert lines[after_1 : after_1 + 8] == [
        "round 1",
        "  added:    0 -1-> 1:3  1 -0-> 0:2",
        "  after       chunk 0   chunk 1",
        "    rank 0       a         a",
        "    rank 1       b         b",
        "              result 2  result 3",
        "    rank 0      [S]        -",
        "    rank 1       -        [S]",
    ]
    assert "  waited:   0 -2-> 1  1 -3-> 0" in lines


def test_scratch_is_drawn_where_there_is_any() -> None:
    text = show(COLLECTIVES["gather_scatter"], 3)
    assert [word for word in text.splitlines() if "scratch" in word][1].split() == [
        "after",
        "chunk",
        "0",
        "scratch",
        "1",
        "scratch",
        "2",
    ]
    assert "  moved:    0 -1-> 0:0  0 -2-> 0:0" in text.splitlines()
    rows = [line.split() for line in text.splitlines() if line.startswith("    rank")]
    assert rows[3:6] == [["rank", "0", "[S]", "b", "c"], ["rank", "1", "b"], ["rank", "2", "c"]]
    assert "scratch" not in show(RING, 3)


def test_one_rank_alone() -> None:
    assert show(RING, 1).endswith("  before      chunk 0\n    rank 0       A")


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("name", COLLECTIVES)
def test_drawings_of_up_to_eight_ranks_fit_a_screen(name: str, world_size: int) -> None:
    wide = 11 * COLLECTIVES[name].chunk_count(world_size)  # more than ten chunks need more
    assert max(map(len, show(COLLECTIVES[name], world_size).splitlines())) <= max(110, wide)


@pytest.mark.parametrize("world_size", [0, MOST_RANKS + 1])
def test_more_ranks_than_letters_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"{world_size} ranks: a drawing shows 1 to 18"):
        show(RING, world_size)


# ---- the command ----


def test_the_overview_by_hand() -> None:
    rows = {line.split()[0]: line.split()[1:] for line in overview(4, 1000).splitlines()[3:]}
    assert list(rows) == list(COLLECTIVES)
    assert rows["ring"] == ["6", "6", "1500"]
    assert rows["reduce"] == ["1", "0..1", "0..1000"]
    assert rows["broadcast"] == ["1", "0..3", "0..3000"]


def test_the_command_shows_one_or_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--show", "ring", "--n", "3"])
    assert capsys.readouterr().out == show(RING, 3) + "\n"
    main([])
    assert capsys.readouterr().out == overview(4, 1_000_000) + "\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--show", "rign"], "invalid choice: 'rign' (choose from "),
        (["--show", "ring", "--n", "0"], "argument --n: 0 is not in 1..18"),
        (["--n", "four"], "argument --n: invalid int value: 'four'"),
        (["--numel", "-1"], "argument --numel: -1 is negative"),
        (["--sho", "ring"], "unrecognized arguments: --sho ring"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m torch_parallel collectives: error: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_a_wrong_algorithm_in_the_registry_ends_with_its_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COLLECTIVES, "written", written([[Send(1, WHOLE)]], []))
    with pytest.raises(SystemExit) as ending:
        main(["--show", "written", "--n", "2"])
    assert ending.value.code == 1
    assert capsys.readouterr().err.startswith("written is wrong for 2 ranks:\n  - stray message: rank 0 sends")
