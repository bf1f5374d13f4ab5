"""Small tokenizers of every kind that checkpoints have, trained on this file, each with added tokens of every kind."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

WORD = "\u2581"
TEXTS = [
    "Hello world",
    " leading",
    "trailing ",
    "a  b\n\n\tc",
    "é ñ ü Ünïcödé",
    "日本語 中文",
    "🙂🙂 ok",
    "don't 12345",
    "",
]
ADDED = [
    AddedToken("<|end|>", special=True, normalized=False),
    AddedToken("[L]", special=False, lstrip=True),
    AddedToken("[R]", special=True, rstrip=True),
    AddedToken("word", special=False, single_word=True, normalized=True),
    AddedToken("é", special=False, normalized=False),
    AddedToken("a b", special=False),
    AddedToken(f"{WORD}tool{WORD}", special=True),
    AddedToken("<|tool|>", special=False, normalized=False),
]


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    for token in ADDED:
        tokenizer.add_tokens([token])
    return tokenizer


def byte_level(*, prefix: bool = False, pattern: str | None = None, ignore_merges: bool = False) -> Tokenizer:
    """GPT-2's kind, or with words found by a pattern as in Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, words])
    else:
        tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [Path(__file__).read_text()],
        trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False),
    )
    if ignore_merges:
        tokenizer.model.ignore_merges = True
    return _with_added(tokenizer)


def sentencepiece(decoder: decoders.Decoder, *, scheme: str | None = None, legacy: bool = False) -> Tokenizer:
    """Llama 2's kind: byte fallback, `▁` for spaces, written by a pre-tokenizer or, formerly, by the normaliser."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([Path(__file__).read_text()], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = trained.model
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, *words, WORD, WORD * 2]))}
    state: dict[str, list[list[str]]] = json.loads(model.__getstate__())
    merges = [(left, right) for left, right in state["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD), normalizers.Replace(" ", WORD)])
    elif scheme is None:
        tokenizer.normalizer = normalizers.Replace(" ", WORD)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _with_added(tokenizer)


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), (WORD, -2.0), *((f"{WORD}{word}", -3.0) for word in ("Hello", "world", "a"))]
    pieces += [(character, -5.0 - number / 100) for number, character in enumerate("Helowrdabctn日本é")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_added(tokenizer)


def _steps(num_spaces: int | None) -> decoders.Decoder:
    steps = [decoders.Replace(WORD, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps if num_spaces is None else [*steps, decoders.Strip(" ", num_spaces, 0)])


PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level, prefix space": lambda: byte_level(prefix=True),
    "byte-level, pattern": lambda: byte_level(pattern=PATTERN),
    "byte-level, words first": lambda: byte_level(pattern=PATTERN, ignore_merges=True),
    "Llama, legacy": lambda: sentencepiece(_steps(1), legacy=True),
    "Llama, prepend first": lambda: sentencepiece(_steps(1), scheme="first"),
    "Llama, prepend never": lambda: sentencepiece(_steps(None), scheme="never"),
    "Gemma": lambda: sentencepiece(_steps(None)),
    "two spaces dropped": lambda: sentencepiece(_steps(2), scheme="always"),
    "Metaspace": lambda: sentencepiece(decoders.Metaspace(), scheme="always"),
    "Metaspace, never": lambda: sentencepiece(decoders.Metaspace(prepend_scheme="never"), scheme="never"),
    "bytes, then Metaspace": lambda: sentencepiece(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), scheme="first"
    ),
    "Unigram": unigram,
}


@cache
def small(kind: str) -> Tokenizer:
    """Shared: not to be changed."""
    return KINDS[kind]()
