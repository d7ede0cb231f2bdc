"""Programs for tests: started as by `python program word ...`, but forked from a process that has torch loaded.

To import torch takes four seconds of a processor. A test of what several processes do together spends most of its time
on that, and is not about it.

    test process ---- argv, environment, folder, outputs ---->  server (has imported torch) -- fork -->  program
                 <--- process id, and at last the exit code --
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

PRELOAD = ("torch_parallel.training.run", "torch_parallel.joined_run", "torch_parallel.worker", "torch._dynamo")
NUMBER = struct.Struct("<q")
MOST_BYTES = 1 << 20


class Program:
    """A running one, used as a `subprocess.Popen` with `stderr=STDOUT, text=True` is."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the program)
        self._ended, theirs = os.pipe()
        request = json.dumps({"argv": list(command), "environ": dict(environment), "folder": str(folder)})
        try:
            socket.send_fds(_server(), [request.encode()], [self._output.fileno(), theirs])
        finally:
            os.close(theirs)
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        return int(NUMBER.unpack(os.read(self._ended, NUMBER.size))[0])

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = self._number()
            os.close(self._ended)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it has said, when it has ended."""
        self.wait(timeout)
        return self.said(), None

    def said(self) -> str:
        """So far."""
        return os.pread(self._output.fileno(), MOST_BYTES, 0).decode(errors="replace")

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.wait()
        self._output.close()


_control: socket.socket | None = None


def _server() -> socket.socket:
    """Of this process: it ends with it, and takes its programs along."""
    global _control
    if _control is None:
        _control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        atexit.register(_end, process)
    return _control


def _end(process: subprocess.Popen[bytes]) -> None:
    assert _control is not None
    _control.close()
    process.wait()


# ---- the server ----


def serve(control: socket.socket) -> dict[str, object]:
    """Forks a program for each request. Returns in the program, with what it is to be."""
    running: dict[int, int] = {}
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 100)
            _note_ends(running)
        if control in ready:
            data, fds, _, _ = socket.recv_fds(control, MOST_BYTES, 2)
            if not data:
                _leave(running)
            output, ended = fds
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (control.detach(), woken, wake, ended, *running.values()):
                    os.close(fd)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                return dict(json.loads(data))
            os.close(output)
            running[pid] = ended
            os.write(ended, NUMBER.pack(pid))


def _note_ends(running: dict[int, int]) -> None:
    for pid in [*running]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            fd = running.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(fd, NUMBER.pack(os.waitstatus_to_exitcode(status)))
            os.close(fd)


def _leave(running: dict[int, int]) -> NoReturn:
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def become(argv: list[str], environ: dict[str, str], folder: str) -> None:
    """Runs `python argv...` in this process."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = argv[1:] if argv[0] == "-m" else argv
    if argv[0] == "-m":
        sys.path[0] = folder
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    path = Path(argv[0])
    sys.path[0] = str(path.parent)
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)


def main() -> None:
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
    for name in PRELOAD:
        import_module(name)
    gc.freeze()
    become(**serve(socket.socket(fileno=int(sys.argv[1]))))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
