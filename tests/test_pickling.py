"""What another process finds under its name goes by name, all else by value, and comes back as what it was."""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.util
import json
import pickle
import pkgutil
import posixpath
import random
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pytest
import torch

import torch_parallel
from torch_parallel import pickling
from torch_parallel.communicator import Communicator
from torch_parallel.launcher import NotPicklable, launch

ROOT = Path(__file__).parent.parent
LIMIT_S = 20.0

# ---- errors ----


def errors_of_the_package() -> list[type[BaseException]]:
    names = [each.name for each in pkgutil.walk_packages(torch_parallel.__path__, "torch_parallel.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith(("__main__", ".kernel", ".mpi"))]
    found = {
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, BaseException) and each.__module__.startswith("torch_parallel")
    }
    return sorted(found, key=lambda kind: (kind.__module__, kind.__name__))


MADE_OF: dict[str, tuple[Any, ...]] = {
    "NotMade": ("a table", KeyError("column")),
    "DamagedResults": ("runs.csv", "it has no header"),
    "WorkerFailure": ("rank 1 failed", 1),
    "_NothingStarted": ("the fork server died", 0),
    "NotFinite": ("the gradient is NaN", True),
    "SumNotFinite": ("the sum is NaN", True),
    "Diverged": ("the parameter weight", 3),
    "PeerIsOver": ([1, 2], True),
    "TransportError": ("rank 1 has raised an error", True, True),
}


@pytest.mark.parametrize("kind", errors_of_the_package(), ids=lambda kind: kind.__name__)
def test_errors_go_through_pickle_with_all_that_they_say(kind: type[BaseException]) -> None:
    error = kind(*MADE_OF.get(kind.__name__, ("what happened",)))
    error.add_note("a note")
    came = pickle.loads(pickle.dumps(error))
    assert (type(came), str(came), came.args) == (kind, str(error), error.args)
    assert vars(came) == vars(error)


# ---- what has a name ----


@pytest.mark.parametrize(
    "thing",
    [
        *(json.dumps, posixpath.join, collections.OrderedDict, random.Random),  # Python's own
        *(numpy.ndarray, numpy.random.RandomState, torch.nn.Linear, torch.Tensor.add_),  # packages, with parts in C
        *(torch._C._nn.gelu, torch.nn.functional.relu, torch.float32, torch.Size),
        *(torch_parallel.launcher.launch, Communicator, cloudpickle.dumps, pytest.raises),
    ],
)
def test_what_workers_find_goes_by_name(thing: Any) -> None:
    data = pickling.dumps(thing)
    assert len(data) < 120
    assert pickle.loads(data) is thing


@pytest.mark.parametrize("module", [json, posixpath, numpy, torch.nn, torch_parallel, torch.backends.cudnn, torch.ops])
def test_modules_that_workers_find_go_by_name(module: types.ModuleType) -> None:
    assert pickling.loads(pickling.dumps(module)) is module


# ---- what has none ----

SOURCE = """
import functools
import threading
from typing import TypeVar

T = TypeVar("T")
lock = threading.Lock()
scale = 3

class Base:
    made = 0
    def __init__(self, value):
        self.value = value
        type(self).made += 1

class Item(Base):
    def doubled(self):
        return scaled(self.value) + super().__len__() if False else scaled(self.value)
    def __eq__(self, other):
        return type(other) is type(self) and other.value == self.value
    __hash__ = None

def scaled(x):
    return x * scale

@functools.lru_cache(maxsize=5)
def remembered(x):
    return x + scale

def work(communicator, x):
    return Item(x + communicator.rank)
"""


def loaded_by_path(folder: Path) -> Any:
    """Not in sys.modules, as torch.hub loads its files."""
    (folder / "by_path.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("by_path", folder / "by_path.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loaded_by_path_and_registered(folder: Path) -> Any:
    module = loaded_by_path(folder)
    sys.modules["by_path"] = module
    return module


def of_a_folder_no_longer_searched(folder: Path) -> Any:
    (folder / "unsearched.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("unsearched")
    finally:
        sys.path.remove(str(folder))


def of_a_folder_that_moved(folder: Path) -> Any:
    (folder / "before").mkdir()
    (folder / "before" / "moved.py").write_text(SOURCE)
    sys.path.insert(0, str(folder / "before"))
    module = importlib.import_module("moved")
    (folder / "before").rename(folder / "after")
    return module


def of_a_package_no_longer_searched(folder: Path) -> Any:
    (folder / "packed" / "inner").mkdir(parents=True)
    for name in ("packed/__init__.py", "packed/inner/__init__.py"):
        (folder / name).write_text("")
    (folder / "packed/inner/last.py").write_text(SOURCE + "\nimport packed.inner\n")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("packed.inner.last")
    finally:
        sys.path.remove(str(folder))


def hidden_by_another_of_its_name(folder: Path) -> Any:
    """Workers would find the second one, and would not know."""
    for name in ("first", "second"):
        (folder / name).mkdir()
    (folder / "first" / "twice.py").write_text(SOURCE)
    (folder / "second" / "twice.py").write_text(SOURCE.replace("scale = 3", "scale = 1000"))
    sys.path.insert(0, str(folder / "first"))
    module = importlib.import_module("twice")
    sys.path[0] = str(folder / "second")
    return module


def made_at_run_time(folder: Path) -> Any:
    module = types.ModuleType("made_at_run_time")
    exec(SOURCE, vars(module))
    sys.modules["made_at_run_time"] = module
    return module


WAYS = [
    loaded_by_path,
    loaded_by_path_and_registered,
    of_a_folder_no_longer_searched,
    of_a_folder_that_moved,
    of_a_package_no_longer_searched,
    hidden_by_another_of_its_name,
    made_at_run_time,
]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def unfound(request: pytest.FixtureRequest, tmp_path: Path, started: None) -> Iterator[Any]:
    modules, path = set(sys.modules), list(sys.path)
    yield request.param(tmp_path)
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


@pytest.mark.exhaustive
def test_what_workers_do_not_find_goes_by_value_and_comes_back(unfound: Any) -> None:
    """Class, function, cached one, a whole module. The caller's class is what it was, and one on all ranks."""

    def work(communicator: Communicator, item: Any) -> list[Any]:
        mine = unfound.Item(communicator.rank)
        communicator.report(mine)
        gathered = communicator.gather(mine)
        again = pickle.loads(pickle.dumps(mine)) if unfound.__name__ in sys.modules else mine
        return [
            item.doubled(),
            unfound.remembered(4),
            mine,
            gathered,
            type(again) is type(mine),
            type(item) is type(mine),
        ]

    messages: list[Any] = []
    item = unfound.Item(5)
    results = launch(work, 2, item, deadline_s=LIMIT_S, on_message=lambda rank, message: messages.append(message))
    zero, one = unfound.Item(0), unfound.Item(1)
    assert results == [[15, 7, zero, [zero, one], True, True], [15, 7, one, None, True, True]]
    assert sorted(message.value for message in messages) == [0, 1]
    assert all(type(message) is unfound.Item for message in messages)
    assert unfound.Item.made == 3  # here: the workers' counts are their own
    assert launch(unfound.work, 2, 3, deadline_s=LIMIT_S) == [unfound.Item(3), unfound.Item(4)]


def test_dumping_leaves_cloudpickle_as_it_was(tmp_path: Path) -> None:
    """In any thread: another one may be pickling by its own rules."""
    module = loaded_by_path_and_registered(tmp_path)
    try:
        before = cloudpickle.list_registry_pickle_by_value()
        with ThreadPoolExecutor(4) as pool:
            dumped = list(pool.map(pickling.dumps, [[module.Item(1), module.work]] * 40))
        assert cloudpickle.list_registry_pickle_by_value() == before
        assert all(b"by_path" in data and len(data) > 500 for data in dumped)
    finally:
        del sys.modules["by_path"]


def test_only_what_the_callers_other_finders_find_is_unfound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has no finder that the caller has set up."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any, target: Any = None) -> Any:
            return importlib.util.spec_from_file_location(name, tmp_path / "found.py") if name == "found" else None

    (tmp_path / "found.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "found", raising=False)
    module = importlib.import_module("found")
    assert not pickling.found_by_name("found", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pickling.found_by_name("found", {})
    assert pickling.loads(pickling.dumps(module.Item)) is module.Item


def test_a_lock_is_named_whose_module_is_found(started: None) -> None:
    with pytest.raises(NotPicklable, match=r"the argument .* cannot be sent"):
        launch(lambda communicator, lock: None, 1, __import__("threading").Lock())


# ---- scripts ----


@pytest.mark.exhaustive
def test_classes_of_a_script_travel_between_all_its_processes(tmp_path: Path) -> None:
    """Enums, data classes, models, exceptions; to processes that workers start, and between ranks."""
    text = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        import enum, multiprocessing, pickle
        from dataclasses import dataclass
        import torch
        from torch_parallel import fork_server, launch
        fork_server.PRELOAD[:] = ["torch_parallel.worker"]

        @dataclass(frozen=True)
        class Score:
            value: float

        class Colour(enum.Enum):
            RED = 1

        class Model(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x) + OFFSET

        OFFSET = 10

        class Mine(Exception):
            pass

        def child(queue, score):
            queue.put((Score(score.value + 1), Colour.RED))

        def work(communicator):
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue, Score(communicator.rank)))
            process.start()
            score, colour = queue.get(timeout=60)
            process.join()
            assert colour is Colour.RED and type(score) is Score
            model = Model(1, 1)
            torch.nn.init.ones_(model.weight)
            torch.nn.init.zeros_(model.bias)
            copied = pickle.loads(pickle.dumps(model))
            assert type(copied) is Model
            return communicator.gather([score, Mine("x")]), Colour.RED, copied

        (gathered, colour, model), (nothing, _, _) = launch(work, 2, deadline_s=60)
        assert gathered[1][0] == Score(2) and type(gathered[0][1]) is Mine and nothing is None
        assert colour is Colour.RED and type(model) is Model and model(torch.ones(1)).item() == 11
        print("done")
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(text))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_model_of_torch_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: None) -> None:
    """Its hubconf is loaded by its path, and imports from a folder that is searched only meanwhile."""
    (tmp_path / "hubconf.py").write_text("from nets.small import Small\ndef small():\n    return Small(2, 1)\n")
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "small.py").write_text(
        "import torch\nclass Small(torch.nn.Linear):\n    def width(self):\n        return self.in_features\n"
    )
    make: Callable[[], Any] = functools.partial(torch.hub.load, str(tmp_path), "small", source="local")
    model = make()
    try:
        results = launch(lambda communicator, its: (its.width(), its), 2, model, deadline_s=LIMIT_S)
        assert [width for width, _ in results] == [2, 2]
        assert all(type(its) is type(model) and torch.equal(its.weight, model.weight) for _, its in results)
    finally:
        for name in ("nets", "nets.small"):
            sys.modules.pop(name, None)


def test_the_package_itself_is_found_wherever_its_folder_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own folder taken off the search path: the fork server has it all the same."""
    root = str(Path(pickling.__file__).parents[1])
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry or ".").resolve() != Path(root)])
    assert pickling.found_by_name("torch_parallel.communicator", {})

    def work(communicator: Communicator) -> int:
        return communicator.world_size

    assert launch(work, 2, deadline_s=30.0) == [2, 2]
