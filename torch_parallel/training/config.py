"""One flat, frozen description of a run. Its fields are the command line's flags, and their choices are the registries,
so nothing can be asked for that is not there."""

from __future__ import annotations

import argparse
import math
from collections import ChainMap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from torch_parallel.collectives import ALL_REDUCE
from torch_parallel.gradients.scheduler import SCHEDULES as GRADIENT_SCHEDULES
from torch_parallel.strategies import BUILTIN, STRATEGIES
from torch_parallel.training import emulation
from torch_parallel.training.aggregate import AGGREGATES
from torch_parallel.training.optimizers import DEFAULT_LR, OPTIMIZERS
from torch_parallel.training.sampler import epoch_sizes
from torch_parallel.training.schedule import SCHEDULES
from torch_parallel.transport.cuda_ipc import PERFORMERS
from torch_parallel.transport.signals import A_DEADLINE, LONGEST_DEADLINE_S
from torch_parallel.usage import ConfigError, OneLineParser
from torch_parallel.workloads import DATASETS, MODELS
from torch_parallel.workloads.load import CATEGORIES, RUNNING_TEXTS, Choice
from torch_parallel.workloads.models import IMAGES
from torch_parallel.workloads.models.sizes import SIZES

NOT_FINITE = ("stop", "skip")
DTYPES = ("float32", "float64")
PRECISIONS = ("full", "bf16")
DEFAULT_EPOCHS, DEFAULT_BATCH_SIZE = 3, 64
DEFAULTS_OF: dict[str, dict[str, Any]] = {"digits": {"epochs": 10, "batch_size": 16, "lr": {"sgd": 0.004}}}
"""Other defaults of built-in data sets, by name. Digits has few samples: an epoch has more steps, and smaller ones."""
_DIGITS = DEFAULTS_OF["digits"]
DEVICES = ("auto", "cpu", "cuda")
LARGEST_BUCKET_MB = 2**20
A_BUCKET = f"it must be > 0 and at most {LARGEST_BUCKET_MB}, a TiB"
DEFAULT_BUCKET_MB = {"cpu": 25.0, "cuda": 100.0}
"""Measured: results/bench_buckets and bench_buckets_gpu. On two H200 the steps of a vision transformer differ by 0.3 %
with 50 and 100. With 25 they take 0.9 % more in float32, and 1.6 % if buckets are exchanged after backward."""
SCHEDULED_BUCKET_MB = 1.0  # what is small overtakes, and is overtaken, sooner

CONTROL_FLAGS = (
    *("n_gpus", "device", "dtype", "model", "model_size", "pretrained", "workload", "dataset", "data_dir", "length"),
    *("train_size", "test_size", "batch_size", "per_gpu_batch", "epochs", "max_steps", "seed"),
    *("optimizer", "lr", "scale_lr", "momentum", "weight_decay", "results_dir"),
)
"""The flags of the two built-in scripts, which are controls: what to train on what, and not how."""


ALGORITHMS = ChainMap[str, Any](ALL_REDUCE, {"auto": None})  # "auto" comes first: a chain begins with its last map


def flag(default: Any, help: str, choices: Collection[str] | None = None, own: bool = False) -> Any:
    """A field of RunConfig that is a flag of the command line too; with `own`, only of the strategies that name it.

    The keys of a registry as `choices` are those that it has when they are looked at, not those of now.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "own": own})


@dataclass(frozen=True)
class RunConfig:
    """What to train, how, and on how many processes. Raises ConfigError for values that make no sense."""

    strategy: str = flag("ring_all_reduce", "how workers come to hold the next parameters", STRATEGIES.keys())
    n_gpus: int | None = flag(
        None,
        "processes, one a GPU, or CPU processes where there is no GPU; with a param_server the first one is the server "
        "and trains nothing; data_parallel drives all GPUs from one process (default: all GPUs and at least 2)",
    )
    batch_size: int | None = flag(
        None,
        "samples of one optimizer step over all workers together (the global batch); with param_server_async, of one "
        f"update of each worker (default: {DEFAULT_BATCH_SIZE}, and {_DIGITS['batch_size']} for digits)",
    )
    per_gpu_batch: int | None = flag(
        None,
        "samples of one optimizer step of each worker, in the place of --batch_size: the global batch grows with the "
        "workers",
    )
    epochs: int | None = flag(
        None,
        f"passes over the training data (default: {DEFAULT_EPOCHS}, and {_DIGITS['epochs']} for digits, which has few "
        "samples)",
    )
    lr: float | None = flag(
        None,
        "learning rate (default: "
        + ", ".join(f"{rate} for {name}" for name, rate in DEFAULT_LR.items())
        + f", and {_DIGITS['lr']['sgd']} for sgd on digits); it belongs to the global batch and does not change with "
        "the number of workers",
    )
    scale_lr: bool = flag(
        False, "multiply the learning rate by the number of workers, for a batch that grows with them (--per_gpu_batch)"
    )
    max_steps: int | None = flag(
        None,
        "end the run after so many steps of --batch_size samples; without --epochs it makes the epochs that they take",
    )
    momentum: float = flag(0.9, "momentum, for sgd")
    weight_decay: float = flag(0.0, "weight decay")
    optimizer: str = flag("sgd", "optimizer", OPTIMIZERS.keys())
    model: str = flag("cnn", "model", MODELS.keys())
    dataset: str | None = flag(
        None,
        f"data: {', '.join(DATASETS)}, synthetic:3x32x32:10 (made up, of that shape and number of classes), or a "
        "folder of images with one sub-folder a class; for models of text synthetic, "
        f"{', '.join((*CATEGORIES, *RUNNING_TEXTS))}, a .csv file of categories and texts, or a text file (default: "
        "mnist where it is found or can be downloaded, else digits; for text python_docs, which every Python has)",
    )
    model_size: str | None = flag(None, "size of the model, where it has sizes (default: as published)", SIZES)
    pretrained: str | None = flag(
        None,
        "weights and tokenizer to begin with: a folder, or a name on the hub; for bert, distilbert, gpt2, vit",
    )
    length: int | None = flag(None, "tokens of a text (default: 256 for gpt2, else 128)")
    workload: str | None = flag(
        None,
        "model, task and data of your own, in the place of --model and --dataset: a file and a function in it that "
        "returns them, such as mine.py:make",
    )
    data_dir: str | None = flag(
        None, "folder with the data; then the folder named by TORCH_PARALLEL_DATA, then ./data, are looked into"
    )
    train_size: int | None = flag(None, "train on a seeded random subset of this many samples (default: all)")
    test_size: int | None = flag(None, "test on a seeded random subset of this many samples (default: all)")
    seed: int = flag(0, "seed of initial weights, sample order, subset and dropout")
    device: str = flag("auto", "where workers train; auto takes the GPUs where there are any", DEVICES)
    performer: str = flag(
        "auto",
        "what performs exchanges between GPUs: torch's operations, or a Triton kernel (auto, if installed)",
        PERFORMERS,
    )
    dtype: str = flag("float32", "type of parameters and gradients", DTYPES)
    precision: str = flag(
        "full",
        "of forward and backward: that of --dtype, or bfloat16 where torch's autocast takes it; parameters, gradients, "
        "their sums and the optimizer's state stay float32",
        PRECISIONS,
    )
    compile: bool = flag(
        False,
        "compile the model by torch.compile, each layer for itself, so that the exchange still overlaps with "
        "backward; takes a minute or more at the start",
    )
    lr_schedule: str = flag("constant", "how the learning rate falls after the warm-up", SCHEDULES.keys())
    warmup_steps: int = flag(0, "steps over which the learning rate rises linearly")
    aggregate: str = flag(
        "weighted",
        "what the gradient of a step is: weighted, the mean over all samples; mean, the mean of the workers' means, "
        "which is the same where all have as many samples, and takes the same learning rate; sum, the sum of their "
        "means: N times as large with N workers, so divide the learning rate by N for steps of the same size",
        AGGREGATES.keys(),
    )
    accumulate: int = flag(1, "micro-batches into which each worker splits its share of a step, to save memory")
    clip_norm: float | None = flag(None, "largest norm of the whole gradient, clipped after averaging (default: none)")
    not_finite: str = flag("stop", "what all ranks do about a NaN or infinite gradient", NOT_FINITE)
    check_replicas: int = flag(0, "compare the parameters of all ranks every so many steps; 0 is never")
    checkpoint_every: int = flag(
        0,
        "save a checkpoint every so many steps, and at the end; 0 is never; where workers are not in step, at the next "
        "end of an epoch",
    )
    resume: str | None = flag(None, "checkpoint, or folder of a run, to go on from")
    trace: str | None = flag(None, "file for a Chrome trace of all ranks (opens in ui.perfetto.dev)")
    steps_csv: str | None = flag(None, "file for what every rank's time went on in every step, and for whom it waited")
    straggler: str | None = flag(
        None,
        "emulate slow workers, comma-separated: 3:4x makes rank 3's forward and backward last 4 times as long, 3:50ms "
        "50 ms longer in each step",
    )
    jitter: str | None = flag(
        None, "emulate random delays: each worker's step lasts longer by an exponential time of this mean, such as 10ms"
    )
    compute_ms: float = flag(0.0, "emulate slow computing: each worker's forward and backward last at least this long")
    link: str | None = flag(
        None,
        "emulate links: the bandwidth of each node's NICs in each direction, such as 1gbit or 1.5GB; 3:100mbit "
        "for node 3 alone, comma-separated; without --nodes each rank is a node",
    )
    latency: str | None = flag(None, "emulate the latency of each message between nodes, such as 50us")
    nodes: int | None = flag(
        None,
        "emulated nodes, which have no memory in common, filled with workers in the order of their ranks; a server is "
        "one more node of its own",
    )
    workers_per_node: int | None = flag(None, "workers of each emulated node (default: as --nodes and --n_gpus say)")
    setup: str | None = flag(
        None,
        "nodes and workers of each, such as 2_4: short for --nodes 2 --workers_per_node 4 and their processes; between "
        f"nodes lie links of {emulation.SETUP_LINK} and {emulation.SETUP_LATENCY}, if --link and --latency say nothing",
    )
    nics: int | str = flag(
        1,
        "NICs of each emulated node, shared by its workers in equal groups; within it memory is used. On real nodes "
        "their names, such as eth1,eth2, the same on each (default there: the card that reaches rank 0)",
    )
    bucket_mb: float | None = flag(
        None,
        "MiB of gradients that are exchanged together (default: "
        + ", ".join(f"{mb:g} on {device}" for device, mb in DEFAULT_BUCKET_MB.items())
        + f"; ddp's is torch's own, 25; with --schedule {SCHEDULED_BUCKET_MB:g})",
    )
    overlap: bool | None = flag(
        None,
        "exchange each bucket as soon as backward has made its gradients, not when backward is over, which pays where "
        "there are several (see --bucket_mb); default: on GPUs, if nothing is emulated, and neither --steps_csv nor "
        "--trace asks for what it hides",
        own=True,
    )
    algorithm: str = flag(
        "auto",
        "of all_reduce: auto takes the one that was measured as the fastest for a bucket's size and as many processes",
        ALGORITHMS.keys(),
        own=True,
    )
    schedule: str = flag(
        "none",
        "exchange beside backward, by a thread of each worker, on the CPU: fifo, gradients in the order in which they "
        "come, or priority, those first that the next forward needs first",
        GRADIENT_SCHEDULES,
        own=True,
    )
    partition_mb: float | None = flag(
        None, "with --schedule: MiB into which larger gradients are cut, so that others may overtake", own=True
    )
    credit_mb: float | None = flag(
        None, "with --schedule: MiB of gradients that are under way at a time (default: any)", own=True
    )
    cross_barrier: bool = flag(
        False,
        "with --schedule: the next forward begins before all is exchanged, and waits for each parameter where it first "
        "uses it",
        own=True,
    )
    staleness: int = flag(0, "steps that a worker of param_server_bounded may be ahead of the slowest one", own=True)
    backup_workers: int = flag(
        0, "workers of param_server_backup that a step does not wait for: the slowest ones, whoever they are", own=True
    )
    results_dir: str = flag("results/runs", "folder in which the run makes a folder for its manifest.json and runs.csv")
    deadline_s: float = flag(300.0, "seconds after which a wait for a silent rank ends the run")

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(RunConfig).items():
            self._check_type(name, _kinds(annotation))
        for each in fields(RunConfig):
            if each.metadata["choices"]:
                self._check_choice(each.name)
        self._set_up()
        servers = STRATEGIES[self.strategy].server_count
        if self.n_gpus is not None:
            self.require("n_gpus", self.n_gpus >= 1, "at least 1 process is needed")
            self.require(
                "n_gpus",
                self.n_gpus > servers,
                f"{self.strategy} needs at least {servers + 1}: rank 0 is the server, the others train",
            )
        self._check_own_options()
        self.require("batch_size", self.batch_size is None or self.batch_size >= 1, "a step needs at least 1 sample")
        why = "it is what each worker gets, and --batch_size what all get together: leave one of the two out"
        self.require("per_gpu_batch", self.per_gpu_batch is None or self.per_gpu_batch >= 1, "at least 1 is needed")
        self.require("per_gpu_batch", self.per_gpu_batch is None or self.batch_size is None, why)
        why = "the batch, and so the rate that it takes, stays the same with more workers: give --per_gpu_batch too"
        self.require("scale_lr", not self.scale_lr or self.per_gpu_batch is not None, why)
        self.require("epochs", self.epochs is None or self.epochs >= 1, "at least 1 epoch is needed")
        self.require("max_steps", self.max_steps is None or self.max_steps >= 1, "at least 1 step is needed")
        self.require(
            "lr", self.lr is None or (math.isfinite(self.lr) and self.lr >= 0), "it must be finite and not < 0"
        )
        if self.workload is not None:
            for name in ("dataset", "model_size", "pretrained", "length"):
                self.require(
                    name, getattr(self, name) is None, "a workload brings its own model and data; leave it out"
                )
        self.require("length", self.length is None or self.length >= 1, "at least 1 token is needed")
        of_text = self.workload is not None or IMAGES not in MODELS[self.model].takes
        self.require(
            "length", self.length is None or of_text, f"{self.model} takes images, which have none; leave it out"
        )
        why = "the trained weights say how large the model is; leave it out"
        self.require("model_size", self.model_size is None or self.pretrained is None, why)
        self.require("momentum", 0 <= self.momentum < 1, "it must lie in [0, 1)")
        self.require("weight_decay", 0 <= self.weight_decay < math.inf, "it must be finite and not < 0")
        self.require("train_size", self.train_size is None or self.train_size >= 1, "at least 1 sample is needed")
        self.require("test_size", self.test_size is None or self.test_size >= 1, "at least 1 sample is needed")
        self.require("seed", 0 <= self.seed < 2**63, "it must lie in [0, 2^63)")
        self.require("warmup_steps", self.warmup_steps >= 0, "it must not be < 0")
        self.require("accumulate", self.accumulate >= 1, "at least 1 micro-batch is needed")
        self.require("clip_norm", self.clip_norm is None or 0 < self.clip_norm < math.inf, "it must be finite and > 0")
        self.require("check_replicas", self.check_replicas >= 0, "it must not be < 0")
        self.require("checkpoint_every", self.checkpoint_every >= 0, "it must not be < 0")
        why = f"it keeps parameters and gradients in float32, and not in {self.dtype}: leave one of the two out"
        self.require("precision", self.precision == "full" or self.dtype == "float32", why)
        self.require("bucket_mb", self.bucket_mb is None or 0 < self.bucket_mb <= LARGEST_BUCKET_MB, A_BUCKET)
        self.require("deadline_s", 0 < self.deadline_s <= LONGEST_DEADLINE_S, A_DEADLINE)
        try:
            emulation.check(self)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _set_up(self) -> None:
        """What `setup` is short for."""
        if self.setup is not None:
            try:
                meant = emulation.set_up(self.setup, STRATEGIES[self.strategy].server_count)
            except ValueError as error:
                raise ConfigError(f"--setup {self.setup}: {error}") from None
            emulated = self.link is not None or self.latency is not None
            if meant["nodes"] > 1:
                common = STRATEGIES[self.strategy].common_sums
                why = (
                    f"between its nodes are emulated links, which {self.strategy} does not use: take 1 node, or another"
                )
                self.require("setup", not common and self.strategy not in BUILTIN, f"{why} --strategy")
                if not emulated:
                    meant |= {"link": emulation.SETUP_LINK, "latency": emulation.SETUP_LATENCY}
            elif not emulated:  # one node without links is no emulation
                del meant["nodes"], meant["workers_per_node"]
            for name, value in meant.items():
                given = getattr(self, name)
                why = f"--setup {self.setup} says how many there are: leave one of the two out"
                self.require(name, given is None or given == value, why)
                object.__setattr__(self, name, value)

    @property
    def own_options(self) -> dict[str, Any]:
        """Name and value of the flags that only some strategies take, this one among them."""
        return {name: getattr(self, name) for name in _OWN if name in STRATEGIES[self.strategy].options}

    def strategy_options_on(self, device: str) -> dict[str, Any]:
        """What this strategy alone is made with where the workers train on `device`."""
        options = {name: getattr(self, name) for name in STRATEGIES[self.strategy].options}
        if options.get("overlap", False) is None:
            looked_into = self.steps_csv is not None or self.trace is not None or bool(emulation.flags(self))
            options["overlap"] = device == "cuda" and not looked_into
        return options

    @property
    def choice(self) -> Choice:
        """What it trains, of the fields that say so."""
        return Choice(**{each.name: getattr(self, each.name) for each in fields(Choice)})

    @property
    def in_step(self) -> bool:
        """Whether all ranks hold the same parameters after every step."""
        return STRATEGIES[self.strategy].in_step(**self.own_options)

    def epochs_on(self, dataset: str) -> int:
        """`epochs`, or the default for the data set of that name."""
        default: int = DEFAULTS_OF.get(dataset, {}).get("epochs", DEFAULT_EPOCHS)
        return default if self.epochs is None else self.epochs

    def batch_size_on(self, dataset: str) -> int:
        """`batch_size`, or the default for the data set of that name."""
        default: int = DEFAULTS_OF.get(dataset, {}).get("batch_size", DEFAULT_BATCH_SIZE)
        return default if self.batch_size is None else self.batch_size

    def learning_rate_on(self, dataset: str) -> float:
        """`lr`, or the optimizer's default for the data set of that name."""
        default: float = DEFAULTS_OF.get(dataset, {}).get("lr", {}).get(self.optimizer, DEFAULT_LR[self.optimizer])
        return default if self.lr is None else self.lr

    def resolved(self, dataset: str, train_size: int, test_size: int) -> RunConfig:
        """The run as it is made: with every default that depends on data and number of workers decided, for so many
        samples of the data set of that name; `n_gpus` is known. `epochs` counts one that `max_steps` cuts short."""
        workers = (self.n_gpus or 1) - STRATEGIES[self.strategy].server_count
        batch_size = self.batch_size_on(dataset) if self.per_gpu_batch is None else self.per_gpu_batch * workers
        lr = self.learning_rate_on(dataset) * (workers if self.scale_lr else 1)
        epochs = self.epochs if self.max_steps else self.epochs_on(dataset)
        epochs = len(epoch_sizes(train_size, batch_size, epochs, self.max_steps))
        same = replace(self, per_gpu_batch=None, scale_lr=False, train_size=train_size, test_size=test_size)
        return replace(same, batch_size=batch_size, lr=lr, epochs=epochs)

    def epoch_sizes(self, train_size: int) -> list[int]:
        """Samples of each epoch, of a run that is resolved."""
        assert self.batch_size is not None
        return epoch_sizes(train_size, self.batch_size, self.epochs, self.max_steps)

    def columns(self, dataset: str, model: str | None = None) -> dict[str, Any]:
        """What every row of runs.csv says of the run, by the names of `results.COLUMNS`."""
        names = ("train_size", "test_size", "seed", "device", "dtype", "optimizer")
        same = {name: getattr(self, name) for name in names}
        same |= {"kind": "measured", "nodes": 1, "n": self.n_gpus}
        same |= {"batch_size": self.batch_size_on(dataset), "lr": self.learning_rate_on(dataset)}
        each, rest = divmod(same["batch_size"], self.n_gpus or 1)
        same |= {"setup": f"1_{self.n_gpus}", "per_gpu_batch": None if rest else each, "max_steps": self.max_steps}
        return same | {"model": model or self.model, "dataset": dataset}

    def bucket_mb_on(self, device: str) -> float:
        """`bucket_mb`, or the default where the workers train on `device`."""
        default = DEFAULT_BUCKET_MB["cpu" if self.strategy == "ddp" else device]
        if self.schedule != "none":
            default = min(default, SCHEDULED_BUCKET_MB)
        return default if self.bucket_mb is None else self.bucket_mb

    @property
    def process_count(self) -> int:
        """Processes that are started for `n_gpus`."""
        return STRATEGIES[self.strategy].process_count(self.n_gpus or 1)

    @property
    def nic_names(self) -> tuple[str, ...]:
        """The network cards of each node by which it exchanges, where they are named."""
        return () if isinstance(self.nics, int) else tuple(filter(None, map(str.strip, self.nics.split(","))))

    @property
    def nic_count(self) -> int:
        return self.nics if isinstance(self.nics, int) else max(1, len(self.nic_names))

    @classmethod
    def from_command_line(cls, arguments: Sequence[str] | None = None, description: str = "") -> RunConfig:
        """The run that `arguments` (default: this process's) ask for. Bad ones end the process: a line, exit code 2."""
        parser = command_line_parser(description)
        try:
            return cls(**vars(parser.parse_args(arguments)))
        except ConfigError as error:
            parser.error(str(error))

    def _check_type(self, name: str, kinds: tuple[type, ...]) -> None:
        """The command line gives each flag its type; Python code may give anything, NumPy's numbers among it."""
        value = getattr(self, name)
        fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"--{name} {value}: it must be {kinds[0].__name__}, not {type(value).__name__}")

    def _check_choice(self, name: str) -> None:
        value = getattr(self, name)
        choices = type(self).__dataclass_fields__[name].metadata["choices"]
        optional = type(self).__dataclass_fields__[name].default is None
        if value not in choices and not (value is None and optional):
            raise ConfigError(f"--{name} {value}: choose from {', '.join(choices)}")

    def _check_own_options(self) -> None:
        for name in _OWN:
            takers = [other for other, strategy in STRATEGIES.items() if name in strategy.options]
            default = type(self).__dataclass_fields__[name].default
            taken = self.strategy in takers or getattr(self, name) in (default, False)
            self.require(name, taken, f"{self.strategy} does not take it; give --strategy {' or '.join(takers)}")
            value = getattr(self, name)
            self.require(name, not isinstance(value, int) or value >= 0, "it must not be < 0")
        self._check_schedule()
        if self.backup_workers and self.n_gpus is not None:
            workers = self.n_gpus - STRATEGIES[self.strategy].server_count
            why = f"it must be less than the number of workers, {workers}: one at least is waited for"
            self.require("backup_workers", self.backup_workers < workers, why)
        why = f"with {self.strategy} ranks hold different parameters between the ends of epochs; leave it out"
        self.require("check_replicas", self.check_replicas == 0 or self.in_step, why)
        adds_up_all = STRATEGIES[self.strategy].adds_up_all(**self.own_options)
        why = f"{self.strategy} updates by the gradients of some workers, averaged over their samples; leave it out"
        self.require("aggregate", self.aggregate == "weighted" or adds_up_all, why)

    def _check_schedule(self) -> None:
        for name in ("partition_mb", "credit_mb"):
            value = getattr(self, name)
            self.require(name, value is None or 0.001 <= value < math.inf, "it must be at least 0.001")
        for name in ("partition_mb", "credit_mb", "cross_barrier"):
            why = "it says how gradients are scheduled: give --schedule fifo or --schedule priority too"
            self.require(name, self.schedule != "none" or getattr(self, name) in (None, False), why)
        why = "it runs on the CPU: leave it out, and take --overlap on GPUs"
        self.require("schedule", self.schedule == "none" or self.device != "cuda", why)
        why = "layers that are compiled do not show when they use a parameter: leave out --compile"
        self.require("cross_barrier", not (self.cross_barrier and self.compile), why)
        self.require("schedule", not (self.schedule == "priority" and self.compile), why)

    def require(self, name: str, good: bool, why: str) -> None:
        """Raises ConfigError for the flag of that name, as it is given, where its value is no good."""
        if not good:
            value = getattr(self, name)
            given = f"--{name if value else f'no_{name}'}" if isinstance(value, bool) else f"--{name} {value}"
            raise ConfigError(f"{given}: {why}")


_OWN = [each.name for each in fields(RunConfig) if each.metadata["own"]]


class _OnOrOff(argparse.Action):
    """--name for True, --no_name for False."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, not (option or "").startswith("--no_"))


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults are told, and a description keeps its lines."""


def command_line_parser(description: str = "", names: Sequence[str] | None = None) -> OneLineParser:
    """A parser with one flag for each field of RunConfig, or for those in `names`, named as the field is."""
    parser = OneLineParser(description=description, allow_abbrev=False, formatter_class=_Help)
    types = get_type_hints(RunConfig)
    for each in fields(RunConfig):
        if names is not None and each.name not in names:
            continue
        default_is_told = each.default is None
        kinds = _kinds(types[each.name])
        kind: Any = _number_or_text if kinds == (int, str) else kinds[0]
        default = argparse.SUPPRESS if default_is_told else each.default
        text = each.metadata["help"]
        if kind is bool:
            both = (f"--{each.name}", f"--no_{each.name}")
            parser.add_argument(*both, action=_OnOrOff, nargs=0, default=default, help=text)
            continue
        parser.add_argument(
            f"--{each.name}",
            type=kind,
            default=default,
            choices=each.metadata["choices"],
            metavar=None if each.metadata["choices"] else each.name.split("_")[-1].upper(),
            help=text,
        )
    return parser


def _number_or_text(text: str) -> int | str:
    return int(text) if text.strip().isdecimal() else text


def _kinds(annotation: Any) -> tuple[type, ...]:
    """(int,) for `int`, (int, NoneType) for `int | None`."""
    return getattr(annotation, "__args__", (annotation,))
