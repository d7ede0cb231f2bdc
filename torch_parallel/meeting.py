"""How processes that others have started find each other, and each other's memory: by a store, and by /proc.

Every process writes into the store who it is; the lowest rank of each node makes the node's memory of a run, an
anonymous file, and says where it lies: `/proc/PID/fd/FD`, which any process of the same user may open. So nothing has a
name, and nothing is left behind, however the processes end. Each also holds a pidfd of every other of its node, which
the kernel makes readable when that process ends; a thread then writes so on the status board, where all waits look.

  rank 0    store: "process 0" = 71 host   memfd 5, pipes   store: "run 1" = /proc/71/fd/5 ...      trains
  rank 1    store: "process 1" = 72 host   pidfd of 71                    opens /proc/71/fd/5       trains

Between nodes, each the processes of one machine, or of one agent of torchrun, a messenger tells what is on the boards:
`messenger.py`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from torch_parallel import pickling
from torch_parallel.collectives.schedule import Nodes
from torch_parallel.messenger import Hub, Messenger, connect_to_hub
from torch_parallel.place import Place, RendezvousError
from torch_parallel.status import DIED, RUNNING, StatusBoard
from torch_parallel.transport.arena import Arena
from torch_parallel.transport.shared_memory import Wiring
from torch_parallel.transport.signals import Inboxes

LOOK_S = 0.02
"""How often a process looks whether a word is there for which it waits."""
ELSEWHERE = "10.255.255.255"
"""An address of another machine, by which the card for all others is found."""
HEARD_S = 5.0
"""So long does rank 0 wait for others to hear its last word of a run."""


def store_of(place: Place, deadline_s: float) -> Store:
    """The store of the environment: torchrun's agent has one, else rank 0 makes it. Raises RendezvousError."""
    try:
        socket.getaddrinfo(place.host, place.port)
    except OSError as error:
        raise RendezvousError(
            f"MASTER_ADDR is {place.host}, which cannot be resolved ({error.strerror or error}): give the name or the "
            "address of the machine of rank 0"
        ) from None
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            place.host,
            place.port,
            place.world_size,
            is_master=place.rank == 0 and not has_agent,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise RendezvousError(
            f"rank {place.rank} of {place.world_size} cannot meet the others at {place.host}:{place.port} ({why}): are "
            "MASTER_ADDR and MASTER_PORT those of rank 0, and is its port open?"
        ) from None


class Meeting:
    """The processes that were started as `world_size` ranks. All of them make it, and all live then.

    `node` tells nodes of one machine apart; processes of several machines are of several nodes in any case. `host` is
    the machine of the store, where that is known. Raises RendezvousError where a process does not come within the
    deadline, or runs other versions, and where nodes do not reach each other.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, deadline_s: float, *, node: str = "", host: str = ""
    ) -> None:
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        """How often torchrun has started these processes anew. They meet anew then, in the store of those before."""
        number = store.add(f"torch_parallel/meetings of {rank}/{self.attempt}", 1)  # each makes the same, in one order
        self.store = PrefixStore(f"torch_parallel/{number}/{self.attempt}", store)
        self.of_all_attempts = PrefixStore(f"torch_parallel/{number}", store)
        self.rank, self.world_size, self.deadline_s = rank, world_size, deadline_s
        self._runs = 0
        self.pids: list[int] = []
        self.pidfds: dict[int, int] = {}  # by rank, of this node
        self.nodes: Nodes = ()
        """The node of each rank, from 0 on."""
        self.nics: tuple[str, ...] = ()
        """The network cards by which nodes exchange, where they were named."""
        self._boards: list[StatusBoard] = []
        self._ended: set[int] = set()
        self._meet(node)
        self.mates = [peer for peer in range(world_size) if self.nodes[peer] == self.node]
        """The ranks of this node, this one among them."""
        self.address = _own_address(host) if self.node_count > 1 and not self._one_machine else "127.0.0.1"
        """By which other nodes reach this one."""
        self.messenger: Messenger | None = None
        if self.node_count > 1 and self.is_lead:
            self.messenger = self._messenger(host)
        self._end, self._closing = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="watch over peers", daemon=True)
        self._watcher.start()

    @property
    def node(self) -> int:
        return self.nodes[self.rank]

    @property
    def node_count(self) -> int:
        return len(set(self.nodes))

    @property
    def lead(self) -> int:
        """The lowest rank of this node."""
        return self.mates[0]

    @property
    def is_lead(self) -> bool:
        return self.rank == self.nodes.index(self.node)

    def _meet(self, node: str) -> None:
        own = {"pid": os.getpid(), "machine": _machine(), "node": (_host(), node), "versions": _versions()}
        self.tell(f"process {self.rank}", own)
        at: list[Any] = []
        machines: set[str] = set()
        for peer in range(self.world_size):
            theirs = pickling.loads(self._word(f"process {peer}", f"rank {peer} to come"))
            self._compare(peer, own, theirs)
            self.pids.append(theirs["pid"])
            at.append(theirs["node"])
            machines.add(theirs["machine"])
            if peer != self.rank and theirs["node"] == own["node"]:
                try:
                    self.pidfds[peer] = os.pidfd_open(theirs["pid"])
                except ProcessLookupError:
                    raise RendezvousError(f"the process of rank {peer} has ended before all had met") from None
        numbers = {each: number for number, each in enumerate(dict.fromkeys(at))}
        self.nodes = tuple(numbers[each] for each in at)
        self._one_machine = len(machines) == 1

    def _messenger(self, host: str) -> Messenger:
        """Of this node: rank 0 waits for the other nodes, the others connect to it."""
        try:
            if self.rank == 0:
                hub = Hub()
                self.tell("hub", (self._hosts(host), *hub.told))
                connections = hub.connections(set(self.nodes) - {self.node}, self.deadline_s)
            else:
                hosts, port, token = self.hear("hub", "where to connect", self.deadline_s)
                connections = {self.nodes[0]: connect_to_hub(hosts, port, token, self.node)}
        except ConnectionError as error:
            raise RendezvousError(str(error)) from None
        return Messenger(self.nodes, self.node, connections, self.deadline_s)

    def _hosts(self, host: str) -> list[str]:
        """Where others may find rank 0, which this is."""
        return ["127.0.0.1"] if self._one_machine else [each for each in (self.address, host) if each]

    def _compare(self, peer: int, own: dict[str, Any], theirs: dict[str, Any]) -> None:
        for name, mine in own["versions"].items():
            if theirs["versions"][name] != mine:
                raise RendezvousError(
                    f"rank {peer} has {name} {theirs['versions'][name]}, and rank {self.rank} has {mine}: install the "
                    "same for all"
                )

    def _word(self, key: str, what: str) -> bytes:
        """What is written in the store under a key, once it is there. Raises RendezvousError at the deadline."""
        since_s = time.monotonic()
        while not self._is_there(key, what):
            waited_s = time.monotonic() - since_s
            if waited_s > self.deadline_s:
                raise RendezvousError(
                    f"rank {self.rank} of {self.world_size} waited {waited_s:.0f} s for {what}: were all ranks "
                    "started, with one MASTER_ADDR and MASTER_PORT?"
                )
            time.sleep(LOOK_S)
        return bytes(self.store.get(key))

    def _is_there(self, key: str, what: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except (dist.DistError, RuntimeError) as error:
            why = " ".join(str(error).split())[:160]
            raise RendezvousError(f"rank {self.rank} waits for {what}, and the store does not answer ({why})") from None

    # ---- words ----

    def tell(self, key: str, word: Any) -> None:
        """Writes it into the store, for all others."""
        self.store.set(key, pickling.dumps(word))  # type: ignore[arg-type]

    def hear(self, key: str, what: str, limit_s: float | None = None, teller: int = 0) -> Any:
        """What rank `teller` tells under this key, however long it takes, as long as its process lives. `what` says
        what for.

        Raises RendezvousError where it has ended, or has not told within the limit, where there is one. The store is
        not asked where its node cannot be reached: it may be there.
        """
        since_s = time.monotonic()
        while True:
            ended = self.has_ended(teller)  # before the look: it may tell, and end
            if not ended and self.is_lost(teller):
                raise RendezvousError(f"{self._lost_words(teller)}, and rank {self.rank} waits for {what}")
            try:
                if self._is_there(key, what):
                    return pickling.loads(bytes(self.store.get(key)))
            except RendezvousError:  # the store may have been rank 0's
                time.sleep(LOOK_S)
                if not self.is_lost(teller):
                    raise
                ended = True
            if ended:
                raise RendezvousError(f"{self._lost_words(teller)}, and rank {self.rank} waits for {what}")
            if limit_s is not None and time.monotonic() - since_s > limit_s:
                raise RendezvousError(f"rank {self.rank} waited {limit_s:.0f} s for rank {teller} to tell {what}")
            time.sleep(LOOK_S)

    def _lost_words(self, rank: int) -> str:
        if self.has_ended(rank):
            return f"the process of rank {rank} has ended"
        return f"the node of rank {rank} cannot be reached any more"

    def say_heard(self, key: str) -> None:
        """Lets rank 0 know: the store may be its own, and end with it."""
        with contextlib.suppress(dist.DistError, RuntimeError):  # it has ended already
            self.tell(f"{key} heard by {self.rank}", True)

    def wait_until_heard(self, key: str) -> None:
        """Returns when all others have heard what was told, or have ended; after HEARD_S at the latest."""
        give_up_s = time.monotonic() + HEARD_S
        for peer in range(self.world_size):
            while peer != self.rank and time.monotonic() < give_up_s and not self.is_lost(peer):
                if self.store.check([f"{key} heard by {peer}"]):
                    break
                time.sleep(LOOK_S)

    def note(self, key: str, text: str) -> None:
        """Keeps a text for attempts to come."""
        self.of_all_attempts.set(key, text)

    def noted(self, key: str) -> str | None:
        """What an attempt before this one has noted; None where none has."""
        return self.of_all_attempts.get(key).decode() if self.of_all_attempts.check([key]) else None

    def has_ended(self, rank: int) -> bool:
        if rank not in self.pidfds:
            return False
        poller = select.poll()
        poller.register(self.pidfds[rank], select.POLLIN)
        return bool(poller.poll(0))

    def is_lost(self, rank: int) -> bool:
        """Whether its process has ended, or its node cannot be reached any more, as far as this process knows: by
        itself, or by the boards that its node's messenger writes."""
        if rank in self.mates:
            return self.has_ended(rank)
        noted = any(board.over(rank) == DIED for board in self._boards)
        return noted or (self.messenger is not None and self.nodes[rank] in self.messenger.lost)

    def next_run(self) -> int:
        """The number of the next run of these processes, from 1 on; each calls it for each run."""
        self._runs += 1
        return self._runs

    # ---- memory ----

    def look_after(self, board: StatusBoard) -> None:
        """From now on a process that ends is written down there."""
        self._boards.append(board)
        for rank in self._ended:
            board.note_end(rank, DIED)

    def look_away_from(self, board: StatusBoard) -> None:
        """Its run is over."""
        self._boards.remove(board)

    def _watch(self) -> None:
        poller = select.poll()
        ranks = {fd: rank for rank, fd in self.pidfds.items()}
        agent = _agent()
        for fd in (*ranks, *agent, self._end):
            poller.register(fd, select.POLLIN | select.POLLHUP)
        while len(self._ended) < len(ranks) or agent:
            for fd, _ in poller.poll(1000):
                if fd == self._end:
                    return
                if fd in agent:
                    self._end_without_agent()
                poller.unregister(fd)
                self._ended.add(ranks[fd])
            for board in list(self._boards):
                for rank in self._ended:
                    if board.over(rank) == RUNNING:
                        board.note_end(rank, DIED)

    def close(self) -> None:
        """Its processes meet no more here; each of them closes what it holds of it."""
        os.close(self._closing)
        self._watcher.join()
        for fd in (self._end, *self.pidfds.values()):
            os.close(fd)
        self.pidfds = {}
        if self.messenger is not None:
            self.messenger.close()

    def _end_without_agent(self) -> NoReturn:
        """Nobody would ever end this process, so it ends itself."""
        print(f"rank {self.rank}: torchrun's agent has ended, and so does this process", file=sys.stderr, flush=True)
        os._exit(1)


def _agent() -> list[int]:
    """A pidfd of torchrun's agent, which has started this process; none where somebody else has."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(ProcessLookupError):
            return [os.pidfd_open(os.getppid())]
    return []


def _host() -> str:
    """One kernel, and one view of its processes and of its network."""
    return f"{_machine()} {os.readlink('/proc/self/ns/pid')}"


def _machine() -> str:
    """One kernel, and one view of its network: who has the same reaches each other by the loopback."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot or platform.node()} {os.readlink('/proc/self/ns/net')}"


def _own_address(host: str) -> str:
    """That of the card by which this machine reaches `host`, or others at all, but not the loopback's, to which the own
    name may lead. Raises RendezvousError."""
    for other in (host or socket.gethostname(), ELSEWHERE):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # which sends nothing
            address = str(probe.getsockname()[0])
            if not address.startswith("127."):
                return address
    raise RendezvousError(
        f"no card of this machine is known by which others reach it ({host or socket.gethostname()} leads to the "
        "loopback, or nowhere): name the cards by --nics"
    )


def _versions() -> dict[str, str]:
    return {"torch_parallel": sys.modules[__package__].__version__, "torch": torch.__version__.partition("+")[0]}


# ---- wiring that others open ----


def address_of(wiring: Wiring) -> dict[str, Any]:
    """Where other processes of this machine find the memory of a run, as long as this process holds it."""
    inboxes = wiring.inboxes
    return {
        "pid": os.getpid(),
        "fd": wiring.arena.fd,
        "inode": os.fstat(wiring.arena.fd).st_ino,
        "next_byte": wiring.arena.next_byte,
        "offsets": wiring.offsets,
        "world_size": wiring.world_size,
        "links": wiring.links,
        "pipes": None if inboxes is None else (inboxes.read_fds, inboxes.write_fds),
    }


def wiring_at(address: dict[str, Any]) -> Wiring:
    """The wiring that another process has made. Raises RendezvousError where it is not there any more."""
    pid = address["pid"]
    fd = opened(pid, address["fd"], os.O_RDWR)
    if os.fstat(fd).st_ino != address["inode"]:
        raise RendezvousError(f"process {pid} does not have the memory any more that it has told of")
    inboxes = None
    if address["pipes"] is not None:
        read_fds, write_fds = address["pipes"]
        inboxes = Inboxes(
            [opened(pid, fd, os.O_RDONLY | os.O_NONBLOCK) for fd in read_fds],
            [opened(pid, fd, os.O_WRONLY) for fd in write_fds],
        )
    arena = Arena(fd, address["next_byte"])
    return Wiring(address["world_size"], arena, tuple(address["offsets"]), inboxes, address["links"])


def opened(pid: int, fd: int, flags: int) -> int:
    """A descriptor of what another process of the same user has open. Raises RendezvousError."""
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_CLOEXEC)
    except OSError as error:
        raise RendezvousError(f"what process {pid} has opened cannot be reached ({error.strerror})") from None
