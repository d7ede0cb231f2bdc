"""A model with weights that others have trained: from a folder, from the hub's cache, or downloaded from the hub.

What is wrong is said before the weights are read, and before the library of the models is imported: a name that cannot
be had costs no more than the import of `huggingface_hub`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from torch_parallel.workloads.forms import Form, ImageForm
from torch_parallel.workloads.models.imports import leaving_no_trace
from torch_parallel.workloads.models.transformers import FAMILIES, check_dropout, library, model_class, settings

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # the second where they are in several files
REMEDY = f"give a folder with {CONFIG} and {WEIGHTS[0]}, as save_pretrained writes them"


def load_pretrained(name_or_folder: str | Path, form: Form, name: str, dropout: float | None = None) -> nn.Module:
    """The model `name` (bert, distilbert, gpt2 or vit) with the weights of a folder, or of a model's name on the hub.

    It is made for data of this form, in torch's default dtype and ready for training, as `build_model` makes it. Where
    the weights have no output layer for this task or this number of classes, it begins afresh, by torch's global
    generator. The vocabulary may be larger than the form's. With HF_HUB_OFFLINE in the environment nothing is
    downloaded.

    Raises ValueError, in one line: another kind of model, data that it cannot take, no such folder or name, no weights,
    weights that do not fit.
    """
    _check_kind(name, form)
    check_dropout(dropout)
    _check_type(_folder_with((CONFIG,), name_or_folder), name, name_or_folder)
    folder = _folder_with(WEIGHTS, name_or_folder)
    with _one_line(name_or_folder), _silence():
        config_class = library(name, "configuration", FAMILIES[name].config)
        config = config_class.from_pretrained(folder, local_files_only=True, **settings(name, form, dropout))
    _check_fits(config, form, name, name_or_folder)
    with _one_line(name_or_folder), _silence():
        model, report = model_class(name, form).from_pretrained(
            folder,
            config=config,
            dtype=torch.get_default_dtype(),
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_all_loaded(model, report, name_or_folder)
    return cast(nn.Module, model.train())


def image_form(name_or_folder: str | Path, name: str) -> tuple[int, int]:
    """Channels and side of the images that trained weights are for. Raises ValueError as `load_pretrained`."""
    folder = _folder_with((CONFIG,), name_or_folder)
    _check_type(folder, name, name_or_folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    side = config.get("image_size", 224)
    return int(config.get("num_channels", 3)), max(_pair(side))


def _check_kind(name: str, form: Form) -> None:
    if name not in FAMILIES:
        raise ValueError(f"no trained weights are read for the model {name!r}; choose from {', '.join(FAMILIES)}")
    if isinstance(form, ImageForm) != (name == "vit"):
        data, able = ("images", "vit") if isinstance(form, ImageForm) else ("texts", "bert, distilbert, gpt2")
        raise ValueError(f"{name} cannot take {data}; choose from {able}")
    if not isinstance(form, ImageForm) and form.task not in FAMILIES[name].classes:
        able = ", ".join(other for other in FAMILIES if form.task in FAMILIES[other].classes)
        raise ValueError(f"{name} cannot take texts with the task {form.task}; choose from {able}")


def folder_of(file: str, given: str | Path) -> Path:
    """The folder itself, or the one of the hub's cache, if it has the file. Raises ValueError, in one line."""
    return _folder_with((file,), given)


def _folder_with(files: tuple[str, ...], given: str | Path) -> Path:
    """The folder itself, or the one of the hub's cache, if it has one of the files."""
    folder, text = Path(given).expanduser(), str(given)
    if folder.is_file():
        raise ValueError(f"{text}: it is a file; {REMEDY}")
    if not folder.is_dir():
        if isinstance(given, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1:
            raise ValueError(f"{text}: there is no such folder; {REMEDY}")
        folder = _from_hub(text, [CONFIG, "model*.safetensors*"] if files == WEIGHTS else list(files))
    if not any((folder / file).is_file() for file in files):
        raise ValueError(f"{text}: it has no {files[0]}; {REMEDY}")
    return folder


def _from_hub(name: str, patterns: list[str]) -> Path:
    """Where the cache has it, after a download of such files if need be."""
    with leaving_no_trace():
        import huggingface_hub
        from huggingface_hub.constants import is_offline_mode
        from huggingface_hub.errors import HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except HFValidationError:
        raise ValueError(f"{name}: it is no folder, and no name of the hub, such as owner/model; {REMEDY}") from None
    except Exception as error:  # of the hub, of the network below it, and of the disk: they have no common class
        if is_offline_mode():
            why = "HF_HUB_OFFLINE forbids a download; unset it"
        else:
            why = f"it cannot be downloaded ({_first_line(error)}); look at the name and the network"
        raise ValueError(f"{name}: it is no folder, the hub's cache has no such model and {why}, or {REMEDY}") from None


def _check_type(folder: Path, name: str, given: str | Path) -> None:
    """Before the library is imported."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{given}: its {CONFIG} cannot be read ({_first_line(error)}); {REMEDY}") from None
    if found != name:
        instead = f"ask for the model {found}" if found in FAMILIES else f"choose from {', '.join(FAMILIES)}"
        raise ValueError(f"{given}: it is a model of the type {found!r}, and {name!r} is wanted; {instead}")


def _check_fits(config: Any, form: Form, name: str, given: str | Path) -> None:
    if isinstance(form, ImageForm):
        found = (config.num_channels, *_pair(config.image_size))
        wanted = (form.channels, form.height, form.width)
        if found != wanted:
            raise ValueError(
                f"{given}: it takes images {found} (channels, height, width), not {wanted}; give such images"
            )
        return
    if config.vocab_size < form.vocabulary_size:
        raise ValueError(
            f"{given}: its vocabulary has {config.vocab_size} tokens, and the texts' has {form.vocabulary_size}; cut "
            "the texts into tokens by the model's own tokenizer"
        )
    positions = getattr(config, FAMILIES[name].positions)
    if positions < form.length:
        raise ValueError(f"{given}: it takes texts of {positions} tokens, not of {form.length}; cut them off there")


def _pair(side: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    height, width = (side, side) if isinstance(side, int) else side
    return height, width


def _check_all_loaded(model: Any, report: dict[str, Any], given: str | Path) -> None:
    """All but the output layer, and what a task puts before it, must come from the file."""
    body = f"{model.base_model_prefix}."
    afresh = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    wrong = sorted(key for key in afresh if key.startswith(body) and not key.startswith(f"{body}pooler."))
    if wrong:
        raise ValueError(f"{given}: its weights lack {wrong[0]} in the shape that its {CONFIG} says; {REMEDY}")


@contextmanager
def _one_line(given: str | Path) -> Iterator[None]:
    """What the library raises becomes a ValueError of one line."""
    try:
        yield
    except Exception as error:  # a damaged file gives errors of many classes
        raise ValueError(f"{given}: it cannot be loaded ({_first_line(error)}); {REMEDY}") from error


@contextmanager
def _silence() -> Iterator[None]:
    """No report of what begins afresh, and no bar of progress. Both are as they were before at the end."""
    with leaving_no_trace():
        from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.FATAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
