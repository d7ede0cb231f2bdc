"""`python -m torch_parallel COMMAND ...`: everything that is not training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from torch_parallel.command_line import run_command, start_command
from torch_parallel.files import our_own

COMMANDS = {
    "bench": "timings beside torch's own",
    "collectives": "lists the collective algorithms, or draws one round by round",
    "experiment": "grids of training runs, compared",
    "faults": "breaks training runs on purpose and checks how they end",
    "lab": "runs a program on several machines that are made of this one, with network cards of a set rate",
    "plots": "draws the figures of media/ from results/",
}
START_WORKERS = ("bench", "experiment", "faults")


def main() -> None:
    from torch_parallel.usage import OneLineParser

    parser = OneLineParser(prog="python -m torch_parallel", allow_abbrev=False, add_help=len(sys.argv) < 3)
    # the metavar makes "the following arguments are required" say which commands there are
    commands = parser.add_argument("command", choices=tuple(COMMANDS), metavar=f"{{{','.join(COMMANDS)}}}")
    commands.help = "; ".join(f"{name}: {what}" for name, what in COMMANDS.items())
    command = parser.parse_args(sys.argv[1:2]).command
    run: Callable[[list[str]], None] = import_module(f"torch_parallel.{command}").main
    with our_own():  # none of these runs a user's code
        run(sys.argv[2:])


if __name__ == "__main__":
    start_command(starts_workers=len(sys.argv) > 1 and sys.argv[1] in START_WORKERS)
    run_command("torch_parallel", main)
