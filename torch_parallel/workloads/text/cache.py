"""What was tokenised is kept beside the data, so that the next run reads it in a moment.

A file of the cache carries a digest of its own content: torch does not notice a changed byte. One that is damaged is
made anew, and where none can be written the data are made each time. Nothing here is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

FOLDER = ".torch_parallel_cache"
FORM = 1  # to be raised when the same data and settings come to give something else
DIGEST_BYTES = 32


def cached(
    beside: Path | None,
    name: str,
    data: Sequence[bytes],
    settings: Mapping[str, Any],
    make: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """What `make` returns, from the cache in the folder `beside` if it was made before of the same data and settings.

    `make` returns tensors, text and numbers, in dictionaries and lists. None for `beside` is no cache.
    """
    if beside is None:
        return make()
    file = beside / FOLDER / f"{name}-{_key(data, settings)}.pt"
    found = _read(file)
    if found is not None:
        return found
    made = make()
    _write(file, made)
    return made


def _key(data: Sequence[bytes], settings: Mapping[str, Any]) -> str:
    """Of all that decides what is made; the versions too, for another one may tokenise otherwise."""
    versions = {"form": FORM, "tokenizers": version("tokenizers")}
    digest = hashlib.sha256(json.dumps([versions, dict(settings)], sort_keys=True).encode())
    for each in data:
        digest.update(hashlib.sha256(each).digest())
    return digest.hexdigest()[:32]


def _read(file: Path) -> dict[str, Any] | None:
    """None if it is not there, cannot be read or is damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, payload = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    try:
        return dict(torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True))
    except Exception:  # whatever it is, it can be made anew
        return None


def _write(file: Path, made: dict[str, Any]) -> None:
    """Under another name until it is whole, so that no other job reads half of it."""
    buffer = io.BytesIO()
    torch.save(made, buffer)
    payload = buffer.getvalue()
    partial = file.with_name(f"{uuid.uuid4().hex}.part")
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        try:
            partial.write_bytes(hashlib.sha256(payload).digest() + payload)
            os.replace(partial, file)
        finally:  # also when interrupted
            partial.unlink(missing_ok=True)
