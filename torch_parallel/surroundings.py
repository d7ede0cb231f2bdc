"""What workers see of their caller as it is now: environment, folders, limits, and defaults of Python and torch.

The fork server has those of its own start. So each launch looks at the caller's and sends them along, and a worker sets
what differs before it touches anything of the user's. A setting that this version of torch does not have, or that it
refuses to tell, is left alone.
"""

from __future__ import annotations

import contextlib
import locale
import multiprocessing
import os
import resource
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.utils._device
import torch.utils.deterministic

from torch_parallel import huge_pages, pickling

_FLAGS = (
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.benchmark_limit", "cudnn.deterministic", "cudnn.allow_tf32"),
    *("cuda.matmul.allow_tf32", "cuda.matmul.allow_fp16_reduced_precision_reduction"),
    *("cuda.matmul.allow_bf16_reduced_precision_reduction", "cuda.matmul.allow_fp16_accumulation"),
    *("mkldnn.enabled", "mkldnn.deterministic", "mkldnn.allow_tf32", "opt_einsum.enabled", "opt_einsum.strategy"),
    # after the older names of the same, which set them too
    *("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision", "cudnn.fp32_precision"),
    *("mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision"),
    *("mkldnn.fp32_precision", "fp32_precision"),
)
"""Attributes below torch.backends."""
_LIMITS = tuple(getattr(resource, f"RLIMIT_{name}") for name in ("NOFILE", "CORE", "STACK", "AS", "DATA"))

Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def _flag(name: str) -> Setting:
    owner, _, attribute = f"backends.{name}".rpartition(".")
    read = partial(attrgetter(f"backends.{name}"), torch)
    return read, lambda value: setattr(attrgetter(owner)(torch), attribute, value)


def _each(setter: Callable[..., object]) -> Callable[[tuple[Any, ...]], object]:
    return lambda values: setter(*values)


def _settings() -> dict[str, Setting]:
    """How each default is read and set, in the order in which they must be set."""
    sdp = torch.backends.cuda
    settings: dict[str, Setting] = {
        "start method": (
            partial(multiprocessing.get_start_method, allow_none=True),
            partial(multiprocessing.set_start_method, force=True),
        ),
        "sharing strategy": (
            torch.multiprocessing.get_sharing_strategy,
            torch.multiprocessing.set_sharing_strategy,
        ),
        "numpy errors": (numpy.geterr, lambda handling: numpy.seterr(**handling)),
        "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
        "digits limit": (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
        "locale": (partial(locale.setlocale, locale.LC_ALL, None), partial(locale.setlocale, locale.LC_ALL)),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (lambda: torch.utils._device.CURRENT_DEVICE, torch.set_default_device),
        "deterministic": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
        ),
        "uninitialised memory": (
            partial(attrgetter("utils.deterministic.fill_uninitialized_memory"), torch),
            partial(setattr, torch.utils.deterministic, "fill_uninitialized_memory"),
        ),
        "anomaly": (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            _each(torch.autograd.set_detect_anomaly),
        ),
        "warn always": (torch.is_warn_always_enabled, torch.set_warn_always),
        "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
        "flash": (sdp.flash_sdp_enabled, sdp.enable_flash_sdp),
        "memory efficient": (sdp.mem_efficient_sdp_enabled, sdp.enable_mem_efficient_sdp),
        "math": (sdp.math_sdp_enabled, sdp.enable_math_sdp),
        "cudnn attention": (sdp.cudnn_sdp_enabled, sdp.enable_cudnn_sdp),
    }
    return settings | {name: _flag(name) for name in _FLAGS}


def _read(setting: Setting) -> tuple[Any, ...]:
    """The value, or nothing where it is not told."""
    with contextlib.suppress(Exception):
        return (setting[0](),)
    return ()


_SETTINGS = _settings()
_noted_settings: dict[str, Any] | None = None
_noted_filters: dict[bytes, Any] = {}
_noted_environment: dict[bytes, bytes] | None = None
"""Settings, filters of warnings and variables that the fork server has, in every worker that it has forked."""


def _all_settings() -> dict[str, Any]:
    read = {name: _read(setting) for name, setting in _SETTINGS.items()}
    return {name: value[0] for name, value in read.items() if value}


def note() -> None:
    """Called where nothing will change until a worker is forked, which then need not read each setting and variable,
    nor unpickle, and so compile, each filter of warnings."""
    global _noted_settings, _noted_environment
    _noted_settings, _noted_environment = _all_settings(), dict(os.environb)
    _noted_filters.update(_pickled_filters())


@dataclass(frozen=True)
class Surroundings:
    """Of one process at one moment."""

    environment: dict[bytes, bytes]
    folder: str | None
    """None where it has been removed."""
    path: list[str]
    arguments: list[str]
    umask: int | None
    processors: set[int] | None
    limits: list[tuple[int, int]]
    """Soft limits of the system, by their numbers."""
    warning_filters: list[bytes]
    """Each pickled by itself."""
    settings: dict[str, Any]

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process. Nothing is changed by looking."""
        return cls(
            environment=dict(os.environb),
            folder=_folder(),
            path=[entry for entry in sys.path if isinstance(entry, str)],
            arguments=list(sys.argv),
            umask=_umask(),
            processors=os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
            limits=[(limit, resource.getrlimit(limit)[0]) for limit in _LIMITS],
            warning_filters=list(_pickled_filters()),
            settings=_all_settings(),
        )

    def apply(self) -> None:
        """Makes this process, a worker before its first work, see the same."""
        self._set_environment()
        if self.folder is not None:
            os.chdir(self.folder)
        sys.path[:] = self.path
        pickling.work_below(self.path)
        for folder in self.path:  # one that has been made since the server looked for it
            if sys.path_importer_cache.get(folder, folder) is None:
                del sys.path_importer_cache[folder]
        sys.argv[:] = self.arguments
        if self.umask is not None:
            os.umask(self.umask)
        if self.processors is not None and self.processors != os.sched_getaffinity(0):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.processors)
        for limit, soft in self.limits:
            now, hard = resource.getrlimit(limit)
            if now != soft:
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(limit, (soft, hard))
        if self.settings != _noted_settings:
            self._set_settings()
        _filter_warnings([_noted_filters.get(each) or pickling.loads(each) for each in self.warning_filters])

    def _set_settings(self) -> None:
        """One after the other, since some change others."""
        for name, value in self.settings.items():
            if _read(_SETTINGS[name]) != (value,):
                with contextlib.suppress(Exception):
                    _SETTINGS[name][1](value)

    def _set_environment(self) -> None:
        now = dict(os.environb) if _noted_environment is None else _noted_environment
        for name in now.keys() - self.environment.keys():
            del os.environb[name]
        for name, value in self.environment.items() - now.items():
            os.environb[name] = value
        huge_pages.ask_for_them()


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _umask() -> int | None:
    """Read where that does not mean to change it, which other threads would notice; spawned workers inherit it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("Umask:")]
    return int(found[0], 8) if found else None


def _pickled_filters() -> dict[bytes, Any]:
    """Those that can be sent, each by its pickle and in their order: a category may be a class of the user's."""
    pickled = {}
    for each in warnings.filters:
        with contextlib.suppress(Exception):
            pickled[pickling.dumps(each)] = each
    return pickled


def _filter_warnings(filters: list[Any]) -> None:
    """These come first, before those of modules that only this process has imported."""
    own = [each for each in warnings.filters if each not in filters]
    warnings.resetwarnings()
    warnings.filters[:] = filters + own  # type: ignore[index]
