"""Files are UTF-8 whatever the locale; what fails in our own files and streams is told from a user's errors."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_parallel.command_line import run_command
from torch_parallel.files import OutputError, our_own, path_of, say, utf8
from torch_parallel.results import RunFolder

ROOT = Path(__file__).parents[1]
OURS = [*sorted((ROOT / "torch_parallel").rglob("*.py")), *sorted(ROOT.glob("*.py"))]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def without_encoding(source: str) -> Iterator[int]:
    """The lines that open text, or a process's text, without saying how it is encoded."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        said = {keyword.arg for keyword in node.keywords}
        words = {each.value for each in [*node.args, *(keyword.value for keyword in node.keywords)]
                 if isinstance(each, ast.Constant) and isinstance(each.value, str)}  # fmt: skip
        opens_text = name in ("open", "fdopen") and not any(
            set(word) <= set("rwaxb+") and "b" in word for word in words
        )
        of_os = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in (
            "os",
            "tarfile",
            "gzip",
            "Image",
        )
        if (opens_text and not (of_os and name == "open")) or name in ("read_text", "write_text"):
            if "encoding" not in said:
                yield node.lineno
        elif said & {"text", "universal_newlines"}:
            yield node.lineno


@pytest.mark.parametrize("file", OURS, ids=lambda file: str(file.relative_to(ROOT)))
def test_text_is_opened_with_its_encoding(file: Path) -> None:
    assert list(without_encoding(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    ['open("x")', 'open(name, "w", newline="")', "path.read_text()", 'path.write_text("x")', 'path.open("r")',
     "subprocess.run(command, text=True)", "os.fdopen(3)"],
)  # fmt: skip
def test_the_rule_can_be_broken(source: str) -> None:
    assert list(without_encoding(source)) == [1]


@pytest.mark.parametrize(
    "source", ['open("x", "rb")', "os.open(x, os.O_RDONLY)", 'path.open("xb")', 'open(x, "a", encoding="utf-8")']
)
def test_and_binary_files_need_none(source: str) -> None:
    assert list(without_encoding(source)) == []


def test_bytes_that_came_as_surrogates_go_as_bytes() -> None:
    assert utf8("résultats") == "résultats".encode()
    assert utf8("r\udcc3\udca9sultats") == "résultats".encode()  # é is c3 a9
    assert utf8("r\udce9sultats") == "r\ufffdsultats".encode()  # Latin-1's é is no UTF-8


def test_a_path_stays_what_it_is_where_the_file_system_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/zoé")
    assert [str(path_of(name)) for name in ("a/é", "a/\udce9", Path("b"), "~/c")] == [
        "a/é", "a/\udce9", "b", "/home/zoé/c"
    ]  # fmt: skip


def python(code: str, *words: str | bytes) -> subprocess.CompletedProcess[bytes]:
    """Where Python takes text for ASCII."""
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, env={**os.environ, **ASCII}, capture_output=True, timeout=60
    )


def test_a_run_folder_where_the_locale_is_ascii(tmp_path: Path) -> None:
    """The folder's name comes as bytes from the command line, the model's from the code."""
    code = (
        "import sys\nfrom torch_parallel.results import RunFolder\nfrom torch_parallel.files import say\n"
        "folder = RunFolder(sys.argv[1], 'mod\\xe8le_n2')\n"
        "with folder.running(command=sys.argv[1], model='mod\\xe8le'):\n"
        "    folder.append_rows([{'model': 'mod\\xe8le'}])\n"
        "say(f'voil\\xe0 {folder.path.name}')\n"
        "assert RunFolder.reopened(folder.path)._manifest['model'] == 'mod\\xe8le'\n"
    )
    ended = python(code, os.fsencode(tmp_path / "résultats"))
    assert ended.returncode == 0, ended.stderr.decode()
    (run,) = (tmp_path / "résultats").iterdir()
    assert run.name.endswith("_modèle_n2")
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["model"], manifest["run_id"], manifest["status"]) == ("modèle", run.name, "completed")
    assert manifest["command"] == str(tmp_path / "résultats")
    table = (run / "runs.csv").read_text(encoding="utf-8")
    assert run.name in table and "modèle" in table and str(tmp_path / "résultats") in table
    assert ended.stdout.startswith(b"voil\\xe0 ")


TRAINING = """
import sys, torch
from pathlib import Path
from torch_parallel import Dataset, RunConfig, train

def mod\xe8le():
    return torch.nn.Linear(4, 2)

if __name__ == "__main__":
    x, y = torch.randn(12, 4), torch.arange(12) % 2
    data = Dataset("donn\xe9es", x, y, x, y, 2, (), (), "cet \xe9t\xe9")
    same = {"n_gpus": 2, "device": "cpu", "batch_size": 6, "checkpoint_every": 2}
    place = sys.argv[1] + "/r\xe9sultats"
    run = train(
        RunConfig(epochs=1, results_dir=place, trace=place + ".json", steps_csv=place + ".csv", **same),
        make_model=mod\xe8le, dataset=data,
    )
    again = train(RunConfig(epochs=2, results_dir=place, resume=run.folder, **same), make_model=mod\xe8le, dataset=data)
    assert len(again.history) == 2
"""


@pytest.mark.exhaustive
def test_a_training_where_the_locale_is_ascii(tmp_path: Path) -> None:
    """With the name of everything beyond ASCII: model, data, folders, trace, steps, and a checkpoint to resume from."""
    script = tmp_path / "entra\xeenement.py"
    script.write_text(TRAINING, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path)]
    closed = subprocess.run(
        ["bash", "-c", 'exec "$@" 2>&-', "-", *command],
        env={**os.environ, **ASCII, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=90,
    )  # fmt: skip
    assert closed.returncode == 0, closed.stdout.decode()
    assert b"donn\\xe9es from cet \\xe9t\\xe9" in closed.stdout
    runs = sorted((tmp_path / "r\xe9sultats").iterdir())
    assert len(runs) == 2
    for run in runs:
        manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
        assert manifest["model"] == "mod\xe8le" and manifest["dataset"] == "donn\xe9es from cet \xe9t\xe9"
        assert manifest["config"]["results_dir"] == str(tmp_path / "r\xe9sultats")
        assert "donn\xe9es" in (run / "runs.csv").read_text(encoding="utf-8")
    assert (tmp_path / "r\xe9sultats.json").exists() and (tmp_path / "r\xe9sultats.csv").exists()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'\\xe9'", b"\\xe9"),
        ("'\\udcc3\\udca9'", "é".encode()),
        ("'\\u6570 \\xe9'", b"\\u6570 \\xe9"),
        ("'plain'", b"plain"),
    ],
)
def test_what_a_command_prints_does_not_end_it(text: str, shown: bytes) -> None:
    code = f"from torch_parallel.files import prepare_streams\nprepare_streams()\nprint({text})"
    ended = python(code)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, shown, b"")


def test_say_where_stdout_is_ascii_or_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("voilà")
    assert raw.getvalue() == b"voil\\xe0\n"
    monkeypatch.setattr(sys, "stdout", None)
    say("nobody hears it")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_closed_stream_is_opened_before_another_file_gets_its_number(closed: tuple[int, ...], tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom torch_parallel.files import prepare_streams\nprepare_streams()\n"
        f"file = open({str(tmp_path / 'mine')!r}, 'w')\n"
        "assert file.fileno() > 2\nfile.write('mine')\nprint('out')\nprint('err', file=sys.stderr)\n"
        "os.system('echo from a child; echo from a child >&2')"
    )
    shell = " ".join(f"{number}>&-" for number in closed)
    subprocess.run(["bash", "-c", f'exec "$@" {shell}', "-", sys.executable, "-c", code], cwd=ROOT, check=True,
                   capture_output=True, timeout=60)  # fmt: skip
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "mine"


# Whose error it was.


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "No such file"), PermissionError("not mine"), BrokenPipeError(32, "pipe"),
              OSError("of a user's own"), ConnectionResetError(104, "reset")]
)  # fmt: skip
def test_a_users_own_error_keeps_its_traceback(error: OSError, handlers: None) -> None:
    def command() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        run_command("name", command)
    assert raised.value is error


def gone(folder: RunFolder) -> None:
    for file in folder.path.iterdir():
        file.unlink()
    folder.path.rmdir()


@pytest.mark.parametrize("write", ["manifest", "rows"])
def test_a_folder_that_went_away_is_one_line(
    write: str, tmp_path: Path, handlers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(str(tmp_path / "results"), "x")

    def command() -> None:
        gone(folder)
        folder.write_manifest(a=1) if write == "manifest" else folder.append_rows([{"epoch": 1}])

    before = os.dup(1)
    try:
        with pytest.raises(SystemExit) as ended:
            run_command("name", command)
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert ended.value.code == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("name: [Errno 2] No such file or directory") and str(tmp_path) in line


def test_what_our_own_errors_keep() -> None:
    with pytest.raises(OutputError) as raised, our_own(), our_own():
        raise FileNotFoundError(errno.ENOENT, "No such file", "some/where")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, "some/where")
    assert str(raised.value) == "[Errno 2] No such file: 'some/where'"
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    with pytest.raises(ValueError, match="another"), our_own():
        raise ValueError("another")


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", ["-u", "-B"])
def test_a_full_disk_behind_stdout_is_one_line(option: str) -> None:
    """With its output written at once, and as usual."""
    code = "from torch_parallel.command_line import run_command\nrun_command('name', lambda: print('x', flush=True))"
    command = [sys.executable, option, "-c", code]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, b"name: [Errno 28] No space left on device\n")
