"""Several machines on one: nodes are network namespaces, joined by virtual cards of a set rate (Linux).

    python -m torch_parallel lab --nodes 2 --workers_per_node 4 --nics 4 --rate 200mbit -- train.py --strategy ddp

  node 0 [ eth1 eth2 ... ]      each node has a network of its own, and sees nothing of the others' or of the machine's
            |    |
          br1  br2 ...          card k of all nodes is at one switch, and sends and receives at most at the rate
            |    |
  node 1 [ eth1 eth2 ... ]

The processes are started with the environment of torchrun's, so any program runs here that runs under torchrun. They
really go through the kernel's network, with its headers and its buffers; only the rate is made. All that is made is
gone when the last process has ended, however it ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch_parallel import nics
from torch_parallel.units import parse_bytes_per_s
from torch_parallel.usage import ConfigError, OneLineParser

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
INSIDE = "TORCH_PARALLEL_LAB"
"""Set in the process that has left the machine's network."""
BURST_BYTES = 128 << 10
"""So much may be sent at once; less would not let through what the kernel gives a card in one piece."""
QUEUE_MS = 50
"""So long may packets wait at a card before they are dropped."""
TCP = {"tcp_congestion_control": "cubic", "tcp_slow_start_after_idle": "0"}
"""As on machines that do nothing but exchange: a connection that was idle for a moment goes on as fast as before."""
GRACE_S = 60.0
"""So long may the others go on when one has failed: each is to find out by itself."""
PORT = 29500


def main(arguments: Sequence[str]) -> None:
    parser = OneLineParser(prog="python -m torch_parallel lab", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="machines (default: 2)")
    help = "processes of each; for unlike nodes a number for each, as in 2,1 (default: 2)"
    parser.add_argument("--workers_per_node", default="2", metavar="N", help=help)
    parser.add_argument("--nics", type=int, default=1, metavar="N", help="network cards of each (default: 1)")
    help = "of each card, in each direction, such as 200mbit (default: as fast as the kernel goes)"
    parser.add_argument("--rate", metavar="RATE", help=help)
    help = "what each process runs: a Python program and its flags, behind --"
    parser.add_argument("program", nargs="+", metavar="PROGRAM", help=help)
    options = parser.parse_args(_with_help_shown(arguments))
    workers = _workers(options.workers_per_node, options.nodes)
    _check(options.nodes, options.nics, options.rate)
    if INSIDE not in os.environ:
        _go_inside(arguments)
    os.environ.pop(INSIDE)
    sys.exit(run(workers, options.nics, options.rate, options.program))


def _with_help_shown(arguments: Sequence[str]) -> list[str]:
    return list(arguments) or ["--help"]


def _workers(text: str, nodes: int) -> list[int]:
    counts = text.split(",")
    if not all(count.strip().isdecimal() and int(count) >= 1 for count in counts):
        raise ConfigError(f"--workers_per_node {text}: whole numbers, at least 1, are needed")
    if len(counts) not in (1, nodes):
        raise ConfigError(f"--workers_per_node {text}: one number for all nodes, or {nodes}, one for each, are needed")
    return [int(count) for count in counts] * (nodes if len(counts) == 1 else 1)


def _check(nodes: int, cards: int, rate: str | None) -> None:
    """Raises ConfigError."""
    if not 1 <= nodes <= 200:
        raise ConfigError(f"--nodes {nodes}: between 1 and 200 are possible")
    if not 1 <= cards <= 32:
        raise ConfigError(f"--nics {cards}: between 1 and 32 are possible")
    if rate is not None:
        try:
            parse_bytes_per_s(rate)
        except ValueError as error:
            raise ConfigError(f"--rate {rate}: {error}") from None
    if sys.platform != "linux":
        raise ConfigError("the lab is made of Linux's network namespaces; here, emulate links: train.py --nodes --link")
    for tool, package in (
        *((name, "util-linux") for name in ("unshare", "nsenter")),
        ("ip", "iproute2"),
        ("tc", "iproute2"),
    ):
        if shutil.which(tool) is None:
            raise ConfigError(f"the lab needs the command {tool}: install {package}")


def _go_inside(arguments: Sequence[str]) -> NoReturn:
    """Starts this program anew where it may make networks. Raises ConfigError where the system does not allow it."""
    unshare = ["unshare", "--map-root-user", "--net", "--mount"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, encoding="utf-8", errors="replace", check=False)
    if tried.returncode:
        raise ConfigError(
            f"this system does not allow namespaces to this user ({tried.stderr.strip()}): allow them (sysctl "
            "kernel.unprivileged_userns_clone=1, or kernel.apparmor_restrict_unprivileged_userns=0), or emulate links: "
            "train.py --nodes --link"
        )
    os.environ[INSIDE] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or it warns that nodes have no names
    sys.stdout.flush()
    os.execvp("unshare", [*unshare, sys.executable, "-m", "torch_parallel", "lab", *arguments])


def run(workers: list[int], cards: int, rate: str | None, program: list[str]) -> int:
    """Makes the nodes, runs the program in each process, and returns the exit code: 0, or that of the first failure."""
    names = [f"eth{index + 1}" for index in range(cards)]
    _call("ip", "link", "set", "lo", "up")
    for index in range(cards):
        _call("ip", "link", "add", f"br{index + 1}", "type", "bridge")
        _call("ip", "link", "set", f"br{index + 1}", "up")
    _import_early()
    nodes = []
    for number in range(len(workers)):
        node = Node(number, workers, names, program)
        for index in range(cards):
            _plug_in(node.pid, number, index, rate)
        nodes.append(node)
    for node in nodes:
        node.go()
    code = _wait_for([node.pid for node in nodes])
    for node in nodes:
        print(node.traffic_line(), flush=True)
    return code


def _import_early() -> None:
    """Once, and not in each of the processes that are forked."""
    import torch
    import torch._dynamo  # which the first optimizer imports

    import torch_parallel.training.run  # noqa: F401

    torch.set_num_threads(1)  # or those of this process would be missing in its forks
    gc.freeze()  # the forks need no copies of what they only read


def _plug_in(pid: int, number: int, index: int, rate: str | None) -> None:
    """Gives a node its card `index`, and joins it with the switch of that number."""
    far, near, address = f"n{number}c{index}", f"eth{index + 1}", f"10.77.{index}.{number + 1}/24"
    inside = ("nsenter", f"--net=/proc/{pid}/ns/net")
    _call("ip", "link", "add", far, "type", "veth", "peer", "name", near, "netns", str(pid))
    _call("ip", "link", "set", far, "master", f"br{index + 1}", "up")
    _call(*inside, "ip", "address", "add", address, "dev", near)
    _call(*inside, "ip", "link", "set", near, "up")
    if rate is not None:
        bits = f"{round(8 * parse_bytes_per_s(rate))}bit"
        shape = ("root", "tbf", "rate", bits, "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
        _call("tc", "qdisc", "add", "dev", far, *shape)
        _call(*inside, "tc", "qdisc", "add", "dev", near, *shape)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        raise ConfigError(f"the lab cannot be made: {' '.join(command)}: {done.stderr.strip()}")


def _wait_for(pids: Sequence[int]) -> int:
    """Until all have ended; when one has failed, others have GRACE_S to find out. The first failure's code, or 0."""
    code, failed_s = 0, 0.0
    left = set(pids)
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            left.remove(pid)
            ended = os.waitstatus_to_exitcode(status)
            if ended and not code:
                code, failed_s = (ended if ended > 0 else 128 - ended), time.monotonic()
        elif failed_s and time.monotonic() - failed_s > GRACE_S:
            for pid in left:
                os.kill(pid, signal.SIGKILL)  # and with a node its ranks
            failed_s = 0.0
        elif not pid:
            time.sleep(0.02)
    return code


class Node:
    """A process in a network of its own, which starts the ranks of the node."""

    def __init__(self, number: int, workers: list[int], names: list[str], program: list[str]) -> None:
        self.number, self.names = number, names
        ready, self._go = os.pipe(), os.pipe()
        self._traffic = os.pipe()
        self.pid = _forked(lambda: self._hold(workers, program, ready))
        os.close(ready[1])
        if not os.read(ready[0], 1):
            raise ConfigError("the lab cannot be made: a node has no network of its own")
        os.close(self._traffic[1])

    def go(self) -> None:
        """The cards are there."""
        os.write(self._go[1], b"1")

    def traffic_line(self) -> str:
        text = os.read(self._traffic[0], 1 << 16).decode()
        return f"node {self.number}: {text}" if text else f"node {self.number}: its cards were not read"

    def _hold(self, workers: list[int], program: list[str], ready: tuple[int, int]) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.write(ready[1], b"1")
        os.close(ready[1])
        os.read(self._go[0], 1)
        _call("ip", "link", "set", "lo", "up")
        for name, value in TCP.items():
            with contextlib.suppress(OSError):  # a kernel may have no such thing
                Path(f"/proc/sys/net/ipv4/{name}").write_text(value, encoding="ascii")
        first = sum(workers[: self.number])
        pids = [
            _forked(lambda local=local: _rank(program, self._environment(workers, first + local, local)))  # type: ignore[misc]
            for local in range(workers[self.number])
        ]
        code = _wait_for(pids)
        traffic = nics.read()
        words = [f"{name} sent {traffic[name][0]:,} bytes, received {traffic[name][1]:,}" for name in self.names]
        os.write(self._traffic[1], "; ".join(words).encode())
        return code

    def _environment(self, workers: list[int], rank: int, local: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(sum(workers)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(workers[self.number]),
            "GROUP_RANK": str(self.number),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": str(PORT),
            nics.INTERFACES: os.environ.get(nics.INTERFACES, ",".join(self.names)),
        }


def _rank(program: list[str], environment: dict[str, str]) -> int:
    os.environ.update(environment)
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return 0
    if not program[0].endswith(".py"):
        os.execvp(program[0], program)
    sys.argv = list(program)
    sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
    runpy.run_path(program[0], run_name="__main__")
    return 0


def _forked(body: Callable[[], int]) -> int:
    """A child that ends with its parent. `body` gives its exit code."""
    parent, (sys_out, sys_err) = os.getpid(), (sys.stdout, sys.stderr)
    sys_out.flush()
    sys_err.flush()
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    code: Any = 1
    try:
        code = body()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # a program may have put its own there
    _end(code)


def _end(code: Any) -> NoReturn:
    """As the interpreter ends, but without taking down what lies in the memory of all forks, which takes seconds."""
    if not (code is None or isinstance(code, int)):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)
