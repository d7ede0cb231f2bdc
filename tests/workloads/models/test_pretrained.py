"""Trained weights: what is saved is loaded, what is missing begins afresh, and what cannot be is said early."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_parallel import workloads
from torch_parallel.workloads import Dataset, Form, ImageForm, TextForm, build_model, load_pretrained
from torch_parallel.workloads.load import Choice, of_images
from torch_parallel.workloads.models.pretrained import folder_of
from torch_parallel.workloads.tree import rows

IMAGES = ImageForm(3, 8, 8, 10)
LABELS = TextForm(300, 16, 5, "classification")
MASKED = TextForm(300, 16, 5, "masked")
NEXT = TextForm(300, 16, 5, "next_token")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def silence(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing is printed, whatever happens."""
    yield
    assert capfd.readouterr() == ("", "")


def save(folder: Path, name: str, form: Form, seed: int = 0) -> dict[str, Tensor]:
    """A tiny model's folder, as the library writes it; its weights."""
    torch.manual_seed(seed)
    model: Any = build_model(name, form, size="tiny")
    bar = sys.modules["transformers"].utils.logging
    shown = bar.is_progress_bar_enabled()
    bar.disable_progress_bar()
    model.save_pretrained(folder)
    if shown:
        bar.enable_progress_bar()
    state: dict[str, Tensor] = model.state_dict()
    return state


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save(folder, "bert", LABELS)
    return folder


@pytest.mark.parametrize(
    ("name", "form"),
    [("vit", IMAGES), ("bert", LABELS), ("bert", MASKED), ("distilbert", LABELS), ("gpt2", NEXT), ("gpt2", LABELS)],
)
def test_what_is_saved_is_loaded(tmp_path: Path, name: str, form: Form) -> None:
    saved = save(tmp_path, name, form)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    before = torch.get_rng_state()
    model = load_pretrained(str(tmp_path), form, name)
    loaded = model.state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert model.training and all(value.requires_grad for value in model.parameters())
    assert torch.equal(before, torch.get_rng_state())
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


def test_another_number_of_classes_gives_a_new_classifier(bert: Path) -> None:
    heads, bodies = [], []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        state = load_pretrained(bert, TextForm(300, 16, 3, "classification"), "bert").state_dict()
        heads.append(state["classifier.weight"])
        bodies.append(state["bert.encoder.layer.1.output.dense.weight"])
    assert heads[0].shape == (3, 128)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert abs(heads[0].std().item() / 0.02 - 1) < 0.15  # as fresh ones begin; 384 draws
    kept = load_pretrained(bert, LABELS, "bert").state_dict()
    assert all(torch.equal(kept["bert.encoder.layer.1.output.dense.weight"], each) for each in bodies)
    assert kept["classifier.weight"].shape == (5, 128)


def test_another_task_gives_a_new_head(tmp_path: Path, bert: Path) -> None:
    masked = load_pretrained(bert, MASKED, "bert")
    saved = load_pretrained(bert, LABELS, "bert").state_dict()
    state = masked.state_dict()
    shared = [key for key in state if key in saved]
    assert "bert.embeddings.word_embeddings.weight" in shared and "bert.pooler.dense.weight" not in state
    assert all(torch.equal(state[key], saved[key]) for key in shared)
    save(tmp_path, "bert", MASKED)  # has no pooler, which a classifier needs
    assert load_pretrained(tmp_path, LABELS, "bert").get_parameter("bert.pooler.dense.weight").shape == (128, 128)


def test_a_larger_vocabulary_shorter_texts_dropout_and_dtype(bert: Path) -> None:
    form = TextForm(200, 8, 5, "classification")
    torch.set_default_dtype(torch.float64)
    try:
        model = load_pretrained(bert, form, "bert", dropout=0.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.get_parameter("bert.embeddings.word_embeddings.weight").shape == (300, 128)
    assert {value.dtype for value in model.parameters()} == {torch.float64}
    tokens = torch.randint(1, 200, (2, 8))
    assert torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_levels_and_bars_of_the_library_are_put_back(bert: Path) -> None:
    from transformers.utils import logging as theirs

    level, bar, root = theirs.get_verbosity(), theirs.is_progress_bar_enabled(), list(logging.root.handlers)
    load_pretrained(bert, TextForm(300, 16, 3, "classification"), "bert")
    assert (theirs.get_verbosity(), theirs.is_progress_bar_enabled(), list(logging.root.handlers)) == (level, bar, root)


@pytest.mark.parametrize(
    ("name", "form", "said"),
    [
        ("cnn", IMAGES, "no trained weights are read for the model 'cnn'; choose from bert, distilbert, gpt2, vit$"),
        ("bert", IMAGES, "bert cannot take images; choose from vit$"),
        ("vit", LABELS, "vit cannot take texts; choose from bert, distilbert, gpt2$"),
        ("bert", NEXT, "bert cannot take texts with the task next_token; choose from gpt2$"),
        ("gpt2", LABELS, ": it is a model of the type 'bert', and 'gpt2' is wanted; ask for the model bert$"),
        ("bert", TextForm(301, 16, 5, "masked"), ": its vocabulary has 300 tokens, and the texts' has 301; cut"),
        ("bert", TextForm(300, 513, 5, "masked"), ": it takes texts of 512 tokens, not of 513; cut them off there$"),
    ],
)
def test_weights_that_do_not_suit(bert: Path, name: str, form: Form, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        load_pretrained(bert, form, name)
    assert "\n" not in str(raised.value)


def test_images_that_do_not_suit(tmp_path: Path) -> None:
    save(tmp_path, "vit", IMAGES)
    with pytest.raises(ValueError, match=r"it takes images \(3, 8, 8\) .*, not \(1, 8, 8\); give such images$"):
        load_pretrained(tmp_path, ImageForm(1, 8, 8, 10), "vit")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def rewrite(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_weights, ": it has no model.safetensors; give a folder with config.json and"),
        (without_config, ": it has no config.json; give a folder with"),
        (cut_off, r": it cannot be loaded \(.*\); give a folder"),
        (lambda folder: (folder / "config.json").write_text("{"), r": its config.json cannot be read \(.*\); give"),
        (
            lambda folder: (folder / "config.json").write_text("{}"),
            r": its config.json cannot be read \('model_type'\)",
        ),
        (lambda folder: rewrite(folder, model_type="t5"), "of the type 't5', and 'bert' is wanted; choose from bert, "),
        (
            lambda folder: rewrite(folder, num_hidden_layers=3),
            r"its weights lack bert\.encoder\.layer\.2\..* in the shape",
        ),
        (
            lambda folder: rewrite(folder, vocab_size=301),
            r"its weights lack bert\.embeddings\.word_embeddings\.weight in",
        ),
        (lambda folder: rewrite(folder, hidden_size="wide"), r": it cannot be loaded \(.*\); give a folder"),
    ],
)
def test_damaged_folders(tmp_path: Path, bert: Path, damage: Any, said: str) -> None:
    shutil.copytree(bert, tmp_path / "bert")
    damage(tmp_path / "bert")
    with pytest.raises(ValueError, match=said) as raised:
        load_pretrained(tmp_path / "bert", LABELS, "bert")
    assert "\n" not in str(raised.value) and str(raised.value).startswith(str(tmp_path))


def test_folders_that_are_not_there(tmp_path: Path, bert: Path) -> None:
    for given in (tmp_path / "none", str(tmp_path / "none"), "./none", "~/none-of-it", "a/b/c"):
        with pytest.raises(ValueError, match=f"^{given}: there is no such folder; give a folder with config.json"):
            load_pretrained(given, LABELS, "bert")
    with pytest.raises(ValueError, match=r"model\.safetensors: it is a file; give a folder"):
        load_pretrained(bert / "model.safetensors", LABELS, "bert")


SCRIPT = """
import sys, time
import torch
from torch_parallel.workloads import TextForm, load_pretrained
begun = time.process_time()
for name in ("someone/bert", "bert base"):
    try:
        load_pretrained(name, TextForm(300, 16, 5, "classification"), "bert")
    except ValueError as error:
        print(error)
print(time.process_time() - begun, "transformers" in sys.modules)
"""


def test_a_name_that_cannot_be_had_is_said_early(tmp_path: Path) -> None:
    root = Path(workloads.__file__).parents[2]
    env = {"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    missing, bad, took = ended.stdout.splitlines()
    assert missing == (
        "someone/bert: it is no folder, the hub's cache has no such model and HF_HUB_OFFLINE forbids a download; unset "
        "it, or give a folder with config.json and model.safetensors, as save_pretrained writes them"
    )
    assert bad.startswith("bert base: it is no folder, and no name of the hub, such as owner/model; give a folder")
    seconds, imported = took.split()
    assert float(seconds) < 2 and imported == "False"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that is out of reach."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_name_in_the_cache_is_loaded(hub: Path, bert: Path) -> None:
    folder = hub / "models--someone--bert"  # as the hub's own library lays it out
    snapshot = folder / "snapshots" / ("0" * 40)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(bert, snapshot)
    loaded = load_pretrained("someone/bert", LABELS, "bert").state_dict()
    saved = load_pretrained(bert, LABELS, "bert").state_dict()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    with pytest.raises(ValueError, match=r"^someone/bert: it is a model of the type 'bert'"):
        load_pretrained("someone/bert", NEXT, "gpt2")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^someone/bert: it has no model\.safetensors"):
        load_pretrained("someone/bert", LABELS, "bert")


def test_what_the_network_says_is_in_the_line(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    def fail(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    said = r"someone/bert: .* cannot be downloaded \(no route\); look at the name and the network, or give a folder"
    with pytest.raises(ValueError, match=said):
        load_pretrained("someone/bert", LABELS, "bert")


def test_the_file_that_is_asked_for_is_what_the_hub_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer is fetched too, and not only what makes the model."""
    import huggingface_hub

    asked: list[list[str]] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        (tmp_path / "tokenizer.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert folder_of("tokenizer.json", "someone/something") == tmp_path
    assert asked == [["tokenizer.json"]]


@pytest.mark.parametrize(("channels", "shape"), [(3, (1, 28, 28)), (3, (3, 64, 64)), (1, (1, 8, 8))])
def test_images_are_made_as_trained_weights_want_them(channels: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    """32 x 32 pixels; grey images are repeated for three channels."""
    save(tmp_path / "vit", "vit", ImageForm(channels, 32, 32, 5))
    images, targets = torch.randint(0, 255, (4, *shape), dtype=torch.uint8), torch.arange(4)
    dataset = Dataset("mine", images, targets, images, targets, 10, (0.5,) * shape[0], (0.5,) * shape[0], "a test")
    workload = of_images(dataset, Choice(model="vit", pretrained=str(tmp_path / "vit")))
    batch = workload.task.prepare(rows(workload.samples.train, slice(0, 4)), torch.float32)
    assert batch["inputs"].shape == (4, channels, 32, 32) and workload.model_name == "vit_pretrained"
    assert workload.task.forward(workload.make_model(), batch).logits.shape == (4, 10)
