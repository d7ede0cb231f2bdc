"""From text to numbers: a vocabulary trained on the training text, or a tokenizer that somebody saved.

All of it is done once, in the process that starts the workers. The `tokenizers` library does it without threads of its
own: it would warn in every process that is forked later.

Its WordPiece trainer gives another vocabulary each time it runs. It numbers the characters that continue a word (##a)
in the order of a hash table, and these numbers decide between pairs that are equally frequent. So it runs twice here:
once to learn which of these characters there are, and again with their numbers given.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_parallel.workloads.errors import DataError
from torch_parallel.workloads.text.settings import SavedTokenizer, Settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNKNOWN, BEGIN, END, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # numbers 0 to 4
LEAST_LENGTH = 3  # [CLS], a token, [SEP]
PAD_NAMES = (PAD, "<pad>", "<|pad|>", "<|endoftext|>", "</s>")
LEAST_WORDPIECE = 20
LEAST_BYTE_PAIRS = 256
BATCH_ROWS = 1024  # that are tokenised at once: the library needs some 100 bytes a token until they are tensors
_THREADS = "TOKENIZERS_PARALLELISM"
_lock = threading.Lock()


@contextmanager
def without_threads() -> Iterator[None]:
    """The tokenizers library runs without threads of its own; the caller's environment is as it was afterwards."""
    with _lock:
        before = os.environ.get(_THREADS)
        os.environ[_THREADS] = "false"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_THREADS]
            else:
                os.environ[_THREADS] = before


def train_wordpiece(texts: Sequence[str], vocabulary_size: int) -> Tokenizer:
    """A lower-case WordPiece tokenizer with at most `vocabulary_size` tokens; SPECIAL are the first. It gives a text as
    [CLS] ... [SEP].

    The same for the same texts, in whatever order. The rarest characters have no token where there are more than a
    quarter of `vocabulary_size`. Raises ValueError if that is below 20.
    """
    if vocabulary_size < LEAST_WORDPIECE:
        raise ValueError(f"vocabulary_size is {vocabulary_size}; at least {LEAST_WORDPIECE} is wanted: give more")
    normalizer = _wordpiece_of({}).normalizer
    with without_threads():
        prepared = _frequent_characters([normalizer.normalize_str(text) for text in texts], vocabulary_size // 4)
        continuing = [token for token in _wordpieces(prepared, list(SPECIAL), 0) if token.startswith("##")]
        vocabulary = _wordpieces(prepared, [*SPECIAL, *sorted(continuing)], vocabulary_size)
    return _wordpiece_of(vocabulary)


def _wordpieces(texts: Sequence[str], first: list[str], size: int) -> dict[str, int]:
    """A trained vocabulary of normalized texts: `first`, all their characters, and more up to `size`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def _wordpiece_of(vocabulary: dict[str, int]) -> Tokenizer:
    """SPECIAL are plain entries of it, so that "[MASK]" in somebody's text is five characters and no mask."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing((END, SPECIAL.index(END)), (BEGIN, SPECIAL.index(BEGIN)))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _frequent_characters(texts: Sequence[str], most: int) -> list[str]:
    """The texts with blanks for all but the `most` frequent characters; equally frequent ones by their code."""
    counted: Counter[str] = Counter()
    for text in texts:
        counted.update(text)
    characters = sorted((each for each in counted if not each.isspace()), key=lambda each: (-counted[each], each))
    blanks = {ord(each): " " for each in characters[most:]}
    return [text.translate(blanks) for text in texts] if blanks else list(texts)


def train_byte_pairs(texts: Sequence[str], vocabulary_size: int) -> Tokenizer:
    """A tokenizer of byte pairs with at most `vocabulary_size` tokens, 256 of them single bytes: no text is unknown.

    The same for the same texts, in whatever order. Raises ValueError if there is no room for all bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary_size < LEAST_BYTE_PAIRS:
        raise ValueError(f"vocabulary_size is {vocabulary_size}; at least {LEAST_BYTE_PAIRS} is wanted, one a byte")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, initial_alphabet=alphabet, show_progress=False)
    with without_threads():
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_for(
    settings: Settings, texts: Sequence[str], train: Callable[[Sequence[str], int], Tokenizer]
) -> Tokenizer:
    """The saved one, if one is given; else one that `train` makes of the texts."""
    return read_tokenizer(settings.saved) if settings.saved else train(texts, settings.vocabulary_size)


def read_tokenizer(saved: SavedTokenizer) -> Tokenizer:
    """Raises DataError, one line that names the file, if it holds no tokenizer."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(saved.content)
    except Exception as error:  # the library raises no other type
        raise DataError(f"{saved.file} is no tokenizer that can be read ({_line(error)}); save it once more") from error


def size_of(tokenizer: Tokenizer) -> int:
    """One more than the largest number of a token: there may be gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def number_of(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    """The number of the first of `names` that is a token."""
    numbers = (tokenizer.token_to_id(name) for name in names)
    return next((number for number in numbers if number is not None), None)


def pad_number(tokenizer: Tokenizer) -> int:
    """What rows are filled up with: as the tokenizer says, else the token of a usual name, else 0."""
    if tokenizer.padding:
        return int(tokenizer.padding["pad_id"])
    return number_of(tokenizer, PAD_NAMES) or 0


def encode_rows(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
    """Tokens int32 [n, length], one row a text, cut or filled up; and a mask, True where a token is."""
    tokenizer.enable_padding(length=length, pad_id=pad_number(tokenizer))
    tokenizer.enable_truncation(length)
    tokens = torch.empty(len(texts), length, dtype=torch.int32, device="cpu")
    mask = torch.empty(len(texts), length, dtype=torch.bool, device="cpu")
    for begin in range(0, len(texts), BATCH_ROWS):
        rows = slice(begin, begin + BATCH_ROWS)
        encoded = _encode(tokenizer, texts[rows], whole=True)
        tokens[rows] = torch.tensor([each.ids for each in encoded], dtype=torch.int32, device="cpu")
        mask[rows] = torch.tensor([each.attention_mask for each in encoded], dtype=torch.bool, device="cpu")
    return tokens, mask


def encode_stream(tokenizer: Tokenizer, pieces: Sequence[str]) -> Tensor:
    """The tokens of all pieces, one after the other, int32 [n], without those that begin and end a text."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    streams = [torch.empty(0, dtype=torch.int32, device="cpu")]
    for piece in pieces:
        (encoded,) = _encode(tokenizer, [piece], whole=False)
        streams.append(torch.tensor(encoded.ids, dtype=torch.int32, device="cpu"))
    return torch.cat(streams)


def _encode(tokenizer: Tokenizer, texts: Sequence[str], whole: bool) -> list[Any]:
    """`whole` texts get the tokens that begin and end one."""
    with without_threads():
        try:
            return tokenizer.encode_batch_fast(texts, add_special_tokens=whole)
        except Exception as error:  # the library raises no other type
            raise DataError(f"the tokenizer cannot read this text ({_line(error)}); take another one") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
