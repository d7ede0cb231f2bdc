"""What a run shows: one bar and one line an epoch, whatever the number of processes; the same figures into runs.csv."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from torch_parallel.devices import threads_per_worker, usable_cpus
from torch_parallel.files import our_own, say
from torch_parallel.results import RunFolder, joined
from torch_parallel.status import StatusBoard
from torch_parallel.steps import StepsFile
from torch_parallel.strategies import FROM_SCRATCH, STRATEGIES
from torch_parallel.training import emulation
from torch_parallel.training.config import RunConfig
from torch_parallel.training.evaluate import OF_CLASSES, metric_columns, tested_words
from torch_parallel.training.record import Epoch, Saved, Served, Started, Steps
from torch_parallel.training.sampler import step_count
from torch_parallel.units import bytes_text
from torch_parallel.workloads.samples import Samples


class Display:
    """The launcher's ear for what workers report, and its eye on the status board."""

    def __init__(
        self,
        config: RunConfig,
        samples: Samples,
        folder: RunFolder,
        model_name: str,
        device: str,
        verbose: bool,
    ) -> None:
        self.config = config
        self.samples = samples
        self.folder = folder
        self.model_name = model_name
        self.device = device
        self.processes = config.process_count
        self.verbose = verbose
        self.servers = STRATEGIES[config.strategy].server_count
        self.launched_s = time.perf_counter()
        self.threads = threads_per_worker(self.processes)
        self.batch_size = config.batch_size_on(samples.name)
        self.steps = step_count(samples.train_size, self.batch_size)
        self.kind = "emulated" if emulation.flags(config) else "measured"
        same = {"run_id": folder.run_id, "kind": self.kind, "strategy": config.strategy}
        self.steps_file = StepsFile(config.steps_csv, **same) if config.steps_csv else None
        # disable=None: no bar where the output is not a terminal
        self.bar = tqdm(
            total=self.steps * config.epochs_on(samples.name),
            unit="step",
            disable=None if verbose and sys.stderr is not None else True,  # a daemon may have none
            leave=False,
        )

    def say(self, line: str) -> None:
        if self.verbose:
            with our_own(), tqdm.external_write_mode():
                say(line)

    def introduce(self, lines: list[str | None]) -> None:
        config = self.config
        workers = self.processes - self.servers
        batch = min(self.batch_size, config.train_size or self.batch_size)
        emulated = [f"--{name} {value}" for name, value in emulation.flags(config).items()]
        for line in [f"emulated, not measured: {' '.join(emulated)}" if emulated else None, *lines]:
            if line:
                self.say(line)
        server = " and 1 server" if self.servers else ""
        self.say(
            f"{config.strategy}: {workers} worker{'s' if workers > 1 else ''}{server} on {self.device}, "
            f"{self.threads} thread{'s' if self.threads > 1 else ''} each; {self.model_name}, batch of "
            f"{self.batch_size} over all workers (at most {-(-batch // workers)} each), "
            f"{self.steps} step{'s' if self.steps > 1 else ''} an epoch"
        )
        if batch < workers:
            self.say(f"only {batch} of the {workers} workers get{'s' if batch == 1 else ''} a sample in a step")
        if self.device == "cpu" and workers > usable_cpus():
            self.say(f"{workers} workers share {usable_cpus()} processors: expect no speed-up over fewer workers")

        watching = [f"--{name}" for name in ("steps_csv", "trace") if getattr(config, name)]
        if self.device == "cuda" and watching and self.processes > 1 and config.strategy in FROM_SCRATCH:
            self.say(
                f"{' and '.join(watching)}: GPUs exchange by torch's operations, and processes wait for each message, "
                "so that it can be timed; without, a step is faster"
            )

    def tick(self, board: StatusBoard) -> None:
        # a server knows of all workers' samples, and of synchronous ones each does
        status = max((board.read(rank) for rank in (0, self.servers)), key=lambda each: (each.epoch, each.samples))
        done = (max(status.epoch, 1) - 1) * self.steps + min(status.samples // self.batch_size, self.steps)
        self.bar.update(max(0, done - self.bar.n))

    def message(self, rank: int, message: Epoch | Saved | Started | Steps) -> None:
        """What a worker reports: that it starts, an epoch done, or a checkpoint on disk."""
        if isinstance(message, Started):
            seconds = time.perf_counter() - self.launched_s
            self.folder.write_manifest(start_up_s=round(seconds, 3), buckets=message.buckets)
            self.say(f"started in {seconds:.1f} s")
            if not message.in_training_mode:
                self.say(
                    "the model came in eval mode and trains in it, without dropout and with fixed statistics: call its "
                    "train() in make_model if that is not meant"
                )
            if self.config.own_options.get("algorithm") == "auto":
                each = [f"{bytes_text(bucket['bytes'])} by {bucket['algorithm']}" for bucket in message.buckets]
                self.say(f"gradients are summed in buckets: {', '.join(each)}")
            if message.epochs_done >= self.config.epochs_on(self.samples.name):
                self.say(f"nothing is left to do: {message.epochs_done} epochs are done; ask for more with --epochs")
        elif isinstance(message, Steps):
            if self.steps_file is not None:
                self.steps_file.append(message.steps)
        elif isinstance(message, Saved):
            self.say(f"checkpoint of step {message.step}: {message.path}")
        else:
            self._epoch_done(message)

    def _epoch_done(self, epoch: Epoch) -> None:
        workers = epoch.ranks[self.servers :]

        def mean(part: str) -> float:
            return float(sum(getattr(each, part) for each in workers) / len(workers))

        self.folder.append_rows(self._rows(epoch))  # first: what was shown is on disk
        skipped = f"  {epoch.skipped_steps} steps skipped so far" if epoch.skipped_steps else ""
        updating = epoch.ranks[0]  # with a server, the only rank that updates
        parts = {part: mean(f"{part}_s") for part in ("compute", "exchange", "wait")} | {"update": updating.update_s}
        self.say(
            f"epoch {epoch.epoch}/{self.config.epochs}  train loss {epoch.train_loss:.4f}  "
            f"{_tested_line(epoch)}  {epoch.samples_per_s:,.0f} samples/s  "
            f"{_parts_line(parts)}{skipped}{_served_line(epoch.served)}"
        )

    def _options(self) -> dict[str, Any]:
        config = self.config
        aggregate = {} if config.aggregate == "weighted" else {"aggregate": config.aggregate}
        own = {name: value for name, value in config.own_options.items() if value is not None}
        return {
            "bucket_mb": config.bucket_mb_on(self.device),
            **aggregate,
            **own,
            **emulation.flags(config),
        }

    def _rows(self, epoch: Epoch) -> list[dict[str, Any]]:
        config, links = self.config, emulation.topology(self.config)
        common = {
            **config.columns(self.samples.name, self.model_name),
            "kind": self.kind,
            "strategy": config.strategy,
            "options": json.dumps(self._options()),
            "workers": self.processes - self.servers,
            "nodes": links.node_count if links else 1,
            "device": self.device,
            "threads": self.threads,
            **{key: value for key, value in asdict(epoch).items() if key not in ("ranks", "served", "metrics")},
            **metric_columns(epoch.metrics),
        }
        rows = []
        for rank, spent in enumerate(epoch.ranks):
            parts = asdict(spent)
            for by_peer in ("waited_for_s", "received_bytes"):
                parts[by_peer] = json.dumps(parts[by_peer])
            for part in ("exchange_s", "wait_s", "update_s"):
                if math.isnan(parts[part]):
                    parts[part] = None
            rows.append({**common, "rank": rank, "role": "server" if rank < self.servers else "worker", **parts})
        if epoch.served is not None:
            rows[0] |= _served_columns(epoch.served)
        return rows

    def close(self) -> None:
        self.bar.close()


def _tested_line(epoch: Epoch) -> str:
    """Accuracy where the task has one, and what else tells most of it."""
    told = [tested_words(epoch.test_accuracy, epoch.test_loss)]
    if "perplexity" in epoch.metrics and not math.isnan(epoch.test_accuracy):
        told.append(tested_words(math.nan, epoch.test_loss))
    told += [f"{name} {value:.4g}" for name, value in epoch.metrics.items() if name not in OF_CLASSES]
    return "  ".join(told)


def _parts_line(seconds: dict[str, float]) -> str:
    """A part that is NaN is named together with the one before it, in which it is."""
    groups: list[list[str]] = []
    for part, value in seconds.items():
        if math.isnan(value):
            groups[-1].append(part)
        else:
            groups.append([part])
    return "  ".join(f"{joined(group)} {seconds[group[0]]:.2f} s" for group in groups)


def _served_line(served: Served | None) -> str:
    if served is None:
        return ""
    lost = f"  {served.dropped} late, {served.samples_lost} samples lost" if served.dropped else ""
    staleness = (
        f"  staleness {served.staleness_mean:.2f}, at most {served.staleness_max}" if served.staleness_max else ""
    )
    return f"  {served.updates} updates{staleness}{lost}"


def _served_columns(served: Served) -> dict[str, Any]:
    return {
        **asdict(served),
        "staleness_counts": json.dumps(served.staleness_counts),
        "staleness_mean": served.staleness_mean,
        "staleness_max": served.staleness_max,
    }
