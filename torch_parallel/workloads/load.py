"""A workload by names: a model, its size, and data that it can take.

Models for images get a `Dataset`. Models for text get texts, and what they are trained to do follows from the two: a
table of texts with a category each is classified; of running text, gpt2 predicts what comes next, and bert and
distilbert find hidden tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from torch_parallel.workloads.data import load_dataset, search_folders
from torch_parallel.workloads.dataset import Dataset
from torch_parallel.workloads.errors import DataError, DataNotFound
from torch_parallel.workloads.forms import Form, ImageForm, TextForm
from torch_parallel.workloads.models import IMAGES, MODELS, build_model, image_side
from torch_parallel.workloads.models.pretrained import folder_of, image_form, load_pretrained
from torch_parallel.workloads.own import load_own
from torch_parallel.workloads.samples import Samples
from torch_parallel.workloads.synthetic import is_synthetic, synthetic_text
from torch_parallel.workloads.task import MaskedTokens, NextToken, Task, TextClassification
from torch_parallel.workloads.text import TextData, load_csv, load_masked, load_text
from torch_parallel.workloads.workload import Workload

CATEGORIES = ("bbc_text", "ag_news")
RUNNING_TEXTS = ("tinyshakespeare", "python_docs")
LENGTH = {"gpt2": 256}
RENAMED = {"labels": "targets"}
DEFAULT_LENGTH = 128
"""Tokens of a text, for models that are not in LENGTH."""
VOCABULARY = {"gpt2": 50_257}
DEFAULT_VOCABULARY = 30_522
BYTES = 256
"""Random tokens are as many as those of the published models, for those that are not in VOCABULARY, bert's."""


@dataclass(frozen=True)
class Choice:
    """What a run asks for; the fields are the flags of the command line."""

    model: str = "cnn"
    dataset: str | None = None
    data_dir: str | None = None
    train_size: int | None = None
    test_size: int | None = None
    seed: int = 0
    model_size: str | None = None
    pretrained: str | None = None
    length: int | None = None
    workload: str | None = None


def load_workload(choice: Choice) -> tuple[Workload, str]:
    """What is trained, and one line that says which data it is and where it came from.

    Raises DataError, in one line: see `load_dataset`, `load_csv`, `load_text`, `load_masked`, `build_model`,
    `load_pretrained` and `load_own`.
    """
    sizes = choice.train_size, choice.seed, choice.test_size
    if choice.workload is not None:
        own = load_own(choice.workload)
        return own.subset(*sizes), f"{own.samples.name} from {own.samples.source}"
    if IMAGES in MODELS[choice.model].takes:
        dataset, line = load_dataset(choice.dataset, choice.data_dir, *sizes, side=_wanted(choice)[1])
        return of_images(dataset, choice), line
    if is_synthetic(choice.dataset):
        made = _synthetic(choice)
        return _of_text(made, choice), f"{made.name} from {made.source}"
    data = _text(choice)
    workload = _of_text(data, choice)
    line = f"{data.name} from {data.source}"
    for size, part in ((choice.train_size, "train"), (choice.test_size, "test")):
        if size is not None:
            line += f"; {size} of {len(getattr(data, part)['tokens'])} {part}ing samples"
    return workload.subset(*sizes), line


def of_images(dataset: Dataset, choice: Choice) -> Workload:
    """A model by its name for a data set of images. Raises DataError for other samples, and for what does not fit."""
    channels, height, width = dataset.image_shape
    wanted, side = _wanted(choice)
    if side is not None:
        height = width = side
    grey = channels == 1 and wanted is not None
    form = ImageForm(wanted if grey and wanted else channels, height, width, dataset.class_count)
    task = replace(dataset.task, side=side, repeated=form.channels if grey else 1)
    return Workload(_maker(choice, form), task, dataset.samples, _name(choice))


def _wanted(choice: Choice) -> tuple[int | None, int | None]:
    """Channels and side of images, where the model says them."""
    with _in_one_line(choice):
        if choice.pretrained is not None:
            return image_form(choice.pretrained, choice.model)
        return None, image_side(choice.model, choice.model_size)


def _of_text(data: TextData, choice: Choice) -> Workload:
    return Workload(_maker(choice, _form(data)), _task(data), _samples(data), _name(choice))


def _maker(choice: Choice, form: Form) -> partial[torch.nn.Module]:
    """The function that makes the model, which has been tried: without memory, or with the weights that it begins with.

    What is drawn meanwhile is drawn from a generator of its own.
    """
    if choice.pretrained is not None:
        make_model = partial(load_pretrained, choice.pretrained, form, choice.model)
    else:
        make_model = partial(build_model, choice.model, form, size=choice.model_size)
    with _in_one_line(choice), torch.random.fork_rng(devices=[]):
        if choice.pretrained is not None:
            make_model()
        else:
            with torch.device("meta"):
                make_model()
    return make_model


def _name(choice: Choice) -> str:
    more = choice.model_size or ("pretrained" if choice.pretrained else "")
    return f"{choice.model}_{more}" if more else choice.model


@contextmanager
def _in_one_line(choice: Choice) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        size = "" if choice.model_size is None else f" --model_size {choice.model_size}"
        raise DataError(f"--model {choice.model}{size}: {error}") from None


def _text(choice: Choice) -> TextData:
    """The texts, told by name, or by what the file is: a table ends in .csv or .tsv, or is a folder with train.csv."""
    folders, name = search_folders(choice.data_dir), choice.dataset or "python_docs"
    tokenizer = None
    with _in_one_line(choice):
        if choice.pretrained is not None:
            tokenizer = str(folder_of("tokenizer.json", choice.pretrained))
        length = _length(choice)
        try:
            if name in CATEGORIES or (name not in RUNNING_TEXTS and _is_table(name, folders)):
                return load_csv(name, folders, length, choice.seed, tokenizer=tokenizer)
            _refuse_a_folder(name, choice.model, folders)
            load = load_text if "next_token" in MODELS[choice.model].takes else load_masked
            return load(name, folders, length, choice.seed, tokenizer=tokenizer)
        except DataNotFound as error:
            known = ", ".join((*CATEGORIES, *RUNNING_TEXTS))
            raise DataError(f"{error}; {choice.model} takes {known}, or the path of a .csv or .txt file") from None


def _synthetic(choice: Choice) -> TextData:
    """Tokens as many as the published model knows, or bytes for the small ones of gpt2. Raises DataError."""
    if choice.dataset != "synthetic":
        found = f"--dataset {choice.dataset}: it says the shape of images, and {choice.model} takes texts"
        raise DataError(f"{found}; give --dataset synthetic, and --length")
    task = "next_token" if "next_token" in MODELS[choice.model].takes else "classification"
    predicts_bytes = task == "next_token" and choice.model_size in ("tiny", "small")
    vocabulary_size = BYTES if predicts_bytes else VOCABULARY.get(choice.model, DEFAULT_VOCABULARY)
    length = _length(choice)
    return synthetic_text(task, length, vocabulary_size, choice.train_size, choice.test_size)


def length_of(model: str, length: int | None) -> int | None:
    """Tokens of a text, as given or by default; None for models of images."""
    if model not in MODELS or IMAGES in MODELS[model].takes:
        return None
    return length or LENGTH.get(model, DEFAULT_LENGTH)


def _length(choice: Choice) -> int:
    return choice.length or LENGTH.get(choice.model, DEFAULT_LENGTH)


def _is_table(name: str, folders: Sequence[Path]) -> bool:
    if name.lower().endswith((".csv", ".tsv")):
        return True
    places = [Path(name).expanduser(), *(folder / name for folder in folders)]
    return any((place / "train.csv").is_file() for place in places)


def _refuse_a_folder(name: str, model: str, folders: Sequence[Path]) -> None:
    """Raises DataError where it is a folder, of images maybe, and no name of ours."""
    if name in RUNNING_TEXTS:
        return
    places = [Path(name).expanduser(), *(folder / name for folder in folders)]
    place = next((each for each in places if each.exists()), None)
    if place is not None and place.is_dir():
        raise DataError(
            f"--dataset {name}: {place} is a folder, and {model} takes texts: a .csv or .txt file, or a folder with "
            "train.csv; for images take a model of images, such as --model resnet50"
        )


def _form(data: TextData) -> TextForm:
    return TextForm(data.vocabulary_size, data.length, len(data.class_names), data.task)


def _task(data: TextData) -> Task:
    if data.task == "classification":
        return TextClassification(len(data.class_names))
    return NextToken(data.vocabulary_size) if data.task == "next_token" else MaskedTokens(data.vocabulary_size)


def _samples(data: TextData) -> Samples:
    """A class is a target."""
    train, test = ({RENAMED.get(name, name): each for name, each in part.items()} for part in (data.train, data.test))
    return Samples(data.name, train, test, data.source)
