"""How commands read their flags, and what a user asked for that cannot be. No torch is imported for it."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class UserError(Exception):
    """What a user can cause and mend: one line with the remedy. Commands tell it and end with exit code 2."""


class ConfigError(UserError, ValueError):
    """A run that cannot be: one line that names the flag, the value, and what would do."""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += "; --help lists what there is"
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)
