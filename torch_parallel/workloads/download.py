"""One file from the network: whole, checked and in place, or not there at all.

Call it from one process, before workers start: N workers that fetch the same archive write over each other. Two jobs
that start together may both fetch; each writes under a name of its own, and the last rename wins with the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import queue
import socket
import sys
import threading
import urllib.request
import uuid
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, cast
from urllib.error import HTTPError

from torch_parallel.workloads.dataset import DataNotFound

BLOCK_BYTES = 1 << 20
LIMIT_S = 10.0


def fetch(urls: Sequence[str], target: Path, md5: str, limit_s: float = LIMIT_S) -> None:
    """Puts the file with this `md5` at `target`, from the first of `urls` that gives it; nothing to do if it is there.

    `limit_s` bounds the wait for a connection, and for each further block. Raises DataNotFound with one reason a URL,
    or with why `target` cannot be written; then no partial file is left.
    """
    if has_md5(target, md5):
        return
    reasons = []
    for url in urls:
        try:
            with _open(url, limit_s) as response:
                print(f"downloading {url} to {target}", file=sys.stderr, flush=True)
                return _save(response, target, md5)
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            reasons.append(f"{url}: {getattr(reason, 'strerror', None) or reason}")
            if isinstance(error, HTTPError):
                error.close()  # it holds the connection
            if isinstance(reason, socket.gaierror):
                break  # no name service, no network: the other hosts would only cost more time
    raise DataNotFound("; ".join(reasons))


def has_md5(path: Path, md5: str) -> bool:
    """Whether `path` is a readable file with this md5."""
    try:
        with path.open("rb") as file:
            digest = hashlib.md5(usedforsecurity=False)  # tells damage, not forgery; some systems refuse it otherwise
            for block in iter(lambda: file.read(BLOCK_BYTES), b""):
                digest.update(block)
    except OSError:
        return False
    return digest.hexdigest() == md5


def _open(url: str, limit_s: float) -> BinaryIO:
    """`urlopen` that is over after `limit_s`.

    Its own timeout holds for each address of a host (S3 has eight) and not at all for the name service, so behind a
    firewall that drops packets it takes minutes. Hence a thread, which may be left behind.
    """
    outcome: queue.SimpleQueue[BinaryIO | Exception] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            outcome.put(cast(BinaryIO, urllib.request.urlopen(url, timeout=limit_s)))
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=attempt, daemon=True).start()
    try:
        result = outcome.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
    if isinstance(result, Exception):
        raise result
    return result


def _save(response: BinaryIO, target: Path, md5: str) -> None:
    """Writes to a name beside `target`, checks, renames. Raises ValueError if the md5 is another."""
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("xb")
    except OSError as error:
        raise DataNotFound(f"{target.parent} cannot be written: {error.strerror}") from error
    try:
        digest = hashlib.md5(usedforsecurity=False)
        with file:
            while block := response.read(BLOCK_BYTES):
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != md5:
            raise ValueError(f"what came has md5 {digest.hexdigest()} instead of {md5}")
        os.replace(partial, target)
    finally:  # also when interrupted
        partial.unlink(missing_ok=True)
