"""What only GPUs have: work that is enqueued, waits that a stream or a kernel is in, memory that another process maps.

What all transports promise is held against this one too in `test_conformance.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from transports import gpu_memory_falls_to, gpu_memory_mb

from torch_parallel import Communicator, WorkerFailure, launch
from torch_parallel.collectives import COLLECTIVES, RING_ALL_REDUCE, Collective, broadcast_from, reduce_to
from torch_parallel.collectives.schedule import Receive, Rounds, Send
from torch_parallel.gradients.layout import NamedParameters
from torch_parallel.strategies import ASYNCHRONOUS, FROM_SCRATCH, STRATEGIES, FromScratch
from torch_parallel.topology import Topology
from torch_parallel.transport import cuda_ipc
from torch_parallel.transport.base import TransportError
from torch_parallel.transport.cuda_ipc import CudaIpcTransport
from torch_parallel.transport.stream_signals import WORDS

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="there is no GPU")]
both_performers = pytest.mark.parametrize("performer", ["plain", "triton"])
two_gpus = pytest.mark.skipif(GPUS < 2, reason="two processes with a GPU each need 2 GPUs")


def on_gpus(
    n: int, performer: str, function: Callable[..., Any], *arguments: Any, deadline_s: float = 60.0
) -> list[Any]:
    return launch(function, n, *arguments, device="cuda", performer=performer, threads=1, deadline_s=deadline_s)


def gpu_transport(communicator: Communicator) -> CudaIpcTransport:
    assert isinstance(communicator.transport, CudaIpcTransport)
    return communicator.transport


# ---- results ----


def chosen_performer(communicator: Communicator) -> tuple[bool, bool, str]:
    transport = gpu_transport(communicator)
    buffer = communicator.share(1000)
    buffer.local.fill_(communicator.rank + 1)
    transport.perform(RING_ALL_REDUCE, buffer)
    assert buffer.local.unique().tolist() == [3.0]
    return transport.triton is not None, buffer.plans[RING_ALL_REDUCE].table is not None, str(buffer.local.device)


def test_the_performer_asked_for_is_taken() -> None:
    assert on_gpus(2, "plain", chosen_performer) == [(False, False, f"cuda:{rank % GPUS}") for rank in range(2)]
    for performer, kernel in (("triton", True), ("auto", GPUS > 1)):
        found = on_gpus(2, performer, chosen_performer)
        assert found == [(kernel, kernel, f"cuda:{rank % GPUS}") for rank in range(2)], performer


def taken_by_the_kernel(communicator: Communicator) -> list[str]:
    transport, taken = communicator.transport, []
    for name, acknowledge in (
        ("one_shot", True),
        ("two_shot_in_place", True),
        ("gather_scatter", True),
        ("all_to_all", True),
        ("direct_reduce_scatter", False),
    ):
        buffer = communicator.share(6)
        transport.perform(COLLECTIVES[name], buffer, acknowledge=acknowledge)
        transport.acknowledge()
        transport.settle()
        taken += [name] * (buffer.plans[COLLECTIVES[name]].table is not None)
    transport.synchronize()
    return taken


def test_the_kernel_takes_all_regions_but_no_moved_chunks_and_nothing_acknowledged_later() -> None:
    assert on_gpus(2, "triton", taken_by_the_kernel) == [["one_shot", "two_shot_in_place", "gather_scatter"]] * 2
    assert on_gpus(2, "plain", taken_by_the_kernel) == [[]] * 2


def two_shot_rounds(rank: int, world_size: int) -> Rounds:
    """Everybody sums its own chunk from all others in one round, then takes the others' chunks from them."""
    others = [(rank + distance) % world_size for distance in range(1, world_size)]
    own = range(rank, rank + 1)
    yield [
        *(Send(other, range(other, other + 1)) for other in others),
        *(Receive(other, own, reduce=True) for other in others),
    ]
    yield [
        *(Send(other, own) for other in others),
        *(Receive(other, range(other, other + 1), reduce=False) for other in others),
    ]


def two_shot(communicator: Communicator, numel: int) -> int:
    nothing = lambda *arguments: 0  # noqa: E731
    collective = Collective(
        "two_shot", two_shot_rounds, lambda n: n, lambda *arguments: None, nothing, nothing, nothing
    )
    transport, buffer = communicator.transport, communicator.share(numel)
    wrong = 0
    for repetition in range(20):
        transport.settle()
        buffer.local.copy_((torch.arange(numel) + repetition) % 1000 * 10**communicator.rank)
        transport.perform(collective, buffer)
        expected = (torch.arange(numel) + repetition) % 1000 * sum(10**rank for rank in range(communicator.world_size))
        wrong += int((buffer.local.cpu() != expected).sum())
    return wrong


@both_performers
@pytest.mark.parametrize("n, numel", [(2, 100_003), (3, 5000), (4, 70_001)])
def test_several_sources_in_one_round(performer: str, n: int, numel: int) -> None:
    assert on_gpus(n, performer, two_shot, numel) == [0] * n


def small_to_large(communicator: Communicator) -> list[float]:
    buffer = communicator.share(100, torch.bfloat16)
    buffer.local.fill_(256.0 if communicator.rank == 0 else 1.0)
    communicator.transport.perform(reduce_to(0), buffer)
    communicator.transport.settle()
    return buffer.local.unique().tolist()


def test_the_kernel_sums_bfloat16_in_float32() -> None:
    """bfloat16 has 8 bits: 256 + 1 is 256 again, and 256 + 1 + 1 + 1 = 259 is rounded to 260, if only once."""
    assert on_gpus(4, "triton", small_to_large)[0] == [260.0]
    assert on_gpus(4, "plain", small_to_large)[0] == [256.0]


def on_two_streams(communicator: Communicator) -> tuple[list[float], list[float]]:
    """The first sum is held up on a stream of its own, while the second one is asked for on another."""
    first, second = (torch.full((100_000,), value, device=communicator.device) for value in (1.0, 10.0))
    communicator.all_reduce(torch.zeros(100_000, device=communicator.device))  # compiles and shares what is needed
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        communicator.all_reduce(first)
    communicator.all_reduce(second)
    torch.cuda.synchronize()
    return first.unique().tolist(), second.unique().tolist()


@both_performers
def test_operations_of_two_streams_come_one_after_the_other(performer: str) -> None:
    assert on_gpus(2, performer, on_two_streams) == [([2.0], [20.0])] * 2


def ordinary_tensors(communicator: Communicator) -> None:
    rank, device = communicator.rank, communicator.device
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        tensor = torch.arange(60, device=device).to(dtype).view(3, 20).t() + rank  # not contiguous
        assert communicator.all_reduce(tensor) is tensor
        assert torch.equal(tensor.cpu(), (2 * torch.arange(60).view(3, 20).t() + 1).to(dtype))
    first = communicator.broadcast(torch.full((3,), 10.0 + rank, device=device), root=1)
    assert first.tolist() == [11.0] * 3
    on_host = communicator.all_reduce(torch.full((2, 2), 1.0 + rank))
    assert on_host.device.type == "cpu" and on_host.unique().tolist() == [3.0]
    assert communicator.all_reduce(torch.empty(0, device=device)).numel() == 0
    gathered = communicator.gather({"rank": rank})
    assert gathered == ([{"rank": 0}, {"rank": 1}] if rank == 0 else None)


@both_performers
def test_ordinary_tensors_of_gpu_and_host(performer: str) -> None:
    assert on_gpus(2, performer, ordinary_tensors) == [None, None]  # each rank asserts what it holds


def sgd(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.5)


def without_peer_access(communicator: Communicator) -> tuple[str, Tensor, Tensor]:
    """Why, and the weights after a step with gradients staged in the host's memory, and after one without that."""
    host = communicator.host_transport
    assert host is not None
    cuda_ipc._obstacle = lambda device, indices: "no way" if communicator.rank == 1 else ""
    transport, why = cuda_ipc.connect_gpus(host, communicator.device, 60, "auto")
    assert transport is host
    staged = replace(communicator, transport=host, host_transport=None, _scratch={}, _narrowed={})
    weights = []
    for each in (staged, communicator):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3).to(communicator.device)
        strategy = FROM_SCRATCH["ring_all_reduce"](model, sgd, each)
        assert strategy.buckets[0].shared.local.is_cuda == (each is communicator)
        for _ in range(3):
            strategy.begin_step()
            model(torch.full((2, 5), 1.0 + communicator.rank, device=communicator.device)).pow(2).sum().backward()
            strategy.step()
        weights.append(model.weight.detach().cpu())
    return why, weights[0], weights[1]


def test_without_peer_access_gradients_are_staged_in_the_hosts_memory() -> None:
    for why, staged, direct in on_gpus(2, "auto", without_peer_access):
        assert why == f"{cuda_ipc.THROUGH_HOST}: no way (rank 1)"
        assert torch.equal(staged, direct) and bool(torch.isfinite(direct).all())


def where_strategies_exchange(communicator: Communicator) -> list[str]:
    through_host = []
    for name in (*FROM_SCRATCH, *ASYNCHRONOUS):
        if (STRATEGIES[name].server_count > 0) == (communicator.server_count > 0):
            strategy = STRATEGIES[name](torch.nn.Linear(3, 2).to(communicator.device), sgd, communicator)
            assert isinstance(strategy, FromScratch)
            host = communicator.host_transport
            assert strategy.transport is (host if strategy.through_host else communicator.transport)
            assert strategy.buckets[0].shared.local.is_cuda != strategy.through_host
            assert all(parameter.is_cuda for parameter in strategy.model.parameters())
            through_host += [name] * strategy.through_host
    return through_host


def test_only_servers_that_look_who_has_come_exchange_through_the_host() -> None:
    for server_count, expected in ((0, []), (1, list(ASYNCHRONOUS))):
        found = launch(where_strategies_exchange, 2, device="cuda", server_count=server_count, threads=1, deadline_s=60)
        assert found == [expected] * 2


def parameters_of_the_sharded_server(communicator: Communicator) -> tuple[int, list[list[float]]]:
    """Where the parameters lie in this rank's own memory, and what they are after a step of all ones."""
    torch.manual_seed(communicator.rank)
    model = torch.nn.Linear(4, 3).to(communicator.device)
    strategy = FROM_SCRATCH["sharded_param_server"](model, sgd, communicator)
    before = model.weight.detach().clone()
    strategy.begin_step()
    model(torch.ones(1, 4, device=communicator.device)).sum().backward()
    strategy.step()
    copies = communicator.transport.share(1, torch.float32)  # both lie in own slabs, not in rank 0's
    in_own_slab = abs(model.weight.data_ptr() - copies.local.data_ptr()) < cuda_ipc.SLAB_BYTES
    return int(in_own_slab), (before - model.weight).tolist()


def test_the_sharded_server_keeps_all_parameters_on_every_gpu() -> None:
    """A gradient of 1 from each of two ranks, at a learning rate of 0.5: every parameter falls by 1."""
    for in_own_slab, fallen in on_gpus(2, "auto", parameters_of_the_sharded_server):
        assert in_own_slab
        assert torch.allclose(torch.tensor(fallen), torch.ones(3, 4), atol=1e-6)


def over_emulated_links(communicator: Communicator) -> tuple[bool, list[float]]:
    tensor = torch.full((4,), communicator.rank + 1.0, device=communicator.device)
    return communicator.host_transport is None, communicator.all_reduce(tensor).tolist()


def test_emulated_links_are_crossed_in_the_hosts_memory() -> None:
    links = Topology.of(2, "1gbit")
    assert (
        launch(over_emulated_links, 2, device="cuda", links=links, threads=1, deadline_s=60) == [(True, [3.0] * 4)] * 2
    )


def near_the_end_of_numbers(communicator: Communicator) -> list[float]:
    """As after 2^31 signals: what both sides have posted and awaited, and the flags."""
    transport, buffer = gpu_transport(communicator), communicator.share(10)
    before, seen = 2**31 - 5, []
    signals = transport._stream_signals
    signals.flags[transport.rank][:-WORDS] = before
    signals._posted = [[before] * 2 for _ in range(2)]
    signals._awaited = [[before] * 2 for _ in range(2)]
    if transport.triton is not None:
        transport.triton._base = before
    transport._host.agree("have set the numbers")
    for repetition in range(12):
        transport.settle()
        buffer.local.fill_(float(repetition + communicator.rank))
        transport.perform(RING_ALL_REDUCE, buffer)
        seen += buffer.local.unique().tolist()
    return seen


@both_performers
def test_numbers_wrap_around(performer: str) -> None:
    assert on_gpus(2, performer, near_the_end_of_numbers) == [[2.0 * each + 1 for each in range(12)]] * 2


# ---- order ----


def overtaken(communicator: Communicator, settles: bool) -> list[float]:
    """Rank 0 overwrites what it broadcasts at once; rank 1 comes to read it late."""
    transport, buffer = communicator.transport, communicator.share(1 << 20)
    transport.perform(broadcast_from(0), buffer)
    transport.agree("have warmed up")
    buffer.local.fill_(1.0)
    if communicator.rank == 1:
        torch.cuda._sleep(400_000_000)  # about 0.2 s, on the stream
    transport.perform(broadcast_from(0), buffer)
    if settles:
        transport.settle()
    if communicator.rank == 0:
        buffer.local.fill_(2.0)
    return buffer.local.unique().tolist()


@both_performers
def test_settle_keeps_the_owner_from_writing_before_its_readers_have_read(performer: str) -> None:
    assert on_gpus(2, performer, overtaken, True) == [[2.0], [1.0]]


def test_without_settle_the_late_reader_is_overtaken() -> None:
    """That the test above can fail. (The kernel's operations end with their readers.)"""
    assert on_gpus(2, "plain", overtaken, False) == [[2.0], [2.0]]


def calls_return_at_once(communicator: Communicator) -> float:
    transport, buffer = communicator.transport, communicator.share(1000)
    transport.perform(RING_ALL_REDUCE, buffer)
    transport.agree("have warmed up")
    if communicator.rank == 1:
        torch.cuda._sleep(2_000_000_000)  # about a second
    start_s = time.perf_counter()
    transport.perform(RING_ALL_REDUCE, buffer)
    transport.settle()
    elapsed_s = time.perf_counter() - start_s
    transport.synchronize()
    assert time.perf_counter() - start_s > 0.4
    return elapsed_s


@both_performers
def test_the_host_does_not_wait(performer: str) -> None:
    assert max(on_gpus(2, performer, calls_return_at_once)) < 0.2


# ---- errors ----


def rank_1_stays_away(communicator: Communicator, what: str, ends: str) -> tuple[str, str]:
    """The error of the first call that finds out, and of one more."""
    transport, buffer = communicator.transport, communicator.share(9)
    errors = []
    if communicator.rank == 1:
        for _ in range(7):
            time.sleep(1)
            communicator.status.beat()
        with contextlib.suppress(TransportError):  # that another gave up
            transport.synchronize()
        return "", ""
    for _ in range(2):
        try:
            if what == "settle":
                transport.perform(broadcast_from(0), buffer)
                transport.settle()
            else:
                transport.perform(RING_ALL_REDUCE, buffer, "gradients of bucket 3")
            {"synchronize": lambda: 0, "item": buffer.local.sum().item, "cpu": buffer.local.cpu}[ends]()
            transport.synchronize()
            errors.append("no error")
        except TransportError as error:
            errors.append(re.sub(r"for \d+\.\d s$", "for X s", str(error)))
            assert all(6 <= float(waited_s) < 20 for waited_s in re.findall(r"for (\d+\.\d) s$", str(error)))
    return errors[0], errors[1]


@pytest.mark.parametrize(
    "performer, ends, what",
    [
        ("plain", "synchronize", "ring"),
        ("triton", "synchronize", "ring"),
        ("plain", "item", "ring"),
        ("plain", "cpu", "ring"),
        ("plain", "synchronize", "settle"),
        ("triton", "cpu", "settle"),
    ],
)
def test_the_deadline_names_rank_peer_purpose_and_round(performer: str, ends: str, what: str) -> None:
    """The host waits for the GPU in one of three ways; the watchdog gets through all the same."""
    on_gpus(3, performer, chosen_of_three)  # compiles, which takes longer than the deadline
    errors = on_gpus(3, performer, rank_1_stays_away, what, ends, deadline_s=6.0)
    if what == "ring":  # rank 2 waits for rank 1 from the start; rank 0 waits for rank 2 one round later
        own = {
            0: "rank 0, gradients of bucket 3, round 1: no signal from rank 2 for X s",
            2: "rank 2, gradients of bucket 3, round 0: no signal from rank 1 for X s",
        }
    else:  # rank 1 does not come to read; and rank 2, which has read, waits for a second broadcast
        own = {0: "rank 0, broadcast, end of the peer's reading: no signal from rank 1 for X s", 2: "no error"}
    for rank in (0, 2):  # who gives up first tells the other
        told = f"rank {rank}, exchanging with rank {2 - rank}: it gave up waiting for another rank"
        assert errors[rank][0] in (own[rank], told)
        assert errors[rank][1] == errors[rank][0] or what == "settle"
    assert own[0] == errors[0][0] or own[2] == errors[2][0]


def asks_nothing_after_its_wait(communicator: Communicator) -> list[float]:
    """What a rank would return that copies the sums at once, from a stream that the watchdog or the kernel set free."""
    buffer = communicator.share(9)
    if communicator.rank == 1:
        for _ in range(7):
            time.sleep(1)
            communicator.status.beat()
    else:
        communicator.transport.perform(RING_ALL_REDUCE, buffer)
    return buffer.local.tolist()


@both_performers
def test_a_wait_that_failed_ends_the_run_though_no_later_call_asks(performer: str) -> None:
    on_gpus(2, performer, chosen_performer)  # compiles
    with pytest.raises(WorkerFailure, match=r"no signal from rank 1|gave up waiting for another rank"):
        on_gpus(2, performer, asks_nothing_after_its_wait, deadline_s=6.0)


def busy_for_two_deadlines(communicator: Communicator, algorithm: str) -> list[float]:
    """The streams of both are, before what they wait for."""
    transport, buffer = communicator.transport, communicator.share(9)
    collective = RING_ALL_REDUCE if algorithm == "ring" else broadcast_from(0)
    transport.perform(collective, buffer)
    transport.agree("have warmed up")  # to load a kernel the host waits for the GPU
    buffer.local.fill_(communicator.rank + 1.0)
    for _ in range(12):  # the host goes on at once
        torch.cuda._sleep(2_000_000_000)  # about a second
    transport.perform(collective, buffer)
    while not torch.cuda.current_stream().query():
        time.sleep(0.2)
        communicator.status.beat()
    transport.synchronize()
    return buffer.local.unique().tolist()


@two_gpus
@pytest.mark.parametrize("algorithm, result", [("ring", 3.0), ("broadcast", 1.0)])
def test_the_deadline_does_not_count_what_the_own_stream_still_has_to_do(algorithm: str, result: float) -> None:
    """In a broadcast rank 1 posts nothing, and waits all the same."""
    assert on_gpus(2, "plain", busy_for_two_deadlines, algorithm, deadline_s=6.0) == [[result], [result]]


def chosen_of_three(communicator: Communicator) -> None:
    buffer = communicator.share(9)
    for collective in (RING_ALL_REDUCE, broadcast_from(0)):
        communicator.transport.perform(collective, buffer)
        communicator.transport.agree("done")


def killed(communicator: Communicator, folder: str) -> None:
    buffer = communicator.share(1 << 20)
    for step in range(10**9):
        if step == 200 and communicator.rank == 1:
            (Path(folder) / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.transport.settle()
        communicator.transport.perform(RING_ALL_REDUCE, buffer)
        if step % 50 == 0:
            communicator.transport.synchronize()


@pytest.mark.alone
@both_performers
def test_a_killed_peer_ends_the_run_and_gives_its_memory_back(performer: str, tmp_path: Path) -> None:
    gpu_memory_mb()  # this process has its own file from now on, if it had none before
    left_before, used_before = files_of_processes(), gpu_memory_mb()
    with pytest.raises(WorkerFailure, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
        on_gpus(2, performer, killed, str(tmp_path))
    assert time.time() - float((tmp_path / "killed").read_text()) < 10
    assert files_of_processes() <= left_before
    assert gpu_memory_falls_to(used_before), f"MiB in use by GPU: {gpu_memory_mb()}, before: {used_before}"
    on_gpus(2, performer, chosen_performer)  # and the GPUs work
    assert files_of_processes() <= left_before


def files_of_processes() -> set[Path]:
    return {file for pattern in ("torch_*", "cuda.shm.*") for file in Path("/dev/shm").glob(pattern)}


# ---- resources ----


def a_thousand_steps(communicator: Communicator) -> list[tuple[int, int]]:
    """Bytes of GPU memory and pages of this process after 200 and after 1,200 steps."""
    transport, buffer = communicator.transport, communicator.share(10_000)
    figures = []
    for step in range(1, 1201):
        transport.settle()
        buffer.local.fill_(1.0)
        transport.perform(RING_ALL_REDUCE, buffer)
        communicator.all_reduce(torch.ones(100, device=communicator.device))
        if step in (200, 1200):
            transport.synchronize()
            resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
            figures.append((torch.cuda.memory_reserved(), resident_pages))
    return figures


@both_performers
def test_memory_is_flat_over_a_thousand_steps(performer: str) -> None:
    for (gpu_before, pages_before), (gpu_after, pages_after) in on_gpus(2, performer, a_thousand_steps):
        assert gpu_after == gpu_before
        assert (pages_after - pages_before) * os.sysconf("SC_PAGE_SIZE") < 4 << 20


def memory_of_all_gpus(communicator: Communicator) -> list[int] | None:
    communicator.share(1000)
    communicator.barrier()
    used = None
    if communicator.rank == 0:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        used = [int(line) for line in subprocess.check_output(command, text=True).split()]
    communicator.barrier()
    return used


@pytest.mark.alone
@two_gpus
def test_no_process_has_a_context_on_another_ones_gpu() -> None:
    """What one process alone has in use on GPU 0, each of two has on its own, which idle as little as each other."""
    gpu_memory_mb()  # this process has a context on every GPU from now on, if it had none before
    alone, used = (on_gpus(n, "auto", memory_of_all_gpus)[0] for n in (1, 2))
    assert alone is not None and used is not None
    for gpu in (0, 1):
        assert abs(used[gpu] - alone[0]) < 250, f"MiB in use by GPU: {used}, alone: {alone}; a context takes some 500"


@two_gpus
def test_cuda_visible_devices_is_respected() -> None:
    code = (
        "import torch\n"
        "from torch_parallel import launch\n"
        "def where(communicator):\n"
        "    total = communicator.all_reduce(torch.ones(5, device=communicator.device)).tolist()\n"
        "    assert total == [2.0] * 5\n"
        "    return str(torch.cuda.get_device_properties(communicator.device).uuid)\n"
        "print(*launch(where, 2, device='cuda'))\n"
    )
    uuids = []
    for visible in ("0,1", "1,0"):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=90
        )
        assert ended.returncode == 0, ended.stderr
        uuids.append(ended.stdout.split())
    assert len(set(uuids[0])) == 2
    assert uuids[1] == uuids[0][::-1]


def kernels_of_a_step(communicator: Communicator) -> tuple[list[str], bool]:
    from torch.profiler import ProfilerActivity, profile

    tensor: Tensor = torch.ones(100_000, device=communicator.device)
    communicator.all_reduce(tensor)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        communicator.all_reduce(tensor)
        torch.cuda.synchronize()
    return [event.key for event in trace.key_averages()], torch.distributed.is_initialized()


@both_performers
def test_no_kernel_of_nccl_and_no_process_group(performer: str) -> None:
    for names, initialized in on_gpus(2, performer, kernels_of_a_step):
        assert not initialized
        assert any("perform_table" in name for name in names) == (performer == "triton"), names
        assert not [name for name in names if "nccl" in name.lower()]
