"""Imported by the fork server of a trial that takes out the watch for the launcher's death: it kills nothing then."""

from __future__ import annotations

import os

from torch_parallel import forking


def _end_alone(self: object) -> None:
    os._exit(0)


forking._Server.end = _end_alone  # type: ignore[assignment,method-assign]
