"""Ranks on several nodes: they train as on one, to the bit, and learn of each other's end. Here nodes are processes of
one machine that are told apart by name, as those of two agents of torchrun; or network namespaces, in the lab."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from started import PLAIN, end, failing, running, said_by, started, weights_in

from torch_parallel import RunConfig, nics, train
from torch_parallel.collectives import HIERARCHICAL
from torch_parallel.collectives.cost import predicted_on_nodes_s
from torch_parallel.messenger import _Run
from torch_parallel.status import DIED, RAISED, RUNNING, StatusBoard
from torch_parallel.strategies import STRATEGIES
from torch_parallel.topology import Topology
from torch_parallel.training.config import ConfigError
from torch_parallel.training.emulation import on_nodes
from torch_parallel.transport.calls import CallBoard

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="nodes share memory by /proc"),
    pytest.mark.timeout(400),  # each process imports torch
]

ROOT = Path(__file__).parents[1]
LIMIT_S = 200.0

# ---- training ----

EACH = """
import sys
from torch_parallel import RunConfig, train

if __name__ == "__main__":
    for name in sys.argv[2].split(","):
        own = {"backup_workers": 0} if name == "param_server_backup" else {}
        train(RunConfig(strategy=name, dataset="digits", train_size=200, test_size=50, epochs=1, device="cpu",
                        deadline_s=60, results_dir=f"{sys.argv[1]}/{name}", **own), verbose=False)
        print("DONE", name, flush=True)
"""


def trained(folder: Path, layout: Sequence[int], names: Sequence[str]) -> None:
    program = folder / "each.py"
    program.write_text(EACH)
    for text in said_by(started(layout, str(program), str(folder), ",".join(names))):
        assert [line for line in text.splitlines() if "DONE" in line] == [f"DONE {name}" for name in names], text


def of_launch(name: str, layout: Sequence[int], folder: Path) -> dict[str, torch.Tensor]:
    """With the same nodes, emulated, where the strategy goes by them."""
    nodes = {"nodes": len(layout), "workers_per_node": layout[0]} if "hierarchical" in name or "flat" in name else {}
    own = {"backup_workers": 0} if name == "param_server_backup" else {}
    config = RunConfig(
        strategy=name,
        n_gpus=sum(layout),
        dataset="digits",
        train_size=200,
        test_size=50,
        epochs=1,
        device="cpu",
        results_dir=str(folder),
        **nodes,  # type: ignore[arg-type]
        **own,
    )
    return train(config, verbose=False).weights


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ((2, 2), ("ring_all_reduce", "hierarchical_sharded", "param_server_bounded")),
        pytest.param((2, 2), tuple(STRATEGIES)[:9], marks=pytest.mark.exhaustive),
        pytest.param((2, 2), tuple(STRATEGIES)[9:], marks=pytest.mark.exhaustive),
        pytest.param((1, 1, 1), tuple(STRATEGIES), marks=pytest.mark.exhaustive),
        pytest.param((2, 1), ("ring_all_reduce", "param_server", "sharded_param_server"), marks=pytest.mark.exhaustive),
    ],
)
def test_training_on_nodes_is_that_under_launch_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...], names: tuple[str, ...]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = tuple(name for name in names if name != "data_parallel")
    trained(tmp_path, layout, names)
    for name in names:
        if name in ("param_server_async", "all_reduce"):  # who comes first, and the algorithm, are others
            continue
        ours, theirs = weights_in(tmp_path / name), of_launch(name, layout, tmp_path / "launched")
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name


# ---- ends ----


@pytest.mark.parametrize(
    ("strategy", "culprits", "how", "named"),
    [
        ("ring_all_reduce", "2,3", "SIGKILL", "rank 2 has died|rank 3 has died"),
        pytest.param("hierarchical_sharded", "3", "SIGKILL", "rank 3 has died", marks=pytest.mark.exhaustive),
        pytest.param(
            "param_server", "0,1", "SIGKILL", "the node of rank 0|rank [01] has", marks=pytest.mark.exhaustive
        ),
        pytest.param("sharded_param_server", "3", "SIGSTOP", "from rank 3|rank 3", marks=pytest.mark.exhaustive),
    ],
)
def test_the_survivors_name_the_lost_one(tmp_path: Path, strategy: str, culprits: str, how: str, named: str) -> None:
    program = failing(tmp_path, f"os.kill(os.getpid(), signal.{how})", deadline_s=20)
    processes = started((2, 2), program, str(tmp_path / "results"), strategy, CULPRITS=culprits)
    lost = [int(rank) for rank in culprits.split(",")]
    survivors = [process for rank, process in enumerate(processes) if rank not in lost]
    try:
        said = said_by(survivors, limit_s=120)
    finally:
        end(processes)
    assert [process.returncode for process in survivors] == [1] * len(survivors), said
    assert all(re.search(rf"FAILURE .*({named})", text) for text in said), said


# ---- what does not fit ----


def test_what_the_flags_say_of_nodes_must_be_so() -> None:
    nodes = (0, 0, 1, 1)
    kept = on_nodes(RunConfig(nodes=2, workers_per_node=2), nodes)
    assert (kept.nodes, kept.workers_per_node, kept.link) == (None, None, None)  # nothing is emulated there
    assert on_nodes(RunConfig(setup="2_2"), nodes).link is None
    assert on_nodes(RunConfig(nics="eth1, eth2"), nodes).nic_names == ("eth1", "eth2")
    for wrong, line in (
        ({"nodes": 3}, r"--nodes 3: 2 nodes with 2, 2 workers were started: start as many, or leave it out"),
        ({"nodes": 2, "workers_per_node": 4}, r"--workers_per_node 4: 2 nodes with 2, 2 workers were started"),
        ({"setup": "4_1"}, r"--nodes 4: 2 nodes with 2, 2 workers were started"),
        ({"link": "1gbit"}, r"--link 1gbit: it is emulated on one machine, and 2 nodes were started: leave it out"),
    ):
        with pytest.raises(ConfigError, match=line):
            on_nodes(RunConfig(**wrong), nodes)  # type: ignore[arg-type]
    for strategy, why in (
        ("ddp", "know no emulated links"),
        ("two_shot_in_place", "needs memory that all workers have"),
    ):
        of_two = RunConfig(strategy=strategy, nodes=2, workers_per_node=2)  # real nodes are known later
        assert on_nodes(of_two, nodes).nodes is None
        with pytest.raises(ConfigError, match=rf"--nodes 2: {strategy} .*{why}"):
            on_nodes(of_two, (0,))
    with pytest.raises(ConfigError, match=r"--nics eth1: names of cards are for several nodes"):
        on_nodes(RunConfig(nics="eth1"), (0,))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nics", "nowhere0"], r"rank \d cannot reach rank \d by interface nowhere0"),
        (["--train_size", "DIFFERENT"], r"node 1 has other data than node 0 in train/"),
    ],
)
def test_cards_and_data_that_do_not_fit_are_one_line(tmp_path: Path, flags: list[str], said: str) -> None:
    program = tmp_path / "own.py"
    program.write_text(
        "import os, runpy, sys\n"
        "sys.argv = [a.replace('DIFFERENT', '100' if os.environ['GROUP_RANK'] == '0' else '120') for a in sys.argv]\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
    )
    given = ["--dataset", "digits", "--epochs", "1", "--device", "cpu", "--results_dir", str(tmp_path / "r")]
    processes = started((1, 1), str(program), *given, "--deadline_s", "20", *flags)
    texts = said_by(processes)
    assert all(process.returncode not in (0, None) for process in processes)
    assert re.search(said, "".join(texts)), texts
    assert "Traceback" not in "".join(texts)


# ---- bytes, and boards ----


def test_what_crosses_a_card_by_hand() -> None:
    """Two nodes of two ranks with two cards: a pair takes the card of the lower rank's place."""
    nodes, cards = (0, 0, 1, 1), ("a", "b")
    assert [nics.nic_between(nodes, *pair, cards) for pair in ((0, 2), (2, 0), (1, 3), (0, 3), (1, 2))] == [
        *("a", "a", "b", "a", "b")
    ]
    assert [nics.nic_between(nodes, 1, 3, ("a",)), nics.nic_between(nodes, 1, 3, ())] == ["a", ""]
    received = [[0, 7, 10, 0], [0, 0, 0, 20], [1, 0, 0, 5], [0, 2, 0, 0]]  # rank 0 has 7 bytes from 1, 10 from 2
    assert nics.counted(nodes, cards, received) == [{"a": [1, 10], "b": [2, 20]}, {"a": [10, 1], "b": [20, 2]}]


def test_predicted_seconds_by_hand() -> None:
    """8 MB on 2 nodes of 2 ranks, of which each sends 1 MB/s; within a node nothing takes time."""
    nodes, nbytes = (0, 0, 1, 1), 8_000_000

    def seconds(name: str, cards: int) -> float:
        return predicted_on_nodes_s(HIERARCHICAL[name].placed(nodes), Topology.at(nodes, cards, 1e6), nbytes)

    assert seconds("flat", 1) == pytest.approx(2 * 3 / 4 * 8)  # each of 6 rounds sends a quarter
    assert seconds("hierarchical_leaders", 1) == pytest.approx(8)  # a ring of two: half, and half
    assert seconds("hierarchical_sharded", 2) == pytest.approx(4)  # each card a half of the buffer, in two halves
    assert seconds("hierarchical_sharded", 1) == pytest.approx(8)  # both on one card
    assert seconds("hierarchical_multi_nic", 1) == pytest.approx(16)


def boards() -> tuple[StatusBoard, CallBoard]:
    status = StatusBoard(memoryview(bytearray(StatusBoard.bytes_needed(2))), 2)
    return status, CallBoard(memoryview(bytearray(CallBoard.bytes_needed(2))), 2)


def test_what_a_rank_writes_is_on_the_other_nodes_boards() -> None:
    here, there = boards(), boards()
    of_rank_1 = _Run(*here, [1], {}, {})
    on_the_other = _Run(*there, [0], {}, {})
    here[0].reporter(1).step(epoch=2, step=5, samples=80)
    here[0].reporter(1).waiting(0, "its gradients")
    here[1].note(1, 3, (1 << 32) | 77)
    here[1].put_text(1, 0, 123, "sum it up")
    news = of_rank_1.news()
    on_the_other.adopt(news, time.monotonic_ns())
    status = there[0].read(1)
    assert (status.epoch, status.step, status.samples, status.waiting_for, status.doing) == (
        2,
        5,
        80,
        0,
        "its gradients",
    )
    assert status.silent_s < 5
    assert there[1].entry(1, 3) == 77
    assert there[1].text(1, 123) == "sum it up"
    assert of_rank_1.news() == []  # nothing is passed on twice
    here[0].note_end(1, RAISED)
    on_the_other.adopt(of_rank_1.news(), time.monotonic_ns())
    assert there[0].over(1) == RAISED
    # what is known here and not there yet stays: it died, and what it wrote before comes later
    there[0].note_end(1, DIED)
    here[0].note_end(1, RUNNING)
    on_the_other.adopt(of_rank_1.news(), time.monotonic_ns())
    assert there[0].over(1) == DIED


# ---- the lab ----


def lab(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_parallel", "lab", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=PLAIN, cwd=ROOT)


def lab_is_possible() -> bool:
    if not all(map(shutil.which, ("unshare", "ip", "tc", "nsenter"))):
        return False
    tried = subprocess.run(["unshare", "--map-root-user", "--net", "--mount", "true"], check=False, capture_output=True)
    return tried.returncode == 0 and lab("--nodes", "1", "--", "true").returncode == 0


def test_the_lab_trains_to_the_same_bits_and_its_cards_carry_what_the_schedule_says(tmp_path: Path) -> None:
    if not lab_is_possible():
        pytest.skip("this system does not allow namespaces")
    given = ["--dataset", "digits", "--train_size", "200", "--test_size", "50", "--epochs", "1", "--device", "cpu"]
    train_py = ["train.py", "--strategy", "hierarchical_sharded", "--nodes", "2", "--workers_per_node", "2", *given]
    of_lab = ("--nodes", "2", "--workers_per_node", "2", "--nics", "2", "--rate", "200mbit")
    done = lab(*of_lab, "--", *train_py, "--results_dir", str(tmp_path / "lab"))
    assert done.returncode == 0, done.stdout + done.stderr
    plain = [sys.executable, *train_py, "--results_dir", str(tmp_path / "launched")]
    assert subprocess.run(plain, env=PLAIN, cwd=ROOT, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0
    ours, theirs = weights_in(tmp_path / "lab"), weights_in(tmp_path / "launched")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    (file,) = (tmp_path / "lab").glob("*/runs.csv")
    with file.open() as opened:
        rows = list(csv.DictReader(opened))
    assert [row["nodes"] for row in rows] == ["2"] * 4
    for row in (rows[0], rows[2]):
        read, messages = json.loads(row["nic_bytes"]), json.loads(row["nic_message_bytes"])
        assert set(read) == {"eth1", "eth2"}
        for card, (sent, received) in messages.items():
            assert sent <= read[card][0] <= 2 * sent + 100_000  # with headers, and what small messages cost
            assert received <= read[card][1] <= 2 * received + 100_000
    assert done.stdout.count("node 0: eth1 sent ") == 1


@pytest.mark.exhaustive
def test_the_lab_refuses_what_it_cannot_make() -> None:
    for flags, line in (
        (("--nodes", "0"), "--nodes 0: between 1 and 200 are possible"),
        (("--workers_per_node", "2,x"), "--workers_per_node 2,x: whole numbers, at least 1, are needed"),
        (("--workers_per_node", "2,2,2"), "--workers_per_node 2,2,2: one number for all nodes, or 2, one for each"),
        (("--rate", "fast"), "--rate fast"),
    ):
        done = lab(*flags, "--", "true")
        assert done.returncode == 2, done.stdout + done.stderr
        assert line in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.exhaustive
def test_a_killed_lab_leaves_nothing(tmp_path: Path) -> None:
    if not lab_is_possible():
        pytest.skip("this system does not allow namespaces")
    mark = f"sleep-{os.getpid()}"
    program = tmp_path / f"{mark}.py"
    program.write_text("import sys, time\nsys.stdout.write('here\\n')\nsys.stdout.flush()\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "torch_parallel", "lab", "--nodes", "2", "--", str(program)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=PLAIN, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.kill()
    process.wait()
    process.stdout.close()
    until_s = time.monotonic() + 10
    while (left := running(mark)) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert left == []


CUT_OFF = """
import os, subprocess, sys, time
import torch
from torch import nn
from torch_parallel import Dataset, RunConfig, WorkerFailure, train

class CutsOff(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x):
        self.calls += 1
        if os.environ["RANK"] == "2" and self.calls == 10:
            subprocess.run(["ip", "link", "set", "eth1", "down"], check=True)
        time.sleep(0.02)
        return self.layer(x)

x, y = torch.ones(320, 6), torch.zeros(320, dtype=torch.int64)
config = RunConfig(strategy="ring_all_reduce", batch_size=8, deadline_s=6, device="cpu", results_dir=sys.argv[1])
try:
    train(config, make_model=CutsOff, dataset=Dataset("ones", x, y, x[:6], y[:6], 3), verbose=False)
except WorkerFailure as failure:
    sys.stdout.write(f"rank {os.environ['RANK']}: {failure.args[0].splitlines()[0]}\\n")
    sys.exit(1)
"""


@pytest.mark.exhaustive
def test_a_card_that_is_set_down_ends_all_ranks_on_both_sides(tmp_path: Path) -> None:
    if not lab_is_possible():
        pytest.skip("this system does not allow namespaces")
    program = tmp_path / "cut_off.py"
    program.write_text(CUT_OFF.lstrip())
    lab = ["lab", "--nodes", "2", "--workers_per_node", "2", "--nics", "1", "--", str(program), str(tmp_path / "runs")]
    command = [sys.executable, "-m", "torch_parallel", *lab]
    start_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=PLAIN, cwd=ROOT)
    assert done.returncode != 0 and time.monotonic() - start_s < 100
    for rank, named in ((0, "rank [23]"), (1, "rank [23]"), (2, "rank [01]"), (3, "rank [01]")):
        assert re.search(rf"^rank {rank}: .*{named}.*(died|cannot be reached)", done.stdout, re.MULTILINE), done.stdout
