"""`train(config)`: from a description of a run to its history, its weights and its folder of results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from torch_parallel.devices import choose_processes, threads_per_worker, usable_cpus
from torch_parallel.launcher import launch
from torch_parallel.results import ResultsError, RunFolder, environment
from torch_parallel.status import StatusBoard
from torch_parallel.strategies import STRATEGIES
from torch_parallel.training.config import RunConfig
from torch_parallel.training.loop import Epoch, make_job, train_worker
from torch_parallel.training.sampler import step_count
from torch_parallel.workloads import Dataset, build_model, load_dataset


@dataclass(frozen=True)
class TrainingRun:
    """What `train` returns: one dict an epoch, the trained weights on the CPU, and the folder with the results."""

    history: list[dict[str, Any]]
    weights: dict[str, Tensor]
    folder: str

    @property
    def test_accuracy(self) -> float:
        """Of the last epoch."""
        return float(self.history[-1]["test_accuracy"])


def train(
    config: RunConfig,
    *,
    make_model: Callable[[], nn.Module] | None = None,
    dataset: Dataset | None = None,
    verbose: bool = True,
) -> TrainingRun:
    """Trains as `config` says, prints one line an epoch, and returns history and trained weights.

    `make_model` and `dataset` take the place of `config.model` and `config.dataset`: any model that maps a batch of
    inputs to logits, any four tensors. Works in a notebook, with a function defined in a cell, any number of times.

    Raises DeviceError, DataError, ResultsError and ConfigError before anything is started, WorkerFailure where a worker
    failed; the epochs that were finished until then are in the results.
    """
    servers = STRATEGIES[config.strategy].server_count
    n, device, device_line = choose_processes(config.n_gpus, config.device, servers)
    if dataset is None:
        dataset, data_line = load_dataset(config.dataset, config.data_dir, config.train_size, config.seed)
    else:
        data_line = f"{dataset.name} from {dataset.source}"
    if len(dataset.train_targets) == 0 or len(dataset.test_targets) == 0:
        raise ResultsError(f"{dataset.name} has no samples to train on, or none to test with")
    model_is_given = make_model is not None
    make_model = make_model or partial(build_model, config.model, dataset.image_shape, dataset.class_count)
    model_name = getattr(make_model, "__name__", "model") if model_is_given else config.model
    config = replace(config, n_gpus=n, train_size=len(dataset.train_targets), epochs=config.epochs_on(dataset.name))
    folder = RunFolder(config.results_dir, f"{config.strategy}_{model_name}_{dataset.name}_n{n}")
    folder.write_manifest(
        **environment(), config=asdict(config), model=model_name, dataset=data_line, device=device, status="running"
    )
    job, shared = make_job(config, dataset, make_model)
    display = _Display(config, dataset, folder, model_name, device, verbose)
    display.introduce([device_line, data_line])
    status = "interrupted"
    try:
        results = launch(
            train_worker,
            n,
            job,
            server_count=servers,
            threads=display.threads,
            deadline_s=config.deadline_s,
            device=device,
            shared=shared,
            on_message=display.epoch_done,
            on_tick=display.tick,
        )
        status = "completed"
    except Exception as error:
        status = "failed"
        folder.write_manifest(error=str(error))
        raise
    finally:
        display.close()
        folder.write_manifest(status=status)
    first_worker = results[servers]
    return TrainingRun(first_worker["history"], first_worker["weights"], str(folder.path))


class _Display:
    """One bar and one line an epoch, whatever the number of processes; and the same figures into runs.csv."""

    def __init__(
        self, config: RunConfig, dataset: Dataset, folder: RunFolder, model_name: str, device: str, verbose: bool
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.folder = folder
        self.model_name = model_name
        self.device = device
        self.verbose = verbose
        self.servers = STRATEGIES[config.strategy].server_count
        self.threads = threads_per_worker(config.n_gpus or 1)
        self.steps = step_count(len(dataset.train_targets), config.batch_size)
        # disable=None: no bar where the output is not a terminal
        self.bar = tqdm(
            total=self.steps * config.epochs_on(dataset.name),
            unit="step",
            disable=None if verbose else True,
            leave=False,
        )

    def say(self, line: str) -> None:
        if self.verbose:
            self.bar.write(line, file=sys.stdout)
            sys.stdout.flush()

    def introduce(self, lines: list[str | None]) -> None:
        config, n = self.config, self.config.n_gpus or 1
        workers = n - self.servers
        for line in lines:
            if line:
                self.say(line)
        server = " and 1 server" if self.servers else ""
        per_worker = -(-config.batch_size // workers)
        self.say(
            f"{config.strategy}: {workers} worker{'s' if workers > 1 else ''}{server} on {self.device}, "
            f"{self.threads} thread{'s' if self.threads > 1 else ''} each; {self.model_name}, batch of "
            f"{config.batch_size} over all workers (at most {per_worker} each), {self.steps} steps an epoch"
        )
        if self.device == "cpu" and workers > usable_cpus():
            self.say(f"{workers} workers share {usable_cpus()} processors: expect no speed-up over fewer workers")

    def tick(self, board: StatusBoard) -> None:
        status = board.read(self.servers)
        done = (max(status.epoch, 1) - 1) * self.steps + min(status.samples // self.config.batch_size, self.steps)
        self.bar.update(max(0, done - self.bar.n))

    def epoch_done(self, rank: int, epoch: Epoch) -> None:
        workers = epoch.ranks[self.servers :]

        def mean(part: str) -> float:
            return float(sum(getattr(each, part) for each in workers) / len(workers))

        updating = epoch.ranks[0]  # with a server, the only rank that updates
        self.say(
            f"epoch {epoch.epoch}/{self.config.epochs}  train loss {epoch.train_loss:.4f}  "
            f"test accuracy {100 * epoch.test_accuracy:.2f} %  {epoch.samples_per_s:,.0f} samples/s  "
            f"compute {mean('compute_s'):.2f} s  exchange {mean('exchange_s'):.2f} s  wait {mean('wait_s'):.2f} s  "
            f"update {updating.update_s:.2f} s"
        )
        self.folder.append_rows(self._rows(epoch))

    def _rows(self, epoch: Epoch) -> list[dict[str, Any]]:
        config = self.config
        common = {
            "experiment": "",
            "kind": "measured",
            "strategy": config.strategy,
            "options": json.dumps({"bucket_mb": config.bucket_mb}),
            "model": self.model_name,
            "dataset": self.dataset.name,
            "train_size": config.train_size,
            "n": config.n_gpus,
            "nodes": 1,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "device": self.device,
            "dtype": config.dtype,
            "optimizer": config.optimizer,
            "lr": config.learning_rate,
            "threads": self.threads,
            **{key: value for key, value in asdict(epoch).items() if key != "ranks"},
        }
        rows = []
        for rank, spent in enumerate(epoch.ranks):
            parts = asdict(spent)
            for by_peer in ("waited_for_s", "received_bytes"):
                parts[by_peer] = json.dumps(parts[by_peer])
            rows.append({**common, "rank": rank, "role": "server" if rank < self.servers else "worker", **parts})
        return rows

    def close(self) -> None:
        self.bar.close()
