"""What a run leaves behind: a folder with manifest.json (what ran, where, how it ended) and runs.csv (the figures).

runs.csv has one row for each epoch and rank, all strategies alike, so that any number of runs can be put one under the
other and compared. It grows while the run goes on: an interrupted run keeps the epochs that it finished.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_parallel.cards import card_names
from torch_parallel.devices import usable_cpus
from torch_parallel.files import OutputError as OutputError  # the controls take these two from here
from torch_parallel.files import our_own, path_of, utf8
from torch_parallel.files import prepare_streams as prepare_streams
from torch_parallel.usage import UserError

COLUMNS = (
    "run_id",
    "experiment",
    "kind",  # measured, emulated or simulated
    "strategy",
    "options",  # the strategy's own, as JSON
    "model",
    "dataset",
    "train_size",
    "test_size",
    "n",
    "workers",  # processes that train
    "nodes",
    "setup",  # nodes and workers of each
    "batch_size",  # global
    "per_gpu_batch",  # samples of a step for each worker, where all get as many
    "max_steps",
    "seed",
    "device",
    "dtype",
    "optimizer",
    "lr",
    "threads",  # of one process
    "epoch",
    "steps",
    "train_loss",
    "test_loss",
    "test_accuracy",
    "precision",  # of the test samples; this and the next two are means over the classes
    "recall",
    "f1",
    "perplexity",  # of the test samples
    "metrics",  # what else the task makes of the test samples, as JSON
    "train_s",
    "samples_per_s",
    "tokens_per_s",  # that count, of texts
    "flop_utilisation",  # part of the GPUs' published peak that forward and backward of the model make use of
    "test_s",
    "test_samples_per_s",
    "test_tokens_per_s",
    "skipped_steps",
    "updates",  # of the epoch; this and the next five on the server of a strategy that may go on without some workers
    "staleness_mean",
    "staleness_max",
    "staleness_counts",  # gradients by their staleness, from 0 on, as JSON
    "dropped",  # workers' shares of a step that were not waited for
    "samples_lost",  # in these shares
    "rank",
    "role",  # worker or server
    "compute_s",
    "exchange_s",
    "wait_s",
    "update_s",
    "exchanged_part",  # of train_s without the run's first step
    "waited_part",  # likewise
    "peak_process_bytes",  # of memory
    "peak_gpu_bytes",  # that torch took of the GPU
    "waited_for_s",  # seconds by peer, as JSON
    "received_bytes",  # bytes by peer, as JSON
    "nic_bytes",  # of the node's cards, sent and received as the system counts, as JSON; on its lowest rank
    "nic_message_bytes",  # likewise, as the messages of its ranks add up
    "started",  # of the run
    "command",
    "commit",
)


class ResultsError(UserError):
    """The results folder cannot be written to. One line."""


class RunFolder:
    """The folder of one run, made at once, so that a run whose results could not be kept never starts.

    Raises ResultsError where it cannot be made.
    """

    def __init__(self, results_dir: str, name: str, with_time: bool = True) -> None:
        started = datetime.datetime.now().astimezone()
        name = re.sub(r"[^\w.-]+", "", name)  # it may hold the name of a user's function, "<lambda>" among them
        when = f"{started:%Y-%m-%d_%H%M%S}" if with_time else f"{started:%Y-%m-%d}"
        self.path = _new_folder(path_of(results_dir), f"{when}_{name}")
        self._manifest: dict[str, Any] = {"run_id": self.run_id, "started": started.isoformat(timespec="seconds")}

    @classmethod
    def reopened(cls, path: Path) -> RunFolder:
        """A folder that was made before, to go on in."""
        folder = cls.__new__(cls)
        folder.path = path
        folder._manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        folder._manifest.pop("error", None)  # of the time before
        return folder

    @property
    def run_id(self) -> str:
        return utf8(self.path.name).decode()

    def write_manifest(self, **entries: Any) -> None:
        """Adds entries and writes manifest.json anew, by way of a temporary name. Raises OutputError."""
        self._manifest.update(entries)
        temporary = self.path / "manifest.json.tmp"
        with our_own():
            temporary.write_bytes(utf8(json.dumps(self._manifest, indent=2, ensure_ascii=False) + "\n"))
            os.replace(temporary, self.path / "manifest.json")

    @contextlib.contextmanager
    def running(self, **entries: Any) -> Iterator[None]:
        """Adds entries and keeps the status: running, then completed, interrupted, or failed and with which error."""
        self.write_manifest(**entries, status="running")
        try:
            yield
        except BaseException as error:
            failed = {"status": "failed", "error": str(error)}
            with contextlib.suppress(OSError):  # the first error is the one to tell
                self.write_manifest(**(failed if isinstance(error, Exception) else {"status": "interrupted"}))
            raise
        self.write_manifest(status="completed")

    def append_rows(self, rows: list[dict[str, Any]]) -> None:
        """Adds rows with the names of COLUMNS to runs.csv. Raises OutputError."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, restval="")
        file_path = self.path / "runs.csv"
        with our_own():
            if not file_path.exists():
                writer.writeheader()
            same = {name: self._manifest.get(name, "") for name in ("run_id", "started", "command", "commit")}
            writer.writerows([{**same, **row} for row in rows])
            with open(file_path, "ab") as file:
                file.write(utf8(text.getvalue()))


def _new_folder(results_dir: Path, name: str) -> Path:
    """A folder that nobody else has, even if two runs of one name start in the same second."""
    attempt = 1
    while True:
        path = path_of(results_dir / (name if attempt == 1 else f"{name}_{attempt}"))
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not results_dir.is_dir():
                raise ResultsError(f"--results_dir {results_dir}: it is a file, not a folder") from None
            attempt += 1
        except OSError as error:
            raise ResultsError(
                f"--results_dir {results_dir}: cannot make a folder there ({error.strerror}); "
                "name one that can be written to"
            ) from error


def environment() -> dict[str, Any]:
    """What a reader must know to repeat a run: command, commit, machine, cards, versions."""
    import numpy
    import torch

    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": _commit(),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
            "processors": os.cpu_count(),
            "usable_processors": usable_cpus(),
            "memory_bytes": _memory_bytes(),
        },
        "cards": card_names() if torch.backends.cuda.is_built() else [],  # those that torch can use
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
    }


def _commit() -> str | None:
    """The commit of the code that runs, with "+changes" where files differ from it; None outside a repository."""
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]  # it writes nothing, and stops no commit
    try:
        # a package that is installed below somebody else's repository is not part of it
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True).stdout.decode().strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changed.stdout.strip() else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def joined(names: Sequence[str]) -> str:
    """Parts that are told together: "exchange, wait and update"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
