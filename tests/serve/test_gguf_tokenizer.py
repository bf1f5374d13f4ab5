"""Tokenizers of GGUF files give the ids of the tokenizer.json that they were made from."""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from antiphon.base.errors import CheckpointError
from antiphon.serve.text.tokenizer_files import load_tokenizer
from antiphon.serve.text.tokenizer_formats import _PATTERNS

SPECIAL = ["<|endoftext|>", "<｜begin▁of▁sentence｜>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHARACTERS = "abcdefgh ABC 0123456789 \n\t\r.,!?'\"_-/()[]{}<>|é ñüß日本語中文한국어🙂 \u0301\u00a0's'll"


def texts(count: int) -> list[str]:
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
        *SPECIAL,
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
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts(2000), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
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
    writer.add_bos_token_id(tokenizer.token_to_id(SPECIAL[1]))
    writer.add_eos_token_id(tokenizer.token_to_id(SPECIAL[2]))
    writer.add_chat_template(TEMPLATE)


def write(file: Path, tokenizer: Tokenizer, pre: str, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(file, "qwen3moe")
    add_tokenizer(writer, tokenizer, pre)
    for key, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-4o", "deepseek-v3", "olmo", "refact", "kimi-k2"])
def test_ids_are_those_of_the_tokenizer_it_was_made_from(pre: str, tmp_path: Path) -> None:
    source = trained(pre)
    loaded = load_tokenizer(write(tmp_path / "model.gguf", source, pre))
    for text in texts(1500):
        ids = loaded.encode(text, add_special_tokens=False)
        assert ids == source.encode(text, add_special_tokens=False).ids, text
        assert loaded.decode(ids, skip_special_tokens=True) == source.decode(ids, skip_special_tokens=True)
    assert loaded.template_sources == TEMPLATE
    assert loaded.special_tokens == {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["qwen2", "deepseek-v3"])
def test_ids_of_ten_thousand_texts(pre: str, tmp_path: Path) -> None:
    source = trained(pre)
    loaded = load_tokenizer(write(tmp_path / "model.gguf", source, pre))
    for text in texts(10_000):
        assert loaded.encode(text, add_special_tokens=False) == source.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("adds", [True, False])
def test_the_first_token_as_the_file_states_it(adds: bool, tmp_path: Path) -> None:
    source = trained("qwen2")
    loaded = load_tokenizer(write(tmp_path / "model.gguf", source, "qwen2", add_bos_token=adds))
    plain = source.encode("Hello", add_special_tokens=False).ids
    assert loaded.encode("Hello", add_special_tokens=True) == [*([source.token_to_id(SPECIAL[1])] * adds), *plain]


def test_an_unknown_pattern_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", trained("qwen2"), "jais-2")
    with pytest.raises(CheckpointError, match=r"model.gguf: tokenizer.ggml.pre = 'jais-2' is not known: put"):
        load_tokenizer(file)


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    """Scores say which pairs merge first; a text's first token is the file's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    normal = ["▁", "a", "b", "c", "▁a", "ab", "abc", "▁ab", "▁abc"]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + normal)
    writer.add_token_scores([0.0] * len(pieces) + [-float(number) for number in range(len(normal))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(normal)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load_tokenizer(tmp_path / "model.gguf")
    ids = loaded.encode("abc abcé", add_special_tokens=True)
    tokens = [(pieces + normal)[number] for number in ids]
    assert tokens == ["<s>", "▁abc", "▁abc", "<0xC3>", "<0xA9>"]
    assert loaded.decode(ids, skip_special_tokens=True) == "abc abcé"
