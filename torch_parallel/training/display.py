"""What a run shows: one bar and one line an epoch, whatever the number of processes; the same figures into runs.csv."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from torch_parallel.cards import card_names, utilisation
from torch_parallel.collectives.schedule import Nodes
from torch_parallel.devices import threads_per_worker, usable_cpus
from torch_parallel.files import our_own, say
from torch_parallel.nics import Traffic, counted
from torch_parallel.results import RunFolder, joined
from torch_parallel.status import StatusBoard
from torch_parallel.steps import StepsFile
from torch_parallel.strategies import FROM_SCRATCH, STRATEGIES
from torch_parallel.topology import Topology
from torch_parallel.training import emulation
from torch_parallel.training.config import RunConfig
from torch_parallel.training.evaluate import OF_CLASSES, metric_columns, tested_words
from torch_parallel.training.record import Epoch, Saved, Served, Started, Steps
from torch_parallel.training.sampler import step_count
from torch_parallel.units import bytes_text
from torch_parallel.workloads.workload import Workload


class Display:
    """The launcher's ear for what workers report, and its eye on the status board."""

    def __init__(
        self,
        config: RunConfig,
        workload: Workload,
        folder: RunFolder,
        device: str,
        verbose: bool,
        nodes: Nodes = (),
        nics: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.samples = samples = workload.samples
        self.tokens = workload.tokens_of_a_sample
        self.folder = folder
        self.model_name = workload.model_name
        self.device = device
        self.processes = config.process_count
        self.verbose = verbose
        self.servers = STRATEGIES[config.strategy].server_count
        self.started: Started | None = None
        self.launched_s = time.perf_counter()
        self.nodes = nodes if len(set(nodes)) > 1 else ()  # real ones
        self.nics = tuple(nics) if self.nodes else ()
        here = max(map(self.nodes.count, self.nodes), default=self.processes)
        self.threads = threads_per_worker(here)
        self.batch_size = config.batch_size_on(samples.name)
        self.steps = step_count(samples.train_size, self.batch_size)
        self.kind = "emulated" if emulation.flags(config) else "measured"
        same = {"run_id": folder.run_id, "kind": self.kind, "strategy": config.strategy}
        self.steps_file = StepsFile(config.steps_csv, **same) if config.steps_csv else None
        # disable=None: no bar where the output is not a terminal
        self.bar = tqdm(
            total=sum(step_count(size, self.batch_size) for size in config.epoch_sizes(samples.train_size)),
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
            self.started = message
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
            if message.epochs_done >= (self.config.epochs or 0):
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
            f"{_tested_line(epoch)}  {epoch.samples_per_s:,.0f} samples/s  {self._tokens_line(epoch)}"
            f"{_parts_line(parts)}{skipped}{_served_line(epoch.served)}"
        )
        if self.nics:
            self.say(self._traffic_line(epoch))

    def _traffic(self, epoch: Epoch) -> list[tuple[Traffic, Traffic]]:
        """By node, what its cards have carried: as the system has counted, and as the messages add up."""
        by_messages = counted(self.nodes, self.nics, [each.received_bytes for each in epoch.ranks])
        read = []
        for node in range(len(by_messages)):
            numbers = iter(epoch.ranks[self.nodes.index(node)].nic_bytes)
            read.append({nic: [next(numbers), next(numbers)] for nic in self.nics})
        return list(zip(read, by_messages, strict=True))

    def _traffic_line(self, epoch: Epoch) -> str:
        """Of the card that has carried most in one direction."""
        most, nic, node, of_messages = max(
            (max(numbers), nic, node, max(messages[nic]))
            for node, (read, messages) in enumerate(self._traffic(epoch))
            for nic, numbers in read.items()
        )
        return (
            f"busiest card: {nic} of node {node}, {bytes_text(most)} in one direction, of them "
            f"{bytes_text(of_messages)} gradients and parameters"
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
            **self._set_up(links),
            **self._rates(epoch),
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
            del parts["nic_bytes"]
            for part in ("exchange_s", "wait_s", "update_s", "exchanged_part", "waited_part"):
                if math.isnan(parts[part]):
                    parts[part] = None
            parts["peak_gpu_bytes"] = spent.peak_gpu_bytes or None
            rows.append({**common, "rank": rank, "role": "server" if rank < self.servers else "worker", **parts})
        if epoch.served is not None:
            rows[0] |= _served_columns(epoch.served)
        if self.nics:
            for node, (read, messages) in enumerate(self._traffic(epoch)):
                traffic = {"nic_bytes": json.dumps(read), "nic_message_bytes": json.dumps(messages)}
                rows[self.nodes.index(node)] |= traffic
        return rows

    def _set_up(self, links: Topology | None) -> dict[str, Any]:
        workers = (self.config.n_gpus or 1) - self.servers
        real = len(set(self.nodes))
        nodes = real or (links.node_count - self.servers if links else 1)
        each, rest = divmod(self.batch_size, workers)
        return {
            "nodes": real or (links.node_count if links else 1),
            "setup": f"{nodes}_{workers // nodes}",
            "per_gpu_batch": each if not rest else None,
        }

    def _rates(self, epoch: Epoch) -> dict[str, Any]:
        """What is done in a second beside samples of the training part."""
        tested_per_s = self.samples.test_size / epoch.test_s
        rates: dict[str, Any] = {"test_samples_per_s": tested_per_s}
        if self.tokens is not None:
            train, test = self.tokens
            rates |= {"tokens_per_s": train * epoch.samples_per_s, "test_tokens_per_s": test * tested_per_s}
        return rates | {"flop_utilisation": self._flop_utilisation(epoch)}

    def _flop_utilisation(self, epoch: Epoch) -> float | None:
        """Of the GPUs that the workers have; None where it is not known what they can do."""
        if self.started is None or self.started.flops_of_sample is None:
            return None
        cards = card_names()[: (self.config.n_gpus or 1) - self.servers]
        return utilisation(self.started.flops_of_sample * epoch.samples_per_s, 1.0, cards, self.started.arithmetic)

    def _tokens_line(self, epoch: Epoch) -> str:
        return "" if self.tokens is None else f"{self.tokens[0] * epoch.samples_per_s:,.0f} tokens/s  "

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
