"""What travels between the processes of a run: by name where the other side finds the same, by value where it does not.

`pickle` sends a function or a class as the name of its module and its own. A worker cannot import a notebook's cell, a
script, a file that was loaded by its path, or a folder that is no longer searched. So before a name is sent, we look
whether a worker would find the same file under it; where not, the function or class itself is sent, by cloudpickle.

In a worker, what came by value stands in its module as at home (a made one, if need be), so that plain `pickle` works
too, and processes that the worker starts by multiprocessing get it by value again.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import io
import os
import pickle
import site
import socket
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import cloudpickle

_SCRIPTS = ("__main__", "__mp_main__")
_PACKAGE = __name__.partition(".")[0]
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_EVERYWHERE = (
    importlib.machinery.BuiltinImporter,
    importlib.machinery.FrozenImporter,
    importlib.machinery.PathFinder,
)
"""Finders of any interpreter. Others are those of installed packages (see below), or the caller's own."""
_INSTALLED = {
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(site.getsitepackages() if hasattr(site, "getsitepackages") else ()),
    *((site.getusersitepackages(),) if hasattr(site, "getusersitepackages") else ()),
}
_STAYS_AT_HOME = (type(threading.Lock()), type(threading.RLock()), threading.local, io.IOBase, socket.socket)
"""What a module may hold that cannot be sent. A module that goes by value goes without it."""
_NOT_SENT = {"__builtins__", "__loader__", "__spec__", "__cached__", "__file__", "__path__", "__package__"}

_registering = threading.RLock()
_known: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that this process has sent or received by value: they are not filled again when they come back."""
_search_path: list[str] | None = None
"""Where those we send to look for modules; None for `sys.path`."""
_in_worker = False


def dumps(thing: Any) -> bytes:
    """Raises whatever `pickle` raises for what cannot be sent."""
    file = io.BytesIO()
    _Pickler(file).dump(thing)
    return file.getvalue()


loads = pickle.loads
"""Of what `dumps` made. Raises whatever `pickle` raises."""


def work_below(search_path: list[str] | None) -> None:
    """In a worker, before anything is loaded: what comes by value gets a place, for processes that it starts as well.

    `search_path` is what the launcher and the other workers search for modules.
    """
    global _in_worker, _search_path
    _in_worker, _search_path = True, search_path
    ForkingPickler.reducer_override = _reduce_for_child  # type: ignore[method-assign]


TOLD = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
"""Types whose tensors torch pickles and unpickles. It cannot unpickle those of newer ones: they travel as bytes."""


def _as_bytes(thing: Any) -> tuple[Any, str, list[int]] | None:
    """The bytes of a tensor of a newer type, the type's name, and the shape; None for all else."""
    torch = sys.modules.get("torch")
    if torch is None or type(thing) is not torch.Tensor or thing.device.type != "cpu" or thing.requires_grad:
        return None
    name = str(thing.dtype).removeprefix("torch.")
    if name in TOLD or thing.layout != torch.strided or thing.is_quantized:
        return None
    elements = torch.empty(thing.numel(), dtype=thing.dtype, device="cpu")
    elements.view(thing.shape).copy_(thing)
    return elements.view(torch.uint8), name, list(thing.shape)


def _from_bytes(elements: Any, name: str, shape: list[int]) -> Any:
    return elements.view(getattr(sys.modules["torch"], name)).view(shape)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Also sends modules, those of a class of their own too, such as torch.backends.cudnn."""

    def __init__(self, file: io.BytesIO, place: Callable[..., Any] | None = None) -> None:
        super().__init__(file)
        self._place = place or _placed
        self._found: dict[str, bool] = {}

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, types.ModuleType):
            return self._reduced_module(thing)
        if (untold := _as_bytes(thing)) is not None:
            return _from_bytes, untold
        if isinstance(thing, type | types.FunctionType | TypeVar | functools._lru_cache_wrapper):
            module = sys.modules.get(getattr(thing, "__module__", None) or "")
            if module is None:
                return self._with_place(thing, None, self._reduced(thing))
            if not found_by_name(module.__name__, self._found):
                return self._with_place(thing, module, self._reduced_by_value(thing, module))
            return self._with_place(thing, None, super().reducer_override(thing))
        return super().reducer_override(thing)

    def _with_place(self, thing: Any, module: types.ModuleType | None, reduced: Any) -> Any:
        """How it is made again, and that it then belongs into its module; a class that is known there stays."""
        if not isinstance(reduced, tuple):
            return reduced
        make, arguments, *rest = reduced
        if isinstance(thing, type) and len(rest) == 4 and rest[3] is not None:
            _known.add(thing)
            rest[0], rest[3] = (rest[3], rest[0]), _filled
        name = getattr(thing, "__qualname__", thing.__name__)
        if module is not None and getattr(module, name, None) is thing:
            return self._place, (module.__name__, name, make, arguments), *rest
        return make, arguments, *rest

    def _reduced(self, thing: Any) -> Any:
        if isinstance(thing, functools._lru_cache_wrapper):  # without what it remembers
            return _cached, (thing.__wrapped__, thing.cache_parameters())
        if isinstance(thing, TypeVar):
            return cloudpickle.Pickler.dispatch_table[TypeVar](thing)
        return super().reducer_override(thing)

    def _reduced_by_value(self, thing: Any, module: types.ModuleType) -> Any:
        """What cloudpickle makes of it, told for this moment that its module is not to be named."""
        if module.__name__ == "__main__" or sys.modules.get(module.__name__) is not module:
            return self._reduced(thing)
        with _registering:
            if module.__name__ in cloudpickle.list_registry_pickle_by_value():
                return self._reduced(thing)
            cloudpickle.register_pickle_by_value(module)
            try:
                return self._reduced(thing)
            finally:
                cloudpickle.unregister_pickle_by_value(module)

    def _reduced_module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        if name in _SCRIPTS or (sys.modules.get(name) is module and found_by_name(name, self._found)):
            return importlib.import_module, (name,)
        parent, _, last = name.rpartition(".")
        if parent and found_by_name(parent, self._found) and getattr(sys.modules[parent], last, None) is module:
            return getattr, (sys.modules[parent], last)
        content = {
            key: value
            for key, value in vars(module).items()
            if key not in _NOT_SENT and not isinstance(value, _STAYS_AT_HOME)
        }
        return _made_module, (name, self._place is _placed_below), content, None, None, _with_content


def found_by_name(name: str, known: dict[str, bool]) -> bool:
    """Whether another process of the run finds the module `name` of this process under its name.

    `known` remembers the answers, for as long as nothing changes.
    """
    if name not in known:
        known[name] = _is_found(name, known)
    return known[name]


def _is_found(name: str, known: dict[str, bool]) -> bool:
    module = sys.modules.get(name)
    if name in _SCRIPTS or module is None:
        return False
    if name in sys.builtin_module_names or name.partition(".")[0] == _PACKAGE:  # which each process of the run has
        return True
    parent = name.rpartition(".")[0]
    if parent and not found_by_name(parent, known):
        return False
    path = sys.path if _search_path is None else _search_path
    file = getattr(module, "__file__", None)
    if file is not None:
        installed = any(file.startswith(f"{folder}/") for folder in _INSTALLED.intersection(path))
        if installed or file.endswith(_EXTENSIONS):
            return True
    elif parent:  # made by the package that it is in
        return True
    spec = _spec(name, getattr(sys.modules[parent], "__path__", []) if parent else path, is_top=not parent)
    if spec is None:
        return False
    if file is None:  # a folder without __init__.py is found in all places at once
        return spec.submodule_search_locations is not None or spec.origin in ("built-in", "frozen")
    return spec.origin == "frozen" or _is_same_file(spec.origin, file)


def _spec(name: str, path: list[str], is_top: bool) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is importlib.machinery.PathFinder:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
        elif finder in _EVERYWHERE or _is_of_installed_package(finder):
            spec = finder.find_spec(name, None if is_top else path)
        else:
            continue
        if spec is not None:
            return spec
    return None


def _is_of_installed_package(finder: Any) -> bool:
    """Such as those by which packages are installed from where they are developed: any interpreter here has them."""
    kind = finder if isinstance(finder, type) else type(finder)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return file.rpartition("/")[0] in _INSTALLED


def _is_same_file(found: str | None, ours: str) -> bool:
    if found is None:
        return False
    return found == ours or os.path.realpath(found) == os.path.realpath(ours)


def _placed(module_name: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What was made by value, in a worker also to be found in its module."""
    thing = make(*arguments)
    if _in_worker:
        module = _module_to_fill(module_name)
        if not hasattr(module, name):
            setattr(module, name, thing)
    return thing


def _placed_below(module_name: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The same in a process that a worker has started."""
    if not _in_worker:
        work_below(_search_path)
    return _placed(module_name, name, make, arguments)


def _module_to_fill(name: str) -> types.ModuleType:
    """The worker's own, or a made one, with those that it is in."""
    parent, _, last = name.rpartition(".")
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
        if parent:
            setattr(_module_to_fill(parent), last, sys.modules[name])
    return sys.modules[name]


def _filled(kind: type, setter_and_state: tuple[Callable[..., Any], Any]) -> None:
    """A class that this process knew before stays as it is."""
    if kind not in _known:
        _known.add(kind)
        setter, state = setter_and_state
        setter(kind, state)


def _made_module(name: str, below: bool) -> types.ModuleType:
    if below and not _in_worker:
        work_below(_search_path)
    return _module_to_fill(name) if _in_worker else types.ModuleType(name)


def _with_content(module: types.ModuleType, content: dict[str, Any]) -> None:
    for name, value in content.items():
        vars(module).setdefault(name, value)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_for_child(pickler: Any, thing: Any) -> Any:
    """`reducer_override` of multiprocessing's pickler in a worker."""
    ours = vars(pickler).setdefault("_torch_parallel", None) or _Pickler(io.BytesIO(), _placed_below)
    pickler._torch_parallel = ours
    reduced = ours.reducer_override(thing)
    if reduced is not NotImplemented or type(thing) in pickler.dispatch_table:
        return reduced
    reduce = cloudpickle.Pickler.dispatch_table.get(type(thing))  # for the parts of functions
    return NotImplemented if reduce is None else reduce(thing)
