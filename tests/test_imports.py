"""Imports go one way, and `import torch_parallel` alone is instant."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_parallel"

# Who belongs to which layer: top-level modules and packages by name. What does not exist yet may have its place.
LAYERS = {
    "machine": {"devices", "units", "usage"},
    "leaves": {
        "results",
        "trace",
        "steps",
        "topology",
        "status",
        "files",
        "mailbox",
        "lifeline",
        "place",
        "pickling",
        "cards",
        "shm_files",
    },
    "collectives": {"collectives"},
    "transport": {"transport"},
    "communicator": {"communicator"},
    "gradients": {"gradients"},
    "processes": {
        "fork_server",
        "forking",
        "forked",
        "parcel",
        "surroundings",
        "generators",
        "huge_pages",
        "worker",
        "worker_process",
        "launcher",
        "joined",
        "joined_run",
        "meeting",
        "messenger",
        "node_memory",
        "nics",
        "preflight",
    },
    "strategies": {"strategies"},
    "workloads": {"workloads"},
    "training": {"training"},
    "analysis": {"analysis"},
    "commands": {
        "command_line",
        "__main__",
        "bench",
        "experiment",
        "lab",
        "grids",
        "transformer_grids",
        "cells",
        "fetched",
        "faults",
        "injection",
        "unwatched",
        "plots",
    },
}
MAY_IMPORT = {
    "machine": set[str](),
    "leaves": {"machine"},
    "workloads": {"machine"},
    "collectives": {"machine", "leaves"},
    "analysis": {"machine", "leaves", "collectives"},
    "transport": {"machine", "leaves", "collectives"},
    "communicator": {"machine", "leaves", "collectives", "transport"},
    "gradients": {"machine", "leaves", "collectives", "transport"},
    "processes": {"machine", "leaves", "collectives", "transport", "communicator", "gradients"},
    "strategies": {"machine", "leaves", "collectives", "transport", "communicator", "gradients", "workloads"},
    "training": set(LAYERS) - {"training", "analysis", "commands"},
    "commands": set(LAYERS),
}
# The controls must not share the code that they are compared with.
CONTROLS = ("param_server_builtin.py", "ring_all_reduce_builtin.py")
CONTROLS_MAY_IMPORT = ("workloads", "results", "training.config", "training.evaluate", "training.network")


def imported(source: str) -> set[str]:
    """Full names of the modules that are imported anywhere in it, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from torch_parallel import worker` imports the module torch_parallel.worker
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer_of(module: str) -> str | None:
    """Of `training.config` and the like, without the package's name; None for what is no module of the package."""
    top = module.split(".")[0]
    return next((layer for layer, tops in LAYERS.items() if top in tops), None)


def violations(module: str, source: str) -> list[str]:
    """What a module of the package imports from a layer that it must not see."""
    own = layer_of(module)
    assert own is not None, f"{module} belongs to no layer: give it one in this file"
    wrong = []
    for name in sorted(imported(source)):
        if name.split(".")[0] != "torch_parallel":
            continue
        layer = layer_of(name.removeprefix("torch_parallel").removeprefix("."))
        # a name that is no module is a public one (`from torch_parallel import launch`): for users, not for us
        if layer != own and (layer is None or layer not in MAY_IMPORT[own]):
            wrong.append(f"{module} ({own}) imports {name} ({layer})")
    return wrong


def modules() -> dict[str, Path]:
    """`training.config` -> its file; the package's own __init__.py, which names everything, is not among them."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_one_way(module: str) -> None:
    assert violations(module, modules()[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("transport.base", "from torch_parallel.strategies.base import Strategy"),
        ("gradients.buckets", "import torch_parallel.communicator"),
        ("communicator", "def f():\n    from torch_parallel import launcher"),
        ("workloads.data", "from torch_parallel.results import RunFolder"),
        ("status", "from torch_parallel.collectives import ALL_REDUCE"),
        ("analysis.plots", "from torch_parallel.training.config import RunConfig"),
        ("strategies.base", "if TYPE_CHECKING:\n    from torch_parallel.training.loop import Trainer"),
        ("training.run", "from torch_parallel import bench"),
        ("training.run", "from torch_parallel import launch"),
    ],
)
def test_the_rule_can_be_broken(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


def test_every_layer_has_modules_and_rules() -> None:
    assert LAYERS.keys() == MAY_IMPORT.keys()
    with pytest.raises(AssertionError, match="belongs to no layer"):
        violations("something_new", "")


@pytest.mark.parametrize("module", sorted(name for name in modules() if name.split(".")[0] == "collectives"))
def test_an_algorithm_knows_nothing_of_torch(module: str) -> None:
    names = {name.split(".")[0] for name in imported(modules()[module].read_text())}
    assert not names & {"torch", "numpy"}
    assert names - {"torch_parallel"} <= sys.stdlib_module_names


def shared_code(source: str) -> list[str]:
    """What a control imports of the code that it is compared with."""
    ours = sorted(name for name in imported(source) if name.split(".")[0] == "torch_parallel")
    return [name for name in ours if not name.removeprefix("torch_parallel.").startswith(CONTROLS_MAY_IMPORT)]


def test_controls_share_no_code_with_what_they_are_compared_with() -> None:
    for name in CONTROLS:
        if (ROOT / name).exists():
            assert shared_code((ROOT / name).read_text()) == [], name
    allowed = (
        "from torch_parallel.workloads import load_dataset\nfrom torch_parallel.training.config import RunConfig\n"
    )
    assert shared_code(allowed) == []
    assert shared_code(allowed + "from torch_parallel import launch") == ["torch_parallel.launch"]


def python(code: str) -> str:
    """What this prints, in a process of its own."""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


# What a command imports before it starts the fork server, which then imports torch at the same time.
@pytest.mark.parametrize("module", ["torch_parallel", "torch_parallel.command_line", "torch_parallel.__main__"])
def test_torch_is_not_imported_before_it_is_needed(module: str) -> None:
    assert python(f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & sys.modules.keys()))") == "[]"


def test_public_names() -> None:
    """Also after a module of the same name has been imported, in whichever order."""
    code = (
        "import torch_parallel.launcher, torch_parallel.training.run, torch_parallel\n"
        "from torch_parallel import *\n"
        "from torch_parallel import launch, train\n"
        "print(sorted(torch_parallel.__all__))\n"
        "print(type(launch).__name__, type(train).__name__, launch is torch_parallel.launcher.launch)\n"
        "print(all(hasattr(torch_parallel, name) for name in torch_parallel.__all__))\n"
        "print(isinstance(torch_parallel.__version__, str), RunConfig is torch_parallel.training.config.RunConfig)\n"
    )
    names, kinds, *rest = python(code).splitlines()
    assert ast.literal_eval(names) == [
        "Communicator",
        "Dataset",
        "NotPicklable",
        "RunConfig",
        "Samples",
        "Task",
        "TrainingRun",
        "WorkerFailure",
        "Workload",
        "__version__",
        "join",
        "launch",
        "train",
    ]
    assert kinds == "function function True"
    assert rest == ["True", "True True"]


def test_a_name_that_is_not_there() -> None:
    import torch_parallel

    with pytest.raises(AttributeError, match="no attribute 'bogus'"):
        _ = torch_parallel.bogus
    with pytest.raises(ImportError, match="bogus"):
        from torch_parallel import bogus  # noqa: F401
