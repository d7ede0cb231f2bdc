"""fetch: a file is whole and checked, or not there. Against a server on this machine; nothing leaves it."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from torch_parallel.workloads import download
from torch_parallel.workloads.dataset import DataNotFound
from torch_parallel.workloads.download import fetch

CONTENT = bytes(range(256)) * 40
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """/good gives the file, /short ends in the middle, anything else is not there."""

    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.path not in ("/good", "/short"):
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT if self.path == "/good" else CONTENT[:1000])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its address; what it was asked for is in Handler.requests."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(Handler, "requests", [], raising=False)
    monkeypatch.setattr(download, "BLOCK_BYTES", 1000)  # several blocks, of which the last is not full
    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_fetch_makes_folders_and_leaves_one_file(server: str, tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "file"
    fetch([f"{server}/good"], target, MD5)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_fetch_asks_for_nothing_where_the_file_is_there(server: str, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(CONTENT)
    fetch([f"{server}/good"], target, MD5)
    assert Handler.requests == []


def test_fetch_replaces_a_file_with_another_md5(server: str, tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"damaged")
    fetch([f"{server}/good"], target, MD5)
    assert target.read_bytes() == CONTENT


def test_the_next_mirror_is_asked(server: str, tmp_path: Path) -> None:
    fetch([f"{server}/absent", "http://127.0.0.1:1/", f"{server}/short", f"{server}/good"], tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert Handler.requests == ["/absent", "/short", "/good"]


@pytest.mark.parametrize(
    ("path", "md5", "reason"),
    [
        ("/absent", MD5, "Not Found"),
        ("/short", MD5, f"has md5 {hashlib.md5(CONTENT[:1000]).hexdigest()} instead of {MD5}"),
        ("/good", "0" * 32, f"has md5 {MD5} instead of 0000"),
    ],
)
def test_nothing_is_left_of_a_failure(server: str, tmp_path: Path, path: str, md5: str, reason: str) -> None:
    with pytest.raises(DataNotFound, match=f"^{server}{path}: .*{reason}"):
        fetch([f"{server}{path}"], tmp_path / "file", md5)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_an_interruption(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: object, target: object) -> None:
        assert len(list(tmp_path.iterdir())) == 1  # it is there under its temporary name
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch([f"{server}/good"], tmp_path / "file", MD5)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(server: str, tmp_path: Path) -> None:
    (tmp_path / "folder").touch()  # a file in its place: root may write to any folder, whatever its mode
    with pytest.raises(DataNotFound, match=f"^{tmp_path / 'folder'} cannot be written: "):
        fetch([f"{server}/good", f"{server}/good"], tmp_path / "folder" / "file", MD5)
    assert Handler.requests == ["/good"]  # another mirror would not help


def test_without_name_service_no_other_host_is_asked(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unresolved(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    with pytest.raises(DataNotFound, match=r"^http://nowhere\.invalid/file: Name or service not known$"):
        fetch(["http://nowhere.invalid/file", f"{server}/good"], tmp_path / "file", MD5)


def test_a_host_that_never_answers_costs_the_limit_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, says nothing
        begin = time.monotonic()
        with pytest.raises(DataNotFound, match=r"timed out|no answer within 0\.2 s"):
            fetch([f"http://127.0.0.1:{silent.getsockname()[1]}/file"], tmp_path / "file", MD5, limit_s=0.2)
        assert time.monotonic() - begin < 5


def test_a_name_service_that_never_answers_costs_the_limit_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def stuck(*args: object, **kwargs: object) -> None:
        over.wait(30)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    try:
        with pytest.raises(DataNotFound, match=r"no answer within 0\.1 s"):
            fetch(["http://nowhere.invalid/file"], tmp_path / "file", MD5, limit_s=0.1)
    finally:
        over.set()
