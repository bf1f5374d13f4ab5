"""Tokenizers of `tiktoken.model`, `tekken.json` and GGUF files: ids of the `tiktoken` package, or of the tokenizer.json
that the file was made from; special tokens, errors."""

import base64
import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from antiphon.base.errors import CheckpointError
from antiphon.serve.text.tokenizer_formats import _PATTERNS, KIMI_PATTERN
from antiphon.serve.text.tokenizer_reading import load_tokenizer

TEXT = (
    "The experts of a mixture are chosen token by token, and it's the router's choice which of them work together. "
    "Kimi的专家模型很大，世界很大，模型的世界。 Ünïcödé ñandú; русский текст, a 12345 b 678.\n\n"
    "    def f(x):\n\treturn x"
)
NUM_MERGES = 120
SPECIAL = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    255: ("[PAD]", True),
}
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m['content'] }}<|im_end|>{% endfor %}"


def trained_ranks() -> dict[bytes, int]:
    """All bytes in an order of their own, then what byte-pair training joins in `TEXT`."""
    order = list(range(256))
    random.Random(1).shuffle(order)
    ranks = {bytes([byte]): rank for rank, byte in enumerate(order)}
    words = [[bytes([byte]) for byte in word.encode()] for word in TEXT.replace(" ", "\0 ").split("\0")]
    while len(ranks) < 256 + NUM_MERGES:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.setdefault(left + right, len(ranks))
        words = [joined(word, left, right) for word in words]
    return ranks


def joined(word: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    out: list[bytes] = []
    for part in word:
        if out and out[-1] == left and part == right:
            out[-1] = left + right
        else:
            out.append(part)
    return out


RANKS = trained_ranks()


def write(folder: Path, ranks: dict[bytes, int] = RANKS, **changes: Any) -> Path:
    """A folder as Kimi-K2 is published: ranks, a config that names code, and that code, which must not run."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {str(len(ranks) + i): {"content": text, "special": special} for i, (text, special) in SPECIAL.items()}
    config = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": {"__type": "AddedToken", "content": "[EOS]", "special": True},
        "chat_template": TEMPLATE,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('code of a checkpoint was run')")
    return folder


def texts(count: int) -> list[str]:
    """Pieces of `TEXT`, letters of many kinds, white space, special tokens, and any characters at all."""
    generator = random.Random(2)
    letters = [*"aabeé  \n\r\t'tS's12３你好，ñ\u0301вД🙂\u200d_-()|", "<|im_end|>", "[BOS]", "<|im_end", *TEXT]
    made = ["", " ", "\n"]
    for _ in range(count):
        start = generator.randrange(len(TEXT))
        made.append(TEXT[start : start + generator.randrange(80)])
        made.append("".join(generator.choice(letters) for _ in range(generator.randrange(40))))
        made.append("".join(chr(generator.randrange(1, 0xD800)) for _ in range(generator.randrange(12))))
    return made


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(write(tmp_path))
    special = {f"<|reserved_token_{len(RANKS) + i}|>": len(RANKS) + i for i in range(256) if i not in SPECIAL}
    special |= {text: len(RANKS) + i for i, (text, _) in SPECIAL.items()}
    theirs = tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=RANKS, special_tokens=special)
    assert tokenizer.vocab_size == theirs.n_vocab == len(RANKS) + 256
    for text in texts(1000):
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, allowed_special="all"), text


def test_texts_come_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path))
    for text in texts(200):
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode(TEXT, add_special_tokens=False)) < len(TEXT.encode()) / 2


def test_special_tokens_have_the_ids_behind_the_ranks(tmp_path: Path) -> None:
    tokenizer, first = load_tokenizer(write(tmp_path)), len(RANKS)
    ids = tokenizer.encode("[BOS]<|im_user|>a<|tool_calls_section_begin|>[PAD]", add_special_tokens=True)
    assert ids == [first, first + 3, RANKS[b"a"], first + 11, first + 255]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|tool_calls_section_begin|>"
    assert tokenizer.token_string(first + 7) == f"<|reserved_token_{first + 7}|>"
    moonlight = {"AutoTokenizer": ["moonshotai/Moonlight--tokenization_moonshot.TikTokenTokenizer", None]}
    assert load_tokenizer(write(tmp_path, auto_map=moonlight)).vocab_size == first + 258


def test_the_chat_template_is_found(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path))
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.special_tokens == {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    several = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    assert load_tokenizer(write(tmp_path, chat_template=several)).template_sources == {"tools": "a", "default": "b"}
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(tmp_path).chat_template == "from the file"


def test_a_tokenizer_json_is_preferred(tmp_path: Path) -> None:
    """It is what a tokenizer made for unknown code can be converted to."""
    backend = load_tokenizer(write(tmp_path)).backend
    write(tmp_path, auto_map={"AutoTokenizer": ["tokenization_other.Tokenizer", None]})
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("a<|im_end|>", add_special_tokens=False) == [RANKS[b"a"], len(RANKS) + 2]


def write_tekken(folder: Path, **changes: Any) -> Path:
    """As Mistral publishes it: special tokens first, more ranks than are used."""
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in RANKS.items()]
    num_special = 20
    config = {"pattern": KIMI_PATTERN, "default_num_special_tokens": num_special, "version": "v7"}
    config["default_vocab_size"] = num_special + len(RANKS)
    special = [{"rank": i, "token_str": text} for i, text in enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])]
    content = {"config": config, "vocab": [*vocab, {"rank": 9, "token_bytes": ""}], "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(content | changes))
    return folder


def test_tekken_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(write_tekken(tmp_path))
    theirs = tiktoken.Encoding("tekken", pat_str=KIMI_PATTERN, mergeable_ranks=RANKS, special_tokens={})
    assert tokenizer.vocab_size == 20 + len(RANKS)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for text in texts(300):
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == [1, *(20 + token_id for token_id in theirs.encode(text, disallowed_special=()))], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.encode("[INST]a</s>", add_special_tokens=False) == [3, 20 + RANKS[b"a"], 2]
    assert tokenizer.token_string(7) == "<SPECIAL_7>"


def without(token: bytes) -> dict[bytes, int]:
    kept = [other for other in RANKS if other != token]
    return {other: rank for rank, other in enumerate(kept)}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda folder: write(folder, auto_map={"AutoTokenizer": ["tokenization_other.Tokenizer", None]}),
            "tiktoken.model: made for the code 'tokenization_other', which is not run: only tokenization_kimi and "
            "tokenization_moonshot are known, convert the tokenizer, so that the folder has a tokenizer.json",
        ),
        (
            lambda folder: (write(folder) / "tiktoken.model").write_text("YQ== 0\nno rank\n"),
            "tiktoken.model: line 2 is damaged: download it again",
        ),
        (
            lambda folder: (write(folder) / "tiktoken.model").write_text("YQ== 0\n!?== 1\n"),
            "tiktoken.model: line 2 is damaged: download it again",
        ),
        (
            lambda folder: write(folder, {token: 2 * rank for token, rank in RANKS.items()}),
            "tiktoken.model: the ranks of its 376 tokens are not 0, 1, 2, ...: download it again",
        ),
        (
            lambda folder: write(folder, without(b"\x07")),
            "tiktoken.model: has no token for the byte 7: download it again",
        ),
        (
            lambda folder: write_tekken(folder, special_tokens=None),
            "tekken.json: names no special tokens, as its first versions did: convert it, so that there is a "
            "tokenizer.json",
        ),
        (
            lambda folder: write_tekken(folder, vocab=[{"rank": 0}]),
            "tekken.json: damaged (KeyError: 'token_bytes'): download it again",
        ),
        (
            lambda folder: write(folder, added_tokens_decoder={"5": {"content": "[BOS]"}}),
            "tokenizer_config.json: added_tokens_decoder has the id 5: special tokens of this tokenizer lie from 376 "
            "to 631, download it and tiktoken.model again",
        ),
    ],
)
def test_damaged_files_are_one_line(make: Callable[[Path], object], expected: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == expected


# --- GGUF ---

GGUF_SPECIAL = ["<|endoftext|>", "<｜begin▁of▁sentence｜>", "<|im_end|>"]
GGUF_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHARACTERS = "abcdefgh ABC 0123456789 \n\t\r.,!?'\"_-/()[]{}<>|é ñüß日本語中文한국어🙂 \u0301\u00a0's'll"


def gguf_texts(count: int) -> list[str]:
    generator = random.Random(4)
    words = [
        "Hello",
        " world",
        "don't",
        "I'LL",
        "  ",
        "\n\n",
        "12345",
        "x = f(y)",
        "日本語",
        "\t\t",
        *GGUF_SPECIAL,
        "e\u0301",
    ]
    return [
        "".join(
            generator.choice(words) if generator.random() < 0.3 else generator.choice(CHARACTERS)
            for _ in range(generator.randrange(40))
        )
        for _ in range(count)
    ]


def trained(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "olmo"):
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(gguf_texts(2000), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in GGUF_SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str) -> None:
    """What llama.cpp's conversion writes of a byte-level tokenizer."""
    described = json.loads(tokenizer.to_str())
    ids = {number: text for text, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    added = {token["id"]: token["special"] for token in described["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([ids[number] for number in range(len(ids))])
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    writer.add_token_types(
        [kinds[added[number]] if number in added else gguf.TokenType.NORMAL for number in range(len(ids))]
    )
    merges = described["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.token_to_id(GGUF_SPECIAL[1]))
    writer.add_eos_token_id(tokenizer.token_to_id(GGUF_SPECIAL[2]))
    writer.add_chat_template(GGUF_TEMPLATE)


def write_gguf(file: Path, tokenizer: Tokenizer, pre: str, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(file, "qwen3moe")
    add_tokenizer(writer, tokenizer, pre)
    for key, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


PRES = ["qwen2", "llama-bpe", "gpt-4o", "deepseek-v3", "deepseek-llm", "olmo", "refact", "kimi-k2"]


@pytest.mark.parametrize("pre", PRES)
def test_ids_are_those_of_the_tokenizer_it_was_made_from(pre: str, tmp_path: Path) -> None:
    source = trained(pre)
    loaded = load_tokenizer(write_gguf(tmp_path / "model.gguf", source, pre))
    for text in gguf_texts(1500):
        ids = loaded.encode(text, add_special_tokens=False)
        assert ids == source.encode(text, add_special_tokens=False).ids, text
        assert loaded.decode(ids, skip_special_tokens=True) == source.decode(ids, skip_special_tokens=True)
    assert loaded.template_sources == GGUF_TEMPLATE
    assert loaded.special_tokens == {"bos_token": GGUF_SPECIAL[1], "eos_token": GGUF_SPECIAL[2]}


@pytest.mark.slow
@pytest.mark.parametrize("pre", PRES)
def test_ids_of_ten_thousand_texts(pre: str, tmp_path: Path) -> None:
    source = trained(pre)
    loaded = load_tokenizer(write_gguf(tmp_path / "model.gguf", source, pre))
    for text in gguf_texts(10_000):
        assert loaded.encode(text, add_special_tokens=False) == source.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("adds", [True, False])
def test_the_first_token_as_the_file_states_it(adds: bool, tmp_path: Path) -> None:
    source = trained("qwen2")
    loaded = load_tokenizer(write_gguf(tmp_path / "model.gguf", source, "qwen2", add_bos_token=adds))
    plain = source.encode("Hello", add_special_tokens=False).ids
    assert loaded.encode("Hello", add_special_tokens=True) == [*([source.token_to_id(GGUF_SPECIAL[1])] * adds), *plain]


def test_words_and_the_first_token_of_llama_3(tmp_path: Path) -> None:
    """A word of the vocabulary that no merges lead to is one token; texts begin with BOS, though no key says it."""
    source = trained("llama-bpe")
    described = json.loads(source.to_str())
    vocabulary = described["model"]["vocab"]
    word = max((text for text in vocabulary if text.isascii() and text.isalpha()), key=len)
    described["model"]["merges"] = [pair for pair in described["model"]["merges"] if "".join(pair) != word]
    plain = Tokenizer.from_str(json.dumps(described))
    assert len(plain.encode(word, add_special_tokens=False).ids) > 1
    loaded = load_tokenizer(write_gguf(tmp_path / "model.gguf", plain, "llama-bpe"))
    assert loaded.encode(word, add_special_tokens=True) == [plain.token_to_id(GGUF_SPECIAL[1]), vocabulary[word]]


def test_an_unknown_pattern_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", trained("qwen2"), "jais-2")
    with pytest.raises(CheckpointError, match=r"model.gguf: tokenizer.ggml.pre = 'jais-2' is not known: put"):
        load_tokenizer(file)


def test_merges_that_are_no_pairs_are_one_line(tmp_path: Path) -> None:
    """The library's own message has several."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b"])
    writer.add_token_merges(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path / "model.gguf")
    message = str(caught.value)
    assert message.endswith("download the file again")
    assert "\n" not in message


def test_words_of_deepseeks_first_vocabularies() -> None:
    """Digits alone, Chinese apart, no letters of scripts that it does not count as having case."""
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS["deepseek-llm"]]
    words = pre_tokenizers.Sequence(cuts).pre_tokenize_str("Hi there, f(x)=20\u4f60\u597d \u03b1\u10d0\n z ")
    assert [word for word, _ in words] == [
        *("Hi", " there", ",", " f", "(", "x", ")=", "2", "0", "\u4f60\u597d", " \u03b1", "\u10d0", "\n", " z", " ")
    ]


def test_a_file_of_phi_does_not_say_all(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "phimoe")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"a file of Phi does not say .* strip spaces: put .* beside it"):
        load_tokenizer(tmp_path / "model.gguf")


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary(prefix: bool, tmp_path: Path) -> None:
    """Scores say which pairs merge first; a text's first token, and whether a space goes before it, is the file's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    normal = ["▁", "a", "b", "c", "▁a", "ab", "abc", "▁ab", "▁abc"]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + normal)
    writer.add_token_scores([0.0] * len(pieces) + [-float(number) for number in range(len(normal))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(normal)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if not prefix:
        writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load_tokenizer(tmp_path / "model.gguf")
    ids = loaded.encode("abc abcé", add_special_tokens=True)
    tokens = [(pieces + normal)[number] for number in ids]
    assert tokens == ["<s>", "▁abc" if prefix else "abc", "▁abc", "<0xC3>", "<0xA9>"]
    assert loaded.decode(ids, skip_special_tokens=True) == "abc abcé"
