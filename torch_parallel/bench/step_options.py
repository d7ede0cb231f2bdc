"""The command line of the bench of training steps, and the setting that it asks for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import torch

from torch_parallel.bench.setting import (
    PUBLISHED_CHANNELS,
    PUBLISHED_SIDE,
    USUAL_CHANNELS,
    USUAL_SIDE,
    VOCABULARY_SIZES,
    Setting,
)
from torch_parallel.devices import choose_processes
from torch_parallel.strategies import FROM_SCRATCH
from torch_parallel.training.compiling import check_compiler
from torch_parallel.training.config import (
    A_BUCKET,
    DEFAULT_BUCKET_MB,
    DEVICES,
    LARGEST_BUCKET_MB,
    PRECISIONS,
)
from torch_parallel.training.optimizers import OPTIMIZERS
from torch_parallel.usage import ConfigError, OneLineParser
from torch_parallel.workloads import MODELS, image_side
from torch_parallel.workloads.forms import TextForm, TextTask
from torch_parallel.workloads.models.sizes import SIZES

DEFAULT_STRATEGIES = ("sharded_param_server", "ring_all_reduce")
LARGEST_SIDE = 4096  # pixels
LARGEST_LENGTH = 1 << 16  # tokens
LARGEST_VOCABULARY = 10**7  # tokens


def parse(arguments: list[str]) -> Any:
    parser = OneLineParser(prog="python -m torch_parallel bench step", allow_abbrev=False)
    parser.add_argument(
        "--strategy",
        nargs="+",
        default=DEFAULT_STRATEGIES,
        choices=tuple(FROM_SCRATCH),
        help=f"strategies, each beside ddp (default: {' '.join(DEFAULT_STRATEGIES)})",
    )
    parser.add_argument("--n_gpus", type=int, help="workers (default: all GPUs, or 2 on the CPU)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where they train (default: auto)")
    parser.add_argument("--model", choices=tuple(MODELS), default="mlp", help="model (default: mlp)")
    parser.add_argument("--model_size", choices=SIZES, help="of models that have sizes (default: as published)")
    parser.add_argument("--parameters_m", type=float, default=25, help="millions of parameters of mlp (default: 25)")
    usual = ", ".join(f"{side} for {model}" for model, side in USUAL_SIDE.items())
    parser.add_argument(
        "--image_side",
        type=int,
        help=f"pixels (default: what the size is for; without one {usual} and {PUBLISHED_SIDE} for the others)",
    )
    parser.add_argument(
        "--task", choices=get_args(TextTask), help="of texts (default: next_token for gpt2, masked for the others)"
    )
    parser.add_argument("--length", type=int, help="tokens of a text (default: 256 for gpt2, else 128)")
    parser.add_argument("--vocabulary_size", type=int, help="tokens that there are (default: as published)")
    parser.add_argument("--batch_size", type=int, default=16, help="global (default: 16)")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="fused (default: sgd)")
    parser.add_argument("--precision", choices=PRECISIONS, default="full", help="bf16: autocast (default: full)")
    parser.add_argument("--compile", action="store_true", help="each layer by torch.compile, on both sides")
    usual = ", ".join(f"{mb:g} on {device}" for device, mb in DEFAULT_BUCKET_MB.items())
    parser.add_argument("--bucket_mb", type=float, help=f"MiB in a bucket of ours (default: {usual})")
    parser.add_argument(
        "--ddp_bucket_mb",
        type=float,
        nargs="+",
        default=[25.0],
        help="and of ddp's; of several it gets what it is fastest with (default: 25, torch's own)",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="each side in processes of its own, started for every turn (default: in the same ones, in turns)",
    )
    parser.add_argument("--steps", type=int, default=10, help="of each side in a turn (default: 10)")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each side, one more warms up (default: 9)")
    parser.add_argument("--results_dir", default="results/runs", help="folder for a folder with the figures")
    options = parser.parse_args(arguments)
    for name in ("n_gpus", "steps", "repeats"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: it must be at least 1")
    options.n_gpus, options.device, line = choose_processes(options.n_gpus, options.device)
    if line is not None:
        print(line)
    if options.batch_size < options.n_gpus:
        raise ConfigError(f"--batch_size {options.batch_size}: each of the {options.n_gpus} workers needs a sample")
    if not 0 < options.parameters_m < math.inf:
        raise ConfigError(f"--parameters_m {options.parameters_m}: it must be finite and > 0")
    for name, value in [("bucket_mb", options.bucket_mb), *(("ddp_bucket_mb", each) for each in options.ddp_bucket_mb)]:
        if value is not None and not 0 < value <= LARGEST_BUCKET_MB:
            raise ConfigError(f"--{name} {value}: {A_BUCKET}")
    _check_model(options)
    if options.compile:
        check_compiler(options.device)
    return options


def setting_of(options: Any) -> Setting:
    """With what is usual for the model in the place of what was left out, so that the figures tell it."""
    setting = Setting(
        round(options.parameters_m * 1e6),
        options.batch_size,
        options.optimizer,
        model=options.model,
        image_side=options.image_side,
        precision=options.precision,
        compile=options.compile,
        bucket_mb=options.bucket_mb or DEFAULT_BUCKET_MB[options.device],
        ddp_bucket_mb=options.ddp_bucket_mb[0],
        model_size=options.model_size,
        task=options.task,
        length=options.length,
        vocabulary_size=options.vocabulary_size,
    )
    form = setting.form
    if isinstance(form, TextForm):
        return replace(setting, task=form.task, length=form.length, vocabulary_size=form.vocabulary_size)
    return replace(setting, image_side=form.width) if options.model_size else setting


def _check_model(options: Any) -> None:
    """Raises ConfigError where the model cannot be made, or cannot be fed with such samples."""
    named = f"--model {options.model}"
    try:
        image_side(options.model, options.model_size)
    except ValueError as error:
        raise ConfigError(f"{named} --model_size {options.model_size}: {error}") from None
    is_text = options.model in VOCABULARY_SIZES
    if options.image_side is not None:
        _check_image_side(options, is_text)
    given = [name for name in ("task", "length", "vocabulary_size") if getattr(options, name) is not None]
    if given and not is_text:
        found = f"--{given[0]} {getattr(options, given[0])}"
        raise ConfigError(f"{found}: {options.model} is fed with no texts; leave it out, or take another --model")
    for name, most in (("length", LARGEST_LENGTH), ("vocabulary_size", LARGEST_VOCABULARY)):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"--{name} {value}: it must be at least 1 and at most {most}")
    if is_text:
        try:
            with torch.device("meta"):
                setting_of(options).bare_model()
        except ValueError as error:
            raise ConfigError(f"{named}: {error}") from None


def _check_image_side(options: Any, is_text: bool) -> None:
    model, side = options.model, options.image_side
    if model == "mlp" or is_text:
        raise ConfigError(f"--image_side {side}: {model} is fed with no images; leave it out, or take another --model")
    if side > LARGEST_SIDE:
        raise ConfigError(f"--image_side {side}: at most {LARGEST_SIDE} pixels are taken")
    try:
        setting = setting_of(options)
        with torch.device("meta"):
            setting.bare_model().eval()(torch.empty(1, USUAL_CHANNELS.get(model, PUBLISHED_CHANNELS), side, side))
    except (RuntimeError, ValueError, AssertionError, ArithmeticError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"--image_side {side}: {model} cannot take such images ({why}); leave it out") from None
