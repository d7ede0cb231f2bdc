"""CSV files to tensors: names, parts, repeats, the vocabulary's training text, the cache, the real ones."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from torch_parallel.workloads.errors import DataError, DataNotFound
from torch_parallel.workloads.text import classification, load_csv
from torch_parallel.workloads.text.vocabulary import train_wordpiece

REAL_FOLDER = os.environ.get("TORCH_PARALLEL_DATA", "")
WORDS = {"sport": "goal team ball player match", "tech": "chip code phone screen data"}


def made_rows(count: int = 40) -> list[tuple[str, str]]:
    """Two classes in turn, each text with a number of its own, so that no two are the same."""
    draw = random.Random(0)
    names = [("sport", "tech")[index % 2] for index in range(count)]
    return [(name, f"{' '.join(draw.sample(WORDS[name].split(), 3))} n{index}") for index, name in enumerate(names)]


def write(file: Path, rows: list[tuple[str, str]], header: str = "category,text\n") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(header + "".join(f"{name},{text}\n" for name, text in rows), encoding="utf-8")
    return file


def write_ag_news(folder: Path, train: list[int], test: list[int] | None) -> None:
    """Rows of these classes in the form of AG news: no header, everything in quotes."""
    folder.mkdir(parents=True)
    for name, labels in (("train", train), ("test", test)):
        if labels is not None:
            rows = [f'"{label}","Title {name}","Text {index}, of it"' for index, label in enumerate(labels)]
            (folder / f"{name}.csv").write_text("\n".join(rows), encoding="utf-8")


def saved_tokenizer(folder: Path) -> tuple[Path, Tokenizer]:
    """Of all texts, so that its tokens can be read back whatever the split."""
    tokenizer = train_wordpiece([text for _, text in made_rows()], 400)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json", tokenizer


def texts_of(part: dict[str, torch.Tensor], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([each for each in row.tolist() if each > 4]) for row in part["tokens"]]


@pytest.mark.parametrize("place", ["bbc-text.csv", "text/bbc_text.csv", "bbc_text/bbc-text.csv"])
def test_bbc_text_is_found_split_and_tokenised(place: str, tmp_path: Path) -> None:
    file = write(tmp_path / place, made_rows())
    tokenizer_file, tokenizer = saved_tokenizer(tmp_path)
    data = load_csv("bbc_text", [tmp_path / "nowhere", tmp_path], 10, seed=0, tokenizer=tokenizer_file)
    assert (data.name, data.task, data.length, data.unit) == ("bbc_text", "classification", 10, "token")
    assert data.source == f"{file} (tokens of {tokenizer_file})"
    assert data.class_names == ("sport", "tech") and data.vocabulary_size == tokenizer.get_vocab_size()
    # a tenth of 20, twice
    assert data.train["tokens"].shape == (36, 10) and data.test["tokens"].shape == (4, 10)
    assert [data.train[name].dtype for name in ("tokens", "mask", "labels")] == [torch.int32, torch.bool, torch.int64]
    assert data.test["labels"].tolist().count(0) == 2
    read = {}
    for part in (data.train, data.test):
        names = [data.class_names[label] for label in part["labels"].tolist()]
        read |= dict(zip(texts_of(part, tokenizer), names, strict=True))
        assert torch.equal(part["mask"], part["tokens"] != 0) and part["tokens"][:, 0].eq(2).all()
    assert read == {text: name for name, text in made_rows()}


def test_the_vocabulary_is_of_the_training_texts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def train(texts: list[str], size: int) -> Tokenizer:
        seen.append(list(texts))
        return train_wordpiece(texts, size)

    monkeypatch.setattr(classification, "train_wordpiece", train)
    data = load_csv(write(tmp_path / "a.csv", made_rows()), [], 10, seed=0, vocabulary_size=60)
    assert len(seen[0]) == 36 == len(data.train["labels"]) and data.vocabulary_size == 60
    assert data.source == f"{tmp_path}/a.csv (WordPiece tokens trained on the training texts)" and data.name == "a"
    assert int(data.test["tokens"].max()) < 60


def test_the_seed_alone_decides_on_the_split(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", made_rows())
    tokenizer = saved_tokenizer(tmp_path)[0]
    first, other = (load_csv(file, [], 10, seed=seed, tokenizer=tokenizer) for seed in (0, 1))
    shutil.rmtree(tmp_path / ".torch_parallel_cache")
    torch.manual_seed(5)
    again = load_csv(file, [], 10, seed=0, tokenizer=tokenizer)
    assert all(torch.equal(first.test[name], again.test[name]) for name in first.test)
    assert not torch.equal(first.test["tokens"], other.test["tokens"])


def test_no_text_is_both_trained_on_and_tested_with(tmp_path: Path) -> None:
    """Every text twice, once with other white space; one of them under two categories."""
    rows = [*made_rows(), *((name, f"  {text.replace(' ', '   ')} ") for name, text in made_rows())]
    rows[41] = ("sport", rows[41][1])  # row 1 says tech
    tokenizer_file, tokenizer = saved_tokenizer(tmp_path)
    for seed in range(5):
        data = load_csv(write(tmp_path / "a.csv", rows), [], 10, seed=seed, test_part=0.5, tokenizer=tokenizer_file)
        train, test = (texts_of(part, tokenizer) for part in (data.train, data.test))
        assert sorted(train + test) == sorted({text for _, text in made_rows()} - {made_rows()[1][1]})
    assert (
        "39 repeated rows left out; 1 text under several categories left out (the first is in line 3);" in data.source
    )


def test_a_test_file_of_its_own(tmp_path: Path) -> None:
    rows = made_rows()
    write(tmp_path / "own/train.csv", [*rows[:30], *rows[:2], ("tech", "both"), ("sport", "both")])
    write(tmp_path / "own/test.csv", [*rows[30:], rows[0], rows[30], ("tech", "both")])
    tokenizer_file, tokenizer = saved_tokenizer(tmp_path)
    data = load_csv("own", [tmp_path], 10, seed=0, tokenizer=tokenizer_file)
    assert texts_of(data.train, tokenizer) == [text for _, text in rows[:30]]
    assert texts_of(data.test, tokenizer) == [text for _, text in rows[30:]]
    assert data.name == "own" and data.source == (
        f"{tmp_path}/own/train.csv and {tmp_path}/own/test.csv (2 repeated rows of train.csv left out; "
        "1 text of train.csv under several categories left out (the first is in line 34); "
        "1 repeated row of test.csv left out; 2 test texts left out that training has; "
        f"tokens of {tokenizer_file})"
    )


def test_a_test_file_that_does_not_fit(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", made_rows())
    write(tmp_path / "test.csv", [("sport", "new"), ("art", "newer")])
    with pytest.raises(
        DataError, match=rf"^{tmp_path}/test.csv, line 3: its category 'art' is not .*\(sport, tech\); co"
    ):
        load_csv(tmp_path, [], 10, seed=0)
    write(tmp_path / "test.csv", made_rows()[:3])
    with pytest.raises(DataError, match=f"^{tmp_path}/test.csv cannot be used: training has all of its texts; give"):
        load_csv(tmp_path, [], 10, seed=0)
    assert not (tmp_path / ".torch_parallel_cache").exists()


@pytest.mark.parametrize("place", ["ag_news", "text/ag_news_csv"])
def test_ag_news_in_its_own_form(place: str, tmp_path: Path) -> None:
    write_ag_news(tmp_path / place, [3, 4, 1, 2] * 5, [4, 3])
    data = load_csv("ag_news", [tmp_path], 16, seed=0, vocabulary_size=100)
    assert data.class_names == ("World", "Sports", "Business", "Sci/Tech")
    assert data.train["labels"].tolist() == [2, 3, 0, 1] * 5 and data.test["labels"].tolist() == [3, 2]
    # [CLS] title train text <number> , of it [SEP]
    assert data.train["mask"].sum(1).tolist()[0] == 9


def test_ag_news_without_its_test_file_is_split(tmp_path: Path) -> None:
    write_ag_news(tmp_path / "ag_news", [3, 4, 1, 2] * 5, None)
    data = load_csv("ag_news", [tmp_path], 16, seed=0, vocabulary_size=100, test_part=0.2)
    assert sorted(data.test["labels"].tolist()) == [0, 1, 2, 3] and len(data.train["labels"]) == 16


def test_a_long_text_is_cut_and_a_short_one_filled_up(tmp_path: Path) -> None:
    rows = [("a", "word " * 10_000), ("a", "word"), ("b", "another"), ("b", "other")]
    data = load_csv(write(tmp_path / "a.csv", rows), [], 12, seed=0, vocabulary_size=100)
    masks = torch.cat([data.train["mask"], data.test["mask"]]).sum(1).tolist()
    assert sorted(masks)[-1] == 12 and 3 <= sorted(masks)[0] <= 6


def test_the_cache_is_used_and_is_as_good_as_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.csv", [*made_rows(), made_rows()[0]])
    first = load_csv(file, [], 10, seed=0, vocabulary_size=60)
    monkeypatch.setattr(classification, "read_table", None)  # it would be called to make it anew
    again = load_csv(file, [], 10, seed=0, vocabulary_size=60)
    assert all(torch.equal(first.train[name], again.train[name]) for name in first.train)
    assert (first.source, first.class_names, first.vocabulary_size) == (
        again.source, again.class_names, again.vocabulary_size
    )  # fmt: skip
    for changed in ({"length": 11}, {"seed": 1}, {"vocabulary_size": 61}, {"test_part": 0.2}):
        with pytest.raises(TypeError):
            load_csv(file, [], **{"length": 10, "seed": 0, "vocabulary_size": 60} | changed)  # type: ignore[arg-type]
    write(file, made_rows())
    with pytest.raises(TypeError):
        load_csv(file, [], 10, seed=0, vocabulary_size=60)


def test_another_default_device_changes_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", made_rows())
    usual = load_csv(file, [], 10, seed=0, vocabulary_size=60)
    shutil.rmtree(tmp_path / ".torch_parallel_cache")
    with torch.device("meta"):
        made = load_csv(file, [], 10, seed=0, vocabulary_size=60)
        read = load_csv(file, [], 10, seed=0, vocabulary_size=60)
    for name in usual.train:
        assert torch.equal(usual.train[name], made.train[name]) and torch.equal(usual.train[name], read.train[name])


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        DataNotFound, match=rf"^bbc_text was not found: looked for bbc-text.csv, .* in {tmp_path}, .*text;"
    ):
        load_csv("bbc_text", [tmp_path], 10, seed=0)
    with pytest.raises(DataNotFound, match=r"^bbc is no file, and none of bbc_text, ag_news: looked for bbc in"):
        load_csv("bbc", [tmp_path], 10, seed=0)
    with pytest.raises(DataNotFound, match=f"^{tmp_path} has no train.csv; put it there"):
        load_csv(tmp_path, [], 10, seed=0)
    with pytest.raises(DataNotFound, match=f"^tokenizer {tmp_path}/x was not found"):
        load_csv("bbc_text", [tmp_path], 10, seed=0, tokenizer=tmp_path / "x")


def test_a_text_without_a_token_is_named(tmp_path: Path) -> None:
    from tokenizers import models, pre_tokenizers

    bare = Tokenizer(models.WordLevel({"goal": 0, "?": 1}, unk_token="?"))
    bare.pre_tokenizer = pre_tokenizers.Split("none", "removed")
    bare.save(str(tmp_path / "tokenizer.json"))
    file = write(tmp_path / "a.csv", [("a", "goal"), ("a", "none"), ("b", "x"), ("b", "y")])
    with pytest.raises(DataError, match=f"^{file}, line 3: the tokenizer makes no token of its text; delete the row"):
        load_csv(file, [], 10, seed=0, tokenizer=tmp_path)


@pytest.mark.exhaustive
def test_the_real_one_where_there_is_one(tmp_path: Path) -> None:
    """With TORCH_PARALLEL_DATA naming a folder with BBC news: that, copied, for the cache; else made rows."""
    real = [Path(REAL_FOLDER) / below / "bbc-text.csv" for below in ("", "text") if REAL_FOLDER]
    found = next((file for file in real if file.is_file()), None)
    if found is None:
        write(tmp_path / "bbc-text.csv", made_rows())
    else:
        shutil.copyfile(found, tmp_path / "bbc-text.csv")
    data = load_csv("bbc_text", [tmp_path], 16, seed=0, tokenizer=saved_tokenizer(tmp_path)[0])
    counts = torch.cat([data.train["labels"], data.test["labels"]]).bincount().tolist()
    if found is None:
        assert counts == [20, 20]
    else:
        # of 2,225 articles 2,126 are different, and two of these in white space alone
        assert sum(counts) == 2124 and "101 repeated rows left out" in data.source
        assert data.class_names == ("business", "entertainment", "politics", "sport", "tech")
