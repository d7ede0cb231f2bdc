"""The one loop: forward, loss, backward, `strategy.step()`, for every strategy and every rank, server or worker."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_parallel.communicator import Communicator
from torch_parallel.status import COMPUTING, EVALUATING, SAVING
from torch_parallel.strategies import STRATEGIES, NotFinite, Strategy
from torch_parallel.strategies.replicas import ReplicasDiffer, check_replicas, share_state
from torch_parallel.strategies.shares import Share, shard
from torch_parallel.strategies.tally import Tally
from torch_parallel.training import checkpoint, emulation, model_state
from torch_parallel.training.aggregate import divisor
from torch_parallel.training.clock import EpochClock, peaks
from torch_parallel.training.compiling import compile_layers
from torch_parallel.training.evaluate import Evaluation, evaluate
from torch_parallel.training.feeder import make_feeder
from torch_parallel.training.job import TARGET_COUNTS, Job
from torch_parallel.training.operations import operations_of
from torch_parallel.training.optimizers import make_optimizer
from torch_parallel.training.record import Epoch, RankEpoch, Saved, Served, Started, Steps
from torch_parallel.training.recorder import StepRecorder, compute_ends
from torch_parallel.training.replica import build_replica, seed_generators
from torch_parallel.training.sampler import batches, epoch_order, looking_ahead, step_count
from torch_parallel.training.schedule import factor
from torch_parallel.training.soundness import Soundness, look_at_losses, look_at_skipped
from torch_parallel.training.targets import TargetCounts
from torch_parallel.training.tracing import Tracer
from torch_parallel.workloads.task import loss_sum_of
from torch_parallel.workloads.tree import Tree, count, first_nan, rows
from torch_parallel.workloads.whole_model import ForwardState, extra_state


def train_worker(communicator: Communicator, job: Job) -> dict[str, Any]:
    """The worker function of `train`: trains one rank. All return events, the first worker history and weights."""
    return Trainer(communicator, job).run()


class Trainer:
    """One rank of a run."""

    def __init__(self, communicator: Communicator, job: Job) -> None:
        self.communicator = communicator
        self.job = job
        self.config = config = job.config
        self.batch_size = config.batch_size_on(job.data_name)
        self.learning_rate = config.learning_rate_on(job.data_name)
        self.task = job.task
        train_samples, self.test_samples = job.samples(communicator.shared)
        self.train_size = count(train_samples)
        self.targets = TargetCounts(communicator.shared.get(TARGET_COUNTS))
        self.dtype = getattr(torch, config.dtype)
        self.epoch_sizes = config.epoch_sizes(self.train_size)
        update_count = STRATEGIES[config.strategy].update_count
        self.total_steps = sum(
            update_count(size, self.batch_size, communicator.worker_count) for size in self.epoch_sizes
        )
        self.steps_done = 0  # of the run; between two epochs, the updates that were made
        self.saved_step = 0
        self.samples_done = 0  # of the present epoch, by all workers
        self.targets_seen = 0  # of the present epoch, by this rank; what a resumed epoch had seen, by the first worker
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=communicator.device)  # of the present epoch
        self._fed: deque[Tensor] = deque(maxlen=2)  # the indices of the samples of this step and of the one before
        self.compiled_for: set[int] = set()  # batches of these sizes
        self.history: list[Epoch] = []
        self.tracer: Tracer | None = None
        seed_generators(config.seed)
        self.model = build_replica(job.make_model, communicator.device, self.dtype)
        if config.checkpoint_every:
            model_state.check_plain(extra_state(self.model))
            model_state.check_resumable(self.model)
        saved = self._saved(job.resume_from) if job.resume_from else None
        if saved is not None:
            model_state.load_model(self.model, saved)
        if config.compile:
            compile_layers(self.model)
        self.strategy = self._make_strategy()
        self.strategy.count_targets = self.targets.at
        # Dropout and augmentation draw differently on every rank, and the same again in the next run.
        seed_generators(config.seed * 1_000_003 + 7919 * (communicator.rank + 1))
        if saved is not None:
            self._restore(saved)
        self.soundness = Soundness(self.model)
        if config.trace:
            self.tracer = Tracer(communicator, self.strategy)
        self.recorder = StepRecorder(communicator, self.strategy) if config.steps_csv else None
        self.slowdown = emulation.slowdown(config, communicator.rank)
        # last: how much memory the GPU has left is known when model and buffers are there
        self.feeder = make_feeder(train_samples, communicator.device, not communicator.is_server)

    def run(self) -> dict[str, Any]:
        if self.communicator.worker_index == 0:
            operations = operations_of(self.job, self.communicator, self.model)
            buckets = self.strategy.describe_buckets()
            self.communicator.report(Started(len(self.history), buckets, self.model.training, *operations))
        first_epoch = len(self.history) + 1
        for epoch in range(first_epoch, len(self.epoch_sizes) + 1):
            spent, train_s, rate = self.train_epoch(epoch, warms_up=epoch == first_epoch)
            self._finish_epoch(epoch, spent, train_s, rate)
            if not self.config.in_step and self._checkpoint_is_due():
                self._save()
        if self.config.checkpoint_every and self.steps_done > self.saved_step:
            self._save()
        self.strategy.close()
        events = self.tracer.events if self.tracer else []
        if self.communicator.worker_index != 0:
            return {"events": events}
        weights = model_state.on_cpu(self.model.state_dict())
        return {"events": events, "history": [asdict(epoch) for epoch in self.history], "weights": weights}

    def _make_strategy(self) -> Strategy:
        config = self.config
        strategy = STRATEGIES[config.strategy]
        return strategy(
            self.model,
            partial(
                make_optimizer,
                name=config.optimizer,
                lr=self.learning_rate,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            ),
            self.communicator,
            bucket_bytes=int(config.bucket_mb_on(self.communicator.device.type) * 2**20),
            clip_norm=config.clip_norm,
            skip_not_finite=config.not_finite == "skip",
            **config.strategy_options_on(self.communicator.device.type),
        )

    def train_epoch(self, epoch: int, warms_up: bool = False) -> tuple[RankEpoch, float, float]:
        """What this rank spent, the seconds of the training part, and the samples a second of all workers."""
        self.clock = EpochClock(self.strategy)
        first_sample, warm_up, first = self.samples_done, (0.0, self.samples_done), None
        step = 0
        for step, (indices, share, upcoming) in enumerate(self._batches(epoch), start=1):
            with self._where(step, epoch):
                self._step(indices, share, upcoming, step, epoch)
                if warms_up and step == 1:
                    self.strategy.confirm()
                    warm_up = (self.clock.seconds, self.samples_done)
                    first = self.clock.spent(warm_up[0])
        with self._where(step, epoch):
            self.strategy.confirm()
        train_s = self.clock.seconds
        self.samples_done = self.epoch_sizes[epoch - 1]  # what this rank did not do, others did
        if warm_up[1] == self.samples_done:  # there was one step only, or none
            warm_up, first = (0.0, first_sample), None
        rate = (self.samples_done - warm_up[1]) / max(train_s - warm_up[0], 1e-9)
        self.communicator.status.step(epoch, step_count(self.samples_done, self.batch_size), self.samples_done)
        self.samples_done = 0
        spent = self.clock.spent(train_s)
        spent.set_parts(train_s, first, warm_up[0])
        spent.peak_process_bytes, spent.peak_gpu_bytes = peaks(self.communicator.device)
        return spent, train_s, rate

    def _step(self, indices: Tensor, share: Share, upcoming: Tensor | None, step: int, epoch: int) -> None:
        """One optimizer step, and what is due after it; `upcoming` are the next one's indices, where they are known."""
        config, status = self.config, self.communicator.status
        status.step(epoch, step, self.samples_done)
        status.phase(COMPUTING)
        self.strategy.set_learning_rate(
            self.learning_rate * factor(config.lr_schedule, self.steps_done + 1, self.total_steps, config.warmup_steps)
        )
        if self.recorder:
            self.recorder.begin()
        self.strategy.begin_step()
        self._fed.append(indices)
        own_targets, *others = self.targets.of_step(share, self.communicator.worker_count)
        divided_by = divisor(config.aggregate, own_targets, *others)
        before = (self.loss_sum.clone(), self.targets_seen) if config.not_finite == "skip" else None
        compiling = self._compiling(len(indices))
        with self._span("compute", f"step {step} of epoch {epoch}"), compiling:
            start_s = time.perf_counter()
            parts = max(1, min(config.accumulate, len(indices)))  # none is empty, unless all is
            for number, (batch, size) in enumerate(self.feeder.feed(indices, parts), start=1):
                # a rank without samples exchanges all the same
                if size:
                    with self.strategy.synchronising(last=number == parts):
                        if share.is_empty:
                            self._take_part(batch)
                        else:
                            self._forward_and_backward(batch, divided_by)
            self.targets_seen += own_targets
            if upcoming is not None:
                self.feeder.prefetch(upcoming)
            compute_ends(start_s, self.steps_done, self.communicator.device, self.slowdown, self.recorder)
        self.strategy.step()
        if before is not None and self.strategy.step_was_skipped:
            self.loss_sum, self.targets_seen = before
        if config.in_step and share.count < self.communicator.worker_count:
            self._share_with_the_idle(has_samples=not share.is_empty)
        if self.recorder:
            self.recorder.end(epoch, step)
        self.steps_done += 1
        self.samples_done = share.done
        checks_replicas = config.check_replicas > 0 and self.steps_done % config.check_replicas == 0
        saves = config.in_step and self._checkpoint_is_due()
        if config.schedule != "none" and (checks_replicas or saves):
            self.strategy.confirm()  # what is still being exchanged is on the clock
        if checks_replicas:
            with self.clock.off_the_clock():
                check_replicas(self.model, self.communicator)
        if saves:
            with self.clock.off_the_clock():
                self._save()

    def _share_with_the_idle(self, has_samples: bool) -> None:
        """What forward writes into buffers, ranks without a sample have from the first worker, which has one."""
        share_state(self.model, self.communicator, root=self.communicator.first_worker, adopt=not has_samples)

    @contextmanager
    def _where(self, step: int, epoch: int) -> Iterator[None]:
        """What is wrong with a step is said with its number, and by whom."""
        try:
            yield
        except (NotFinite, ReplicasDiffer) as error:
            late = getattr(error, "late", False)
            text = f"{error} in step {step - late} of epoch {epoch} on rank {self.communicator.rank}"
            if isinstance(error, NotFinite) and "gradient" in text:
                text += f"; {self._why_not_finite(late)}"
            raise type(error)(text) from None

    def _why_not_finite(self, late: bool) -> str:
        """What is to blame for a gradient of this step, or `late` of the one before: a sample; else, what may help."""
        fed = self._fed[-1 - late] if len(self._fed) > late else None
        found = first_nan(self.feeder.samples, fed) if fed is not None else None
        if found is not None:
            sample, field = found
            where = f"sample {sample} of the {self.train_size} that are trained on" + (f", in {field}" if field else "")
            return f"{where}, is NaN: mend the data or leave it out, or take --not_finite skip"
        return "a smaller --lr may help, or --clip_norm, or --not_finite skip"

    def _checkpoint_is_due(self) -> bool:
        """Whether a multiple of `checkpoint_every` steps has been reached since the last one."""
        every = self.config.checkpoint_every
        return every > 0 and self.steps_done // every > self.saved_step // every

    def _take_part(self, lent: Tree) -> None:
        """Forward and backward of a rank without samples: with another one's, and gradients of zeros.

        The strategy needs every rank's backward, and many models take no empty batch. Nothing is drawn.
        """
        device = self.communicator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            (self._loss_sum(lent) * 0).backward()

    def _loss_sum(self, stored: Tree) -> Tensor:
        with self._precision():
            batch = self.task.prepare(stored, self.dtype)
            return loss_sum_of(self.task, self.task.forward(self.strategy.forward, batch), batch)

    def _forward_and_backward(self, stored: Tree, divided_by: int) -> None:
        loss_sum = self._loss_sum(stored)
        (loss_sum / (divided_by / self.strategy.loss_factor)).backward()
        self.loss_sum += loss_sum.detach()

    def _finish_epoch(self, epoch: int, spent: RankEpoch, train_s: float, rate: float) -> None:
        """Evaluates, adds up what all ranks have seen and spent, and tells the launcher.

        Raises NotFinite where the model, its optimizer's state or a loss is not finite, or most steps were skipped.
        """
        steps = step_count(self.epoch_sizes[epoch - 1], self.batch_size)
        with self._where(steps, epoch):
            self.soundness.look(self.strategy)
        if self.recorder:
            self.communicator.report(Steps(self.recorder.take()))
        start_s = time.perf_counter()
        with self._span("evaluate", f"epoch {epoch}"):
            tested = self._evaluate()
        test_s = time.perf_counter() - start_s
        skipped = self.strategy.skipped_steps
        own = [self.loss_sum.item(), self.targets_seen, skipped, self.steps_done]
        table = self.communicator.all_ranks(torch.tensor([*own, *spent.numbers()], dtype=torch.float64, device="cpu"))
        self.steps_done = int(table[:, len(own) - 1].max())  # a server that waits for nobody has made the most
        skipped = int(table[:, 2].max())
        look_at_skipped(skipped, self.steps_done, targets=int(table[:, 1].sum()))
        metrics = tested.metrics(self.task)
        record = Epoch(
            epoch=epoch,
            steps=steps,
            train_loss=table[:, 0].sum().item() / table[:, 1].sum().item(),
            test_loss=tested.loss,
            test_accuracy=metrics.pop("accuracy", math.nan),
            metrics=metrics,
            train_s=train_s,
            samples_per_s=rate,
            test_s=test_s,
            skipped_steps=skipped,
            ranks=[RankEpoch.from_numbers(row[len(own) :].tolist()) for row in table],
            served=Served.of(self.strategy.tally, self.communicator),
        )
        with self._where(steps, epoch):
            look_at_losses(record)
        self.history.append(record)
        self.loss_sum.zero_()
        self.targets_seen = 0
        if self.communicator.worker_index == 0:
            self.communicator.report(record)

    def _evaluate(self) -> Evaluation:
        """What all ranks count of the test samples, of which each has a share. It leaves the model as it was.

        BatchNorm's statistics are each worker's own while it trains; all evaluate with those of the first worker.
        """
        self.communicator.status.phase(EVALUATING)
        self.strategy.watch.look_at_tree()
        self.strategy.watch.remember("evaluation")
        share_state(self.model, self.communicator, root=self.communicator.first_worker)
        before = ForwardState(self.model)
        part = shard(count(self.test_samples), self.communicator.worker_index, self.communicator.worker_count)
        own = rows(self.test_samples, part)
        beat, device = self.communicator.status.beat, self.communicator.device  # it may be long
        with self._precision(), self.communicator.long_work("testing"):
            tested = evaluate(self.model, self.task, own, self.dtype, device, on_batch=beat)
        self.strategy.watch.look()
        before.restore()
        gathered = self.communicator.gather(tested)
        total: Evaluation = self.communicator.broadcast_object(sum(gathered, Evaluation()) if gathered else None)
        return total

    def _save(self) -> None:
        """Rank 0, which has parameters and optimizer under every strategy, writes everybody's state to disk.

        Raises NotFinite where that is not finite: then nothing is written.
        """
        self.strategy.confirm()
        self.soundness.look(self.strategy)
        self.communicator.status.phase(SAVING)
        optimizer = self.strategy.optimizer_state()
        own = model_state.rank_state(self.model, self.loss_sum.item())
        others = model_state.beside_parameters(self.model) if self.communicator.worker_index == 0 else None
        gathered = self.communicator.gather((own, others))
        if gathered is not None:
            ranks = [state for state, _ in gathered]
            _, others = gathered[self.communicator.first_worker]
            content = {
                "format": checkpoint.FORMAT,
                "step": self.steps_done,
                "samples_done": self.samples_done,
                "history": [asdict(epoch) for epoch in self.history],
                "skipped_steps": self.strategy.skipped_steps,
                "tally": asdict(self.strategy.tally) if self.strategy.tally else None,
                "model": model_state.put_together(self.model, others),
                "optimizer": optimizer,
                "server_count": self.communicator.server_count,
                "dataset": self.job.data_name,
                "ranks": ranks,
                "config": asdict(self.config),
            }
            with self.communicator.long_work("writing it"):
                path = checkpoint.save(content, Path(self.job.checkpoint_folder), self.steps_done)
            self.communicator.report(Saved(self.steps_done, str(path)))
        self.communicator.barrier()  # here ranks wait as long as it takes, elsewhere not under every strategy
        self.saved_step = self.steps_done

    def _saved(self, path: str) -> dict[str, Any]:
        """The checkpoint from which the run goes on. Other machines may not see the files of rank 0's."""
        communicator = self.communicator
        if communicator.store is None or not communicator.nodes:
            return checkpoint.load(Path(path))
        own = checkpoint.load(Path(path)) if communicator.rank == 0 else None
        saved: dict[str, Any] = communicator.broadcast_object(own, name="the checkpoint")
        return saved

    def _restore(self, saved: dict[str, Any]) -> None:
        communicator = self.communicator
        saved, cut_short = checkpoint.with_epoch_reopened(saved, self.epoch_sizes)
        self.steps_done, self.samples_done = saved["step"], saved["samples_done"]
        self.saved_step = self.steps_done
        if communicator.worker_index == 0 and self.samples_done:
            self.targets.begin_epoch(self._order(len(saved["history"]) + 1))
            self.targets_seen = self.targets.at(slice(0, self.samples_done))
        self.strategy.skipped_steps = saved["skipped_steps"]
        if self.strategy.tally and saved.get("tally"):
            self.strategy.tally = Tally(**saved["tally"])
        self.history = [Epoch.from_dict(epoch) for epoch in saved["history"]]
        self.strategy.load_optimizer_state(saved["optimizer"])
        same_ranks = len(saved["ranks"]) == communicator.world_size
        if same_ranks and saved["server_count"] == communicator.server_count:
            own = saved["ranks"][communicator.rank]
            model_state.restore_rank(self.model, own)
            self.loss_sum.fill_(own["loss_sum"])
        elif communicator.worker_index == 0:
            self.loss_sum.fill_(sum(rank["loss_sum"] for rank in saved["ranks"]))
        if cut_short is not None:
            self.loss_sum.fill_(cut_short["train_loss"] * self.targets_seen)

    def _precision(self) -> AbstractContextManager[None]:
        bf16 = self.config.precision == "bf16"
        return torch.autocast(self.communicator.device.type, torch.bfloat16) if bf16 else nullcontext()

    def _compiling(self, batch: int) -> AbstractContextManager[None]:
        """Around a step that may compile the model, for it is the first with a batch of this size; so on all ranks."""
        if not self.config.compile or batch in self.compiled_for:
            return nullcontext()
        self.compiled_for.add(batch)
        return self.strategy.compiling()

    def _span(self, lane: str, name: str) -> AbstractContextManager[None]:
        return self.tracer.span(lane, name) if self.tracer else nullcontext()

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Share, Tensor | None]]:
        """For each step the indices and the share, and the next step's indices if they are known before."""
        size = self.epoch_sizes[epoch - 1]
        shares = self.strategy.shares(size, self.batch_size, first_sample=self.samples_done)
        order = self._order(epoch)
        self.targets.begin_epoch(order)
        lend = self.strategy.every_rank_computes
        drawn = batches(order.to(self.feeder.index_device), shares, lend)
        return looking_ahead(drawn) if self.strategy.knows_next_share else ((*each, None) for each in drawn)

    def _order(self, epoch: int) -> Tensor:
        return epoch_order(self.train_size, self.config.seed, epoch)
