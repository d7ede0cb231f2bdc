"""Large libraries are imported where they are needed, and leave nothing behind in the user's program.

To import transformers or torchvision sets an environment variable of torch's compiler and three filters of warnings.
Neither is theirs to set, and nothing that they do later needs it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Puts the environment and the filters of warnings back as they were before."""
    before = dict(os.environ)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
