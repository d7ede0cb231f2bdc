"""Feeding: the same samples in the same order with the same bits, whatever the device, and never a torn batch.

On the CPU, copies that are made as late as a GPU might make them stand for the stream that copies. What is marked gpu
runs the same with real streams, which are held up on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_parallel import RunConfig, train
from torch_parallel.strategies import ASYNCHRONOUS, STRATEGIES
from torch_parallel.strategies.base import Strategy
from torch_parallel.training import checkpoint, feeder, loop
from torch_parallel.training.feeder import CopyStream, Feeder, PrefetchingFeeder, ResidentFeeder, make_feeder
from torch_parallel.training.run import TrainingRun
from torch_parallel.workloads import Dataset
from torch_parallel.workloads.tree import Tree

CPU = torch.device("cpu")
UNWRITTEN = 123


class LateCopies(CopyStream):
    """Copies on the CPU, in their order, that are made when somebody waits for one of them, and no sooner."""

    def __init__(self) -> None:
        self.pending: list[tuple[object, Tensor, Tensor]] = []
        self.handed_over: list[Tensor] = []

    def buffer(self, count: int, like: Tensor) -> Tensor:
        return torch.empty((count, *like.shape[1:]), dtype=like.dtype)

    def begin(self, tensors: list[Tensor]) -> Any:
        copied, event = [torch.full_like(tensor, UNWRITTEN) for tensor in tensors], LateEvent(self)
        self.pending += [(event, source, target) for source, target in zip(tensors, copied, strict=True)]
        return copied, event

    def hand_over(self, tensors: list[Tensor], event: Any) -> None:
        """As on a GPU, nobody waits yet: what computes reads later, and `finish` must have come before."""
        self.handed_over += tensors

    def finish(self, event: object = None) -> None:
        """Makes the copies up to that of the event; all of them without one."""
        events = [each for each, _, _ in self.pending]
        if event is None or event in events:
            count = len(events) if event is None else len(events) - events[::-1].index(event)
            for _, source, target in self.pending[:count]:
                target.copy_(source)
            del self.pending[:count]


class LateEvent:
    def __init__(self, copies: LateCopies) -> None:
        self.copies = copies

    def synchronize(self) -> None:
        self.copies.finish(self)


class PromptCopies(LateCopies):
    """Made when they are handed over, since training on a CPU reads at once."""

    def hand_over(self, tensors: list[Tensor], event: Any) -> None:
        event.synchronize()


def samples(count: int = 40, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor]:
    """Inputs [count, 2, 3] in which every number says which it is, and targets [count]."""
    inputs = (torch.arange(count * 6) % 251).reshape(count, 2, 3).to(dtype)
    return inputs, 1000 + torch.arange(count)


def steps(sizes: list[int]) -> list[Tensor]:
    """Indices of steps of these sizes, all different."""
    return list(torch.randperm(40, generator=torch.Generator().manual_seed(5))[: sum(sizes)].split(sizes))


def made(kind: str, inputs: Tensor, targets: Tensor, device: torch.device) -> Feeder:
    if kind == "prefetching":
        copies = CopyStream(device) if device.type == "cuda" else PromptCopies()
        return PrefetchingFeeder((inputs, targets), device, copies)
    return (Feeder if kind == "plain" else ResidentFeeder)((inputs, targets), device)


def check_against_indexing(kind: str, dtype: torch.dtype, parts: int, ahead: bool, device: torch.device) -> None:
    inputs, targets = samples(dtype=dtype)
    fed = made(kind, inputs, targets, device)
    plan = steps([6, 6, 1, 0, 9, 7, 0, 3])
    for step, indices in enumerate(plan):
        micro_batches = list(fed.feed(indices, parts))
        if ahead and step + 1 < len(plan):
            fed.prefetch(plan[step + 1])
        assert len(micro_batches) == parts
        for ((some_inputs, some_targets), size), part in zip(micro_batches, indices.tensor_split(parts), strict=True):
            assert size == len(part)
            assert some_inputs.device == some_targets.device == fed.device
            assert some_inputs.dtype == dtype and some_inputs.shape == (len(part), 2, 3)
            assert torch.equal(some_inputs.cpu(), inputs[part]) and torch.equal(some_targets.cpu(), targets[part])


every_kind = pytest.mark.parametrize("kind", ["plain", "resident", "prefetching"])
every_dtype = pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
every_plan = pytest.mark.parametrize(("parts", "ahead"), [(1, True), (3, True), (1, False), (4, False)])


@every_kind
def test_micro_batches_by_hand(kind: str) -> None:
    inputs, targets = torch.tensor([[0, 1], [10, 11], [20, 21], [30, 31]]), torch.tensor([5, 6, 7, 8])
    first, second = made(kind, inputs, targets, CPU).feed(torch.tensor([3, 0, 2]), parts=2)
    assert [each.tolist() for each in first[0]] == [[[30, 31], [0, 1]], [8, 5]] and first[1] == 2
    assert [each.tolist() for each in second[0]] == [[[20, 21]], [7]] and second[1] == 1


@every_kind
@every_dtype
@every_plan
def test_what_indexing_gives(kind: str, dtype: torch.dtype, parts: int, ahead: bool) -> None:
    check_against_indexing(kind, dtype, parts, ahead, CPU)


def test_on_the_cpu_nothing_is_copied_but_the_batch() -> None:
    inputs, targets = samples()
    fed = make_feeder((inputs, targets), CPU)
    assert type(fed) is Feeder and fed.leaves[0] is inputs and fed.leaves[1] is targets


# Copies that are late.


def test_a_buffer_is_written_again_only_when_its_copy_is_done() -> None:
    """Nobody reads before all eight steps have been fed: three and more copies are under way, from two buffers."""
    inputs, targets = samples()
    copies = LateCopies()
    fed = PrefetchingFeeder((inputs, targets), CPU, copies)
    plan = steps([5, 5, 5, 4, 6, 5, 0, 2])
    got = []
    for indices, following in zip(plan, [*plan[1:], None], strict=True):
        got += list(fed.feed(indices))
        if following is not None:
            fed.prefetch(following)
        assert len({source.data_ptr() for _, source, _ in copies.pending if source.numel()}) <= 4  # two buffers
    copies.finish()
    for ((some_inputs, some_targets), _), indices in zip(got, plan, strict=True):
        assert torch.equal(some_inputs, inputs[indices]) and torch.equal(some_targets, targets[indices])
    assert [len(each) for each in copies.handed_over] == [size for size in (5, 5, 5, 4, 6, 5, 0, 2) for _ in range(2)]


def test_prefetching_begins_the_copy_and_feed_only_hands_it_over() -> None:
    copies = LateCopies()
    fed = PrefetchingFeeder(samples(), CPU, copies)
    first, second = steps([4, 4])
    fed.prefetch(first)
    assert len(copies.pending) == 2 and not copies.handed_over
    (((some_inputs, _), _),) = fed.feed(first)
    assert len(copies.pending) == 2 and copies.handed_over[0].data_ptr() == some_inputs.data_ptr()
    assert (some_inputs == UNWRITTEN).all()  # nobody has waited
    fed.prefetch(second)
    assert len(copies.pending) == 4  # from the other buffer, so the first copy need not be done
    (((some_inputs, _), _),) = fed.feed(first)  # not what was foretold
    copies.finish()
    assert torch.equal(some_inputs, samples()[0][first])


# Which feeder.


@pytest.mark.parametrize(
    ("data_bytes", "free_bytes", "stays"),
    [
        (0, 0, True),
        (10_000, 40_000, True),
        (10_001, 40_000, False),
        (2_147_483_648, 80 << 30, True),  # 2 GiB
        (2_147_483_649, 80 << 30, False),
        (2_147_483_648, 8_589_934_591, False),  # a byte less than 8 GiB is free
    ],
)
def test_what_stays_on_a_gpu(data_bytes: int, free_bytes: int, stays: bool) -> None:
    assert feeder.stays_on_gpu(data_bytes, free_bytes) is stays


@pytest.mark.parametrize(
    ("free_bytes", "trains", "kind"),
    [(4 * 240 + 4 * 320, True, "resident"), (4 * 560 - 1, True, "prefetching"), (1 << 30, False, "plain")],
)
def test_the_feeder_of_a_gpu(monkeypatch: pytest.MonkeyPatch, free_bytes: int, trains: bool, kind: str) -> None:
    """40 samples take 240 bytes of inputs and 320 of targets."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 80 << 30))
    monkeypatch.setattr(feeder, "CopyStream", lambda device: LateCopies())
    monkeypatch.setattr(feeder, "ResidentFeeder", lambda samples, device: "resident")
    fed = make_feeder(samples(), torch.device("cuda", 0), trains)
    assert fed == "resident" if kind == "resident" else type(fed) is {"plain": Feeder}.get(kind, PrefetchingFeeder)


def test_shares_of_its_own_are_not_known_before() -> None:
    """A strategy with `shares` of its own must say whether they may be asked for early; all that have some say no."""
    for name, strategy in STRATEGIES.items():
        assert strategy.knows_next_share == (strategy.shares is Strategy.shares), name
    assert not any(strategy.knows_next_share for strategy in ASYNCHRONOUS.values())


# Training.


class Counting(PrefetchingFeeder):
    """Counts the steps that it feeds from what it had begun before."""

    hits = 0

    def feed(self, indices: Tensor, parts: int = 1) -> Iterator[tuple[Tree, int]]:
        self.hits += self._ahead is not None and self._ahead.indices is indices
        yield from super().feed(indices, parts)


def prefetching(communicator: Any, job: Any) -> dict[str, Any]:
    """The worker function, with a feeder that prefetches, whatever the size of the data."""
    trainer = loop.Trainer(communicator, job)
    device, (samples, _) = communicator.device, job.samples(communicator.shared)
    trainer.feeder = fed = Counting(samples, device, CopyStream(device) if device.type == "cuda" else PromptCopies())
    first_step, epochs = trainer.steps_done, len(trainer.epoch_sizes) - len(trainer.history)
    result = trainer.run()
    foretold = trainer.steps_done - first_step - epochs if trainer.strategy.knows_next_share else 0
    assert fed.hits == foretold, f"{fed.hits} steps of {foretold} were fetched ahead"
    return result


def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (60, 1, 4, 4), generator=generator, dtype=torch.uint8)
    targets = torch.randint(0, 5, (60,), generator=generator)
    return Dataset("made", images[:50], targets[:50], images[50:], targets[50:], 5, (0.5,), (0.3,), "the test")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 5))


def run(
    folder: Path, strategy: str, n: int, worker_function: Callable[..., Any], device: str = "cpu", **more: Any
) -> TrainingRun:
    """Batches of 16: three workers get 6, 5 and 5 samples, and then one each; the last step of two of them is empty."""
    options: dict[str, Any] = {"batch_size": 16, "epochs": 2, "lr": 0.1, "deadline_s": 30, **more}
    configuration = RunConfig(strategy=strategy, n_gpus=n, device=device, results_dir=str(folder), **options)
    return train(
        configuration, make_model=make_model, dataset=dataset(), verbose=False, worker_function=worker_function
    )


def assert_same_bits(trained: TrainingRun, reference: TrainingRun) -> None:
    assert [each["train_loss"] for each in trained.history] == [each["train_loss"] for each in reference.history]
    for name, value in reference.weights.items():
        assert torch.equal(trained.weights[name], value), name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "n", "options"),
    [
        ("ring_all_reduce", 3, {"accumulate": 2}),
        ("param_server", 4, {}),
        ("ddp", 3, {}),
        ("param_server_async", 2, {}),
        ("param_server_bounded", 3, {"staleness": 0}),
        ("param_server_backup", 3, {"backup_workers": 0, "accumulate": 3}),
    ],
)
def test_training_on_prefetched_batches(tmp_path: Path, strategy: str, n: int, options: dict[str, Any]) -> None:
    """With servers and empty shares, and with shares that nobody knows before."""
    reference = run(tmp_path, strategy, n, loop.train_worker, **options)
    assert_same_bits(run(tmp_path, strategy, n, prefetching, **options), reference)


def test_going_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Of four steps an epoch, the checkpoint that is resumed lies behind the second of the second epoch."""
    whole = run(tmp_path, "ring_all_reduce", 2, loop.train_worker, checkpoint_every=3)
    saved = checkpoint.complete_checkpoints(Path(whole.folder) / "checkpoints")
    (sixth,) = [path for path in saved if path.stem.endswith("6")]
    assert_same_bits(run(tmp_path, "ring_all_reduce", 2, prefetching, resume=str(sixth)), whole)


# On GPUs.

GPUS = torch.cuda.device_count()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="there is no GPU")]
on_gpus = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="two processes on GPUs need 2 of them")]


def marked(marks: list[pytest.MarkDecorator]) -> Callable[[Any], Any]:
    def mark(test: Any) -> Any:
        for each in marks:
            test = each(test)
        return test

    return mark


@marked(on_gpu)
@every_kind
@every_dtype
@every_plan
def test_what_indexing_gives_on_a_gpu(kind: str, dtype: torch.dtype, parts: int, ahead: bool) -> None:
    check_against_indexing(kind, dtype, parts, ahead, torch.device("cuda", 0))


@marked(on_gpu)
def test_the_feeder_of_a_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    inputs, targets = samples()
    little = make_feeder((inputs, targets), device)
    assert type(little) is ResidentFeeder and all(leaf.device == device for leaf in little.leaves)
    assert type(make_feeder((inputs, targets), device, trains=False)) is Feeder
    monkeypatch.setattr(feeder, "RESIDENT_BYTES", inputs.nbytes + targets.nbytes - 1)
    assert type(make_feeder((inputs, targets), device)) is PrefetchingFeeder
    assert CopyStream(device).buffer(5, inputs).is_pinned()


class SlowCopies(CopyStream):
    """Every copy begins 20 ms late or so, so that the host is far ahead of it."""

    def begin(self, tensors: list[Tensor]) -> Any:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(30_000_000)  # cycles
        return super().begin(tensors)


@marked(on_gpu)
@pytest.mark.parametrize("copies", [CopyStream, SlowCopies])
@pytest.mark.parametrize("compute_cycles", [0, 60_000_000])
def test_streams_that_are_held_up(copies: type[CopyStream], compute_cycles: int) -> None:
    """The batch of a step is read long after the host has gone on, and its memory is given back before it is read."""
    device = torch.device("cuda", 0)
    inputs = torch.randint(0, 256, (64, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(64)
    fed = PrefetchingFeeder((inputs, targets), device, copies(device))
    plan = list(torch.randperm(64, generator=torch.Generator().manual_seed(2)).split(8))
    seen = []
    for indices, following in zip(plan, [*plan[1:], None], strict=True):
        for (some_inputs, some_targets), _ in fed.feed(indices, parts=2):
            if compute_cycles:
                torch.cuda._sleep(compute_cycles)
            seen.append((some_inputs.clone(), some_targets.clone()))
        del some_inputs, some_targets
        if following is not None:
            fed.prefetch(following)
    torch.cuda.synchronize(device)
    parts = [part for indices in plan for part in indices.tensor_split(2)]
    for (some_inputs, some_targets), part in zip(seen, parts, strict=True):
        assert torch.equal(some_inputs.cpu(), inputs[part]) and torch.equal(some_targets.cpu(), targets[part])


@marked(on_gpu)
@pytest.mark.parametrize("kind", ["resident", "prefetching"])
def test_the_host_does_not_wait_for_the_gpu(kind: str) -> None:
    """Feeding goes on while the stream that computes is held up: the event behind a long kernel has not come."""
    device = torch.device("cuda", 0)
    fed = made(kind, *samples(), device)
    plan = [indices.to(fed.index_device) for indices in steps([8, 8, 8, 8])]
    for cycles in (100_000_000, 4_000_000_000):  # 2 s or so; the first use of kernels and memory may wait
        torch.cuda._sleep(cycles)
        held_up = torch.cuda.current_stream(device).record_event()
        batches = []
        for indices, following in zip(plan, [*plan[1:], None], strict=True):
            batches += [batch for batch, _ in fed.feed(indices)]
            if following is not None:
                fed.prefetch(following)
        held_up_to_the_end = not held_up.query()
        torch.cuda.synchronize(device)
    assert held_up_to_the_end
    for (some_inputs, _), indices in zip(batches, plan, strict=True):
        assert torch.equal(some_inputs.cpu(), samples()[0][indices.cpu()])


@marked(on_gpu)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_on_prefetched_batches_on_a_gpu(tmp_path: Path, accumulate: int) -> None:
    reference = run(tmp_path, "ring_all_reduce", 1, loop.train_worker, "cuda", accumulate=accumulate)
    assert_same_bits(run(tmp_path, "ring_all_reduce", 1, prefetching, "cuda", accumulate=accumulate), reference)


@marked(on_gpus)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_every_strategy_on_prefetched_batches_on_gpus(tmp_path: Path, strategy: str) -> None:
    """The asynchronous ones too, since two processes are a server and a single worker."""
    reference = run(tmp_path, strategy, 2, loop.train_worker, "cuda", dtype="float64")
    trained = run(tmp_path, strategy, 2, prefetching, "cuda", dtype="float64")
    for name, value in reference.weights.items():
        difference = torch.linalg.vector_norm(trained.weights[name] - value)
        assert difference <= 1e-12 * torch.linalg.vector_norm(value), name
