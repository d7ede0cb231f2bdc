"""A workload of the user's own, by the place of a function: `mine.py:make`, or `package.module:make`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.samples import Samples
from torch_parallel.workloads.task import Task
from torch_parallel.workloads.workload import Workload

WANTED = "make_model, task and samples are wanted: a function, a Task, and Samples"


def load_own(place: str) -> Workload:
    """What the function at `place` returns: a Workload, or its first three fields.

    Raises DataError, one line, where there is no such file or function, and for what it returns if that is none. What
    the user's own code raises goes through as it is.
    """
    where, colon, name = place.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise DataError(f"--workload {place}: give a file and a function in it, as in mine.py:make")
    module = _from_file(where, place) if where.endswith(".py") else _by_name(where, place)
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(f"--workload {place}: there is no function {name} in {where}")
    return as_workload(function(), f"--workload {place}: it returned", name)


def as_workload(given: Any, who: str, name: str = "model") -> Workload:
    """A Workload, or a tuple of its fields. Raises DataError that begins with `who`."""
    if isinstance(given, tuple) and len(given) == 3:
        make_model, task, samples = given
        given = Workload(make_model, task, samples, name)
    if not isinstance(given, Workload):
        raise DataError(f"{who} {_article(given)}; {WANTED}")
    if isinstance(given.make_model, nn.Module) or not isinstance(given.make_model, Callable):  # type: ignore[arg-type]
        kind = "a model itself" if isinstance(given.make_model, nn.Module) else _article(given.make_model)
        raise DataError(f"{who} {kind} for make_model; a function that makes the model is wanted: each worker calls it")
    if not isinstance(given.task, Task):
        raise DataError(f"{who} {_article(given.task)} for the task; a torch_parallel.Task is wanted")
    if type(given.task).loss_sum is Task.loss_sum:
        raise DataError(f"{who} a {type(given.task).__name__} without a loss: give it a method loss_sum(output, batch)")
    if not isinstance(given.samples, Samples):
        raise DataError(f"{who} {_article(given.samples)} for the samples; torch_parallel.Samples are wanted")
    given.samples.require_some()
    return given


def _article(thing: Any) -> str:
    return "None" if thing is None else f"something of type {type(thing).__name__}"


def _from_file(path: str, place: str) -> ModuleType:
    """The file as a module, with its folder in the search path, as Python does with a script."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise DataError(f"--workload {place}: there is no file {file}")
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    known = sys.modules.get(file.stem)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    name = file.stem if known is None and file.stem.isidentifier() else f"workload_{abs(hash(str(file)))}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _by_name(name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # one that the module itself imports
        raise DataError(f"--workload {place}: there is no module {name}; a file ends in .py") from None
