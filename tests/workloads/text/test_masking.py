"""What is hidden, how much of it, and that the text is still there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.text import load_masked, masking
from torch_parallel.workloads.text.masking import hide, rows
from torch_parallel.workloads.text.vocabulary import train_byte_pairs, train_wordpiece

PAD, UNKNOWN, CLS, SEP, MASK = range(5)


def made_text(words: int = 4000) -> str:
    draw = random.Random(0)
    return " ".join(draw.choice(["to", "be", "or", "not", "here", "\n"]) for _ in range(words))


def write(folder: Path, text: str) -> Path:
    (folder / "a.txt").write_text(text, encoding="utf-8")
    return folder / "a.txt"


def test_rows_by_hand() -> None:
    tokens, mask, real = rows(torch.tensor([11, 12, 13, 14]), 5, CLS, SEP, PAD)
    assert tokens.tolist() == [[CLS, 11, 12, 13, SEP], [CLS, 14, SEP, PAD, PAD]] and tokens.dtype == torch.int32
    assert mask.tolist() == [[True] * 5, [True, True, True, False, False]]
    assert real.tolist() == [[False, True, True, True, False], [False, True, False, False, False]]
    assert rows(torch.tensor([11, 12, 13]), 5, CLS, SEP, PAD)[0].tolist() == [[CLS, 11, 12, 13, SEP]]


def test_as_much_is_hidden_as_bert_hides() -> None:
    count = 1_000_000
    tokens = torch.full((count // 100, 100), 7, dtype=torch.int32)
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[:, ::2] = False
    words = torch.arange(10, 20)
    part = hide(tokens, real, MASK, words, torch.Generator().manual_seed(0))
    drawn = part["targets"] != -100
    assert not drawn[~real].any() and bool((part["targets"][drawn] == 7).all())
    hidden = part["tokens"][drawn]
    assert bool((part["tokens"][~drawn] == 7).all())
    # binomial: five standard deviations of 0.15 in 500,000 are 0.0025, of 0.8 in 75,000 are 0.0073
    assert drawn.sum().item() / real.sum().item() == pytest.approx(0.15, abs=0.0025)
    assert (hidden == MASK).double().mean().item() == pytest.approx(0.8, abs=0.0073)
    assert (hidden == 7).double().mean().item() == pytest.approx(0.1, abs=0.0055)
    others = hidden[(hidden != MASK) & (hidden != 7)]
    # each of ten words equally often: 750 of 7,500, give or take five times 26
    assert others.unique().tolist() == list(range(10, 20)) and int((others.bincount()[10:] - 750).abs().max()) < 130


def test_a_file_can_be_read_back(tmp_path: Path) -> None:
    text = made_text()
    data = load_masked(write(tmp_path, text), [], 16, seed=0, vocabulary_size=60)
    assert (data.name, data.task, data.unit, data.length) == ("a", "masked", "token", 16)
    assert data.source == f"{tmp_path}/a.txt, WordPiece tokens trained on its training part"
    assert [data.train[name].dtype for name in ("tokens", "mask", "targets")] == [
        torch.int32, torch.bool, torch.int64
    ]  # fmt: skip
    words: list[int] = []
    for part in (data.train, data.test):
        tokens = torch.where(part["targets"] == -100, part["tokens"], part["targets"])
        assert tokens[:, 0].eq(CLS).all() and torch.equal(part["mask"], tokens != PAD)
        assert not part["targets"][~part["mask"]].ne(-100).any()
        words += [token for token in tokens.flatten().tolist() if token not in (PAD, CLS, SEP)]
    tokenizer = train_wordpiece([text], 60)
    # five words, so every vocabulary of 60 tokens has them all, with the same numbers
    assert tokenizer.decode(words) == " ".join(text.split())
    hidden = data.train["tokens"][data.train["targets"] != -100]
    assert not torch.isin(hidden, torch.tensor([PAD, UNKNOWN, CLS, SEP])).any()


def test_the_vocabulary_is_of_the_training_part_alone(tmp_path: Path) -> None:
    text = " ".join(["be or not"] * 300 + ["zebra"] * 50)
    data = load_masked(write(tmp_path, text), [], 16, seed=0, vocabulary_size=60)
    # b, e, n, o, r, t and what continues: ##e, ##o, ##r, ##t; then be, or, no and not
    assert data.vocabulary_size == 5 + 4 + 6 + 4
    assert bool((data.test["targets"] == UNKNOWN).any()) and not bool((data.train["tokens"] == UNKNOWN).any())


def test_a_row_may_have_nothing_to_predict(tmp_path: Path) -> None:
    data = load_masked(write(tmp_path, made_text()), [], 5, seed=0, vocabulary_size=60)
    empty = (data.train["targets"] == -100).all(1).double().mean().item()
    assert empty == pytest.approx(0.85**3, abs=0.06)  # of about 1,100 rows: four standard deviations


def test_the_seed_decides_what_is_hidden_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_masked(write(tmp_path, made_text()), [], 16, seed=0, vocabulary_size=60)
    monkeypatch.setattr(masking, "train_wordpiece", None)  # it would be called to make the tokens anew
    torch.manual_seed(3)
    again, other = (load_masked(tmp_path / "a.txt", [], 16, seed=seed, vocabulary_size=60) for seed in (0, 1))
    for part in ("train", "test"):
        assert all(torch.equal(getattr(first, part)[name], getattr(again, part)[name]) for name in first.train)
    assert not torch.equal(first.train["targets"], other.train["targets"])
    whole = [torch.where(data.train["targets"] == -100, data.train["tokens"], data.train["targets"])
             for data in (first, other)]  # fmt: skip
    assert torch.equal(*whole)


def test_a_tokenizer_that_is_given_is_used(tmp_path: Path) -> None:
    tokenizer = train_wordpiece([made_text()], 60)
    tokenizer.add_special_tokens(["<extra>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = load_masked(write(tmp_path, made_text()), [], 16, seed=0, tokenizer=tmp_path)
    size = tokenizer.get_vocab_size()
    assert data.vocabulary_size == size and data.source.endswith(f"tokens of {tmp_path}/tokenizer.json")
    assert int(data.train["tokens"].max()) < size - 1  # a special token is never drawn


def test_a_tokenizer_that_hides_nothing_is_refused(tmp_path: Path) -> None:
    train_byte_pairs(["to be"], 260).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        DataError, match=r"tokenizer.json is not for masked text: it puts 0 tokens around a text and has no"
    ):
        load_masked(write(tmp_path, made_text()), [], 16, seed=0, tokenizer=tmp_path)


def test_too_short_a_text_is_told_with_the_numbers(tmp_path: Path) -> None:
    file = write(tmp_path, "be " * 100)
    with pytest.raises(
        DataError, match=r"^a from .* is too short: 90 tokens to train on and 10 to test with, and 14 of"
    ):
        load_masked(file, [], 16, seed=0)
    assert load_masked(file, [], 12, seed=0).test["tokens"].shape == (1, 12)


def test_the_help_texts_of_python_need_no_file() -> None:
    data = load_masked("python_docs", [], 32, seed=0, vocabulary_size=1000)
    assert data.vocabulary_size == 1000 and len(data.train["tokens"]) > 1000
    with torch.device("meta"):
        again = load_masked("python_docs", [], 32, seed=0, vocabulary_size=1000)
    assert all(torch.equal(data.train[name], again.train[name]) for name in data.train)
