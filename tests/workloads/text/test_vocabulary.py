"""Vocabularies are the same each time; what they make of a text is worked out by hand."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from torch_parallel.workloads.errors import DataError, DataNotFound
from torch_parallel.workloads.text.settings import SavedTokenizer, read_saved
from torch_parallel.workloads.text.vocabulary import (
    SPECIAL,
    encode_rows,
    encode_stream,
    number_of,
    pad_number,
    read_tokenizer,
    size_of,
    train_byte_pairs,
    train_wordpiece,
    without_threads,
)

ROOT = Path(__file__).parents[3]
# Words that tie with each other: that is where a trainer may go one way or another.
TIES = [f"{first}{second}{third} {third}{first}" for first in "abcdefg" for second in "hijklmn" for third in "opqrst"]

# What another process makes of them; in between it forks, and the library must not say anything of that.
IN_ANOTHER_PROCESS = """
import hashlib, json, os, sys
from torch_parallel.workloads.text.vocabulary import encode_rows, train_byte_pairs, train_wordpiece
texts = json.load(sys.stdin)
for train in train_wordpiece, train_byte_pairs:
    tokenizer = train(texts, 400)
    print(hashlib.md5(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest(), flush=True)
    encode_rows(tokenizer, texts, 4)
if os.fork() == 0:
    encode_rows(tokenizer, texts, 4)
    os._exit(0)
assert os.wait()[1] == 0
"""


def digest(vocabulary: dict[str, int]) -> str:
    return hashlib.md5(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


@pytest.mark.parametrize("train", [train_wordpiece, train_byte_pairs])
def test_the_same_vocabulary_each_time_and_whatever_the_order(train: Callable[[list[str], int], Tokenizer]) -> None:
    expected = train(TIES, 400).get_vocab()
    for seed in range(5):
        assert train(random.Random(seed).sample(TIES, len(TIES)), 400).get_vocab() == expected


def test_the_trainer_alone_would_give_others() -> None:
    """Should this fail, the trainer has become better, and ours may be simpler."""
    from tokenizers import models, pre_tokenizers, trainers

    found = set()
    for _ in range(20):
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.train_from_iterator(TIES, trainers.WordPieceTrainer(vocab_size=400, show_progress=False))
        found.add(digest(tokenizer.get_vocab()))
    assert len(found) > 1


@pytest.mark.exhaustive
def test_the_same_vocabulary_in_another_process_and_silence_where_it_forks() -> None:
    expected = [digest(train(TIES, 400).get_vocab()) for train in (train_wordpiece, train_byte_pairs)]
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_PROCESS], cwd=ROOT, env=environment, input=json.dumps(TIES),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.split() == expected


def test_a_wordpiece_vocabulary_by_hand() -> None:
    """Special tokens, what continues a word, what begins one, then pairs: the most frequent first."""
    vocabulary = train_wordpiece(["ab ab ab", "AB ac", "é"], 20).get_vocab()
    in_order = sorted(vocabulary, key=lambda token: vocabulary[token])
    # a is left of b four times and of c once
    assert in_order == [*SPECIAL, "##b", "##c", "a", "b", "c", "e", "ab", "ac"]


def test_the_vocabulary_is_never_larger_than_asked_for() -> None:
    texts = ["".join(chr(0x4E00 + index) for index in range(300)), "aaaaaaaaaa bbb cc d", "aaaaaaaaaa bbb cc d"]
    vocabulary = train_wordpiece(texts, 20).get_vocab()
    # five characters may stay, a quarter of 20: the letters, and of those that came once the one of the lowest code
    assert len(vocabulary) == 20
    assert {token for token in vocabulary if len(token) == 1} == {"a", "b", "c", "d", chr(0x4E00)}
    assert train_byte_pairs(texts, 256).get_vocab_size() == 256


@pytest.mark.parametrize(("train", "size", "least"), [(train_wordpiece, 19, 20), (train_byte_pairs, 255, 256)])
def test_too_small_a_vocabulary(train: Callable[[list[str], int], Tokenizer], size: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"^vocabulary_size is {size}; at least {least} is wanted"):
        train(["a"], size)


def test_rows_are_cut_and_filled_up() -> None:
    tokenizer = train_wordpiece(["ab ab ab", "AB ac", "é"], 20)
    number = tokenizer.get_vocab()
    tokens, mask = encode_rows(tokenizer, ["É ab", "a b c e ab", "ab?", "[PAD]"], 5)
    assert tokens.dtype == torch.int32 and mask.dtype == torch.bool
    assert tokens.tolist() == [
        [2, number["e"], number["ab"], 3, 0],
        [2, number["a"], number["b"], number["c"], 3],
        [2, number["ab"], 1, 3, 0],  # "?" is unknown
        [2, 1, 1, 1, 3],  # somebody's brackets are no special token
    ]
    assert mask.sum(1).tolist() == [4, 5, 4, 5]
    assert encode_stream(tokenizer, ["ab a", "b"]).tolist() == [number["ab"], number["a"], number["b"]]
    assert encode_stream(tokenizer, []).tolist() == []


def test_many_rows_and_few_are_the_same() -> None:
    tokenizer = train_wordpiece(TIES, 100)
    texts = [TIES[index % len(TIES)] for index in range(2500)]
    tokens, mask = encode_rows(tokenizer, texts, 8)
    for index in (0, 1023, 1024, 2047, 2048, 2499):
        alone = encode_rows(tokenizer, texts[index : index + 1], 8)
        assert torch.equal(tokens[index], alone[0][0]) and torch.equal(mask[index], alone[1][0])


def test_byte_pairs_give_every_text_back() -> None:
    tokenizer = train_byte_pairs(["the cat and the dog\n"], 300)
    text = "the \t dög\n\n\U0001f600"
    assert tokenizer.decode(encode_stream(tokenizer, [text]).tolist()) == text


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("true", None):
        if before is None:
            monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        else:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        encode_rows(train_wordpiece(["a b"], 20), ["a"], 3)
        with pytest.raises(KeyError), without_threads():
            assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
            raise KeyError
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before


def test_a_saved_tokenizer_does_the_same(tmp_path: Path) -> None:
    trained = train_wordpiece(TIES, 100)
    trained.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        read = read_tokenizer(read_saved(path))
        assert torch.equal(encode_rows(read, TIES, 6)[0], encode_rows(trained, TIES, 6)[0])
    assert (size_of(read), pad_number(read), number_of(read, ["nothing", "[MASK]"])) == (100, 0, 4)


def test_pad_is_as_the_tokenizer_says() -> None:
    tokenizer = train_byte_pairs(["ab"], 256)
    assert pad_number(tokenizer) == 0
    tokenizer.add_special_tokens(["<pad>"])
    assert (pad_number(tokenizer), size_of(tokenizer)) == (256, 257)
    tokenizer.enable_padding(pad_id=7)
    assert pad_number(tokenizer) == 7


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        DataNotFound, match=f"^tokenizer {tmp_path}/tokenizer.json was not found; name a tokenizer.json"
    ):
        read_saved(tmp_path)
    with pytest.raises(
        DataError, match=r"^x.json is no tokenizer that can be read \(.*\); save it once more$"
    ) as error:
        read_tokenizer(SavedTokenizer(Path("x.json"), b"{}"))
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_cannot_read_a_text() -> None:
    from tokenizers import models

    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(DataError, match=r"^the tokenizer cannot read this text \(.*UNK.*\); take another one"):
        encode_rows(tokenizer, ["b"], 3)
