"""Tokenizer files: what they say is what is served, whatever stands beside them. Those that are missing, damaged, or no
files at all: one line that names the file, and nothing blocks."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

import antiphon
from antiphon.base.errors import CheckpointError
from antiphon.serve.text.tokenizer_reading import load_tokenizer
from tests.serve.tokenizer_kinds import KINDS, TEXTS, byte_level, small

JSON_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
TEMPLATES = ["chat_template.jinja", "chat_template.json", "additional_chat_templates/tools.jinja"]


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """Tokenizer and config only, to break."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, tmp_path)
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put_fifo(path: Path) -> str:
    os.mkfifo(path)
    return "a pipe, not a file: put the file itself there"


def put_folder(path: Path) -> str:
    path.mkdir()
    return "a folder, not a file: put the file itself there"


def put_dangling_link(path: Path) -> str:
    path.symlink_to("blobs/abc")
    return "a link to blobs/abc, which is not there: download it"


def put_nothing(path: Path) -> str:
    path.touch()
    return "empty: download it again"


@pytest.mark.parametrize("put", [put_fifo, put_folder, put_dangling_link, put_nothing])
@pytest.mark.parametrize("name", [*JSON_FILES, *TEMPLATES])
def test_no_file(folder: Path, name: str, put: Callable[[Path], str]) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    expected = put(path)
    assert refusal(folder) == f"{path}: {expected}"


DAMAGED: list[tuple[bytes, str]] = [
    (b"[" * 100_000, "not valid JSON (nested too deeply): download it again"),
    (b"{", "not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)): "),
    (b'["a"]', "holds a list, not an object: download it again"),
    (b'{"a": "\xff"}', "not valid JSON ('utf-8' codec can't decode byte 0xff in position 7: invalid start byte): "),
    (b'{"model_max_length": NaN}', "not valid JSON (it holds NaN, which is not JSON): download it again"),
]


@pytest.mark.parametrize(("text", "expected"), DAMAGED)
@pytest.mark.parametrize("name", [*JSON_FILES, "chat_template.json"])
def test_no_json(folder: Path, name: str, text: bytes, expected: str) -> None:
    (folder / name).write_bytes(text)
    assert refusal(folder).startswith(f"{folder / name}: {expected}")


def test_template_that_is_no_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    assert refusal(folder) == f"{folder}/chat_template.jinja: not UTF-8 text (invalid start byte): download it again"


def test_an_object_that_is_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    found = refusal(folder)
    assert found.startswith(f"the tokenizer in {folder} cannot be read: ")
    assert found.endswith(": copy its files from the model's source")


def test_a_whole_tokenizer_is_read(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}é")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}é"


def write(folder: Path, backend: Tokenizer, **files: Any) -> Path:
    """`files` by name without their ending: JSON, or a template's text."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in ({"tokenizer_config": {}} | files).items():
        file = folder / f"{name}.{'jinja' if isinstance(content, str) else 'json'}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


CLASSES = ["LlamaTokenizerFast", "LlamaTokenizer", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPTNeoXTokenizerFast"]
CLASSES += ["GPT2Tokenizer", "TokenizersBackend", "TikTokenTokenizer", "SomethingElse", ""]
FAMILIES = ["deepseek_v3", "dots1", "kimi_k2", "minimax_m2", "qwen3_moe", "olmoe", "gpt_oss", "mixtral", "unheard_of"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_json_is_taken_as_it_is(tmp_path: Path, kind: str) -> None:
    """Classes of transformers build another tokenizer from its vocabulary."""
    for number in range(max(len(CLASSES), len(FAMILIES))):
        config = {"tokenizer_class": CLASSES[number % len(CLASSES)], "bos_token": "<s>", "legacy": True}
        family = {"model_type": FAMILIES[number % len(FAMILIES)]}
        read = load_tokenizer(write(tmp_path, small(kind), tokenizer_config=config, config=family))
        for text in [*TEXTS, " x<|end|> word[L] é "]:
            ids = small(kind).encode(text).ids
            assert read.encode(text, add_special_tokens=True) == ids
            assert read.decode(ids, skip_special_tokens=False) == small(kind).decode(ids, skip_special_tokens=False)


def test_nothing_that_serves_loads_transformers() -> None:
    """At its start: a function may, for a vocabulary without a tokenizer.json."""
    root = Path(antiphon.__file__).parent
    files = [file for file in root.rglob("*.py") if "bench" not in file.relative_to(root).parts]
    assert len(files) > 200
    for file in files:
        for line in file.read_text().splitlines():
            assert not line.startswith(("import transformers", "from transformers")), file


def token(content: str, **flags: bool) -> dict[str, Any]:
    return (
        dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
        | {"content": content}
        | flags
    )


NEW = small("byte-level").get_vocab_size()
T = small("byte-level").token_to_id("<|tool|>")
BESIDE: list[dict[str, Any]] = [
    {"tokenizer_config": {"eos_token": "<|end|>", "bos_token": "<s>", "pad_token": "<|end|>"}},
    {"tokenizer_config": {"eos_token": "<|end|>", "added_tokens_decoder": {str(T): token("<|tool|>", special=True)}}},
    {"tokenizer_config": {"added_tokens_decoder": {str(NEW + 1): token("<b>"), str(NEW): token("<a>", lstrip=True)}}},
    {"tokenizer_config": {"eos_token": "<|tool|>", "extra_special_tokens": ["<|tool|>", "<new>"]}},
    {"tokenizer_config": {"eos_token": "<|end|>", "additional_special_tokens": ["<new>"]}},
    {"tokenizer_config": {"eos_token": "h", "pad_token": "[PAD]"}},
    {"tokenizer_config": {"eos_token": "<|end|>", "image_token": "<s>"}},
    {"added_tokens": {"<new>": NEW, "<newer>": NEW + 1}, "tokenizer_config": {"eos_token": "<newer>"}},
    {
        "special_tokens_map": {"eos_token": "<|tool|>", "bos_token": token("<s>")},
        "tokenizer_config": {"eos_token": "h"},
    },
    {
        "special_tokens_map": {"eos_token": "<|tool|>"},
        "tokenizer_config": {"eos_token": "<|end|>", "added_tokens_decoder": {"0": token("<s>", special=True)}},
    },
    {"tokenizer_config": {"eos_token": {"__type": "AddedToken", **token("<|end|>", special=True)}, "bos_token": None}},
    {"tokenizer_config": {"chat_template": "x"}, "chat_template": "y"},
    {"tokenizer_config": {"chat_template": [{"name": "default", "template": "x"}, {"name": "rag", "template": "z"}]}},
    {"chat_template": "y", "additional_chat_templates/tool_use": "t"},
    {"tokenizer_config": {"split_special_tokens": True}},
]


@pytest.mark.parametrize("files", BESIDE)
def test_files_beside_it_are_read_as_transformers_does(tmp_path: Path, files: dict[str, Any]) -> None:
    write(tmp_path, small("byte-level"), **files)
    ours, theirs = load_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.template_sources == theirs.chat_template
    added = {i: repr(token) for i, token in theirs.backend_tokenizer.get_added_tokens_decoder().items()}
    assert {i: repr(token) for i, token in ours.backend.get_added_tokens_decoder().items()} == added
    for text in [*TEXTS, "x <|tool|> <a> <new><newer>[PAD]<|end|>h"]:
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"tokenizer_config": {"chat_template": "c"}, "additional_chat_templates/rag": "r"},
            {"default": "c", "rag": "r"},
        ),
        ({"tokenizer_config": {"chat_template": {"default": "c"}}}, "c"),
        ({}, None),
    ],
)
def test_named_templates_are_found(tmp_path: Path, files: dict[str, Any], expected: object) -> None:
    assert load_tokenizer(write(tmp_path, small("byte-level"), **files)).template_sources == expected


def test_a_template_in_a_file_of_its_own_counts_where_there_is_no_other(tmp_path: Path) -> None:
    write(tmp_path, small("byte-level"))
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from JSON"}')
    assert load_tokenizer(tmp_path).template_sources == "from JSON"
    write(tmp_path, small("byte-level"), tokenizer_config={"chat_template": "c"})
    assert load_tokenizer(tmp_path).template_sources == "c"


BOS, EOS = 0, small("byte-level").token_to_id("<|end|>")


@pytest.mark.parametrize(
    ("name", "stated", "in_file", "expected"),
    [
        ("LlamaTokenizerFast", {"add_bos_token": True, "add_eos_token": False}, False, ([BOS], [])),  # DeepSeek
        ("LlamaTokenizer", {"add_bos_token": True}, True, ([BOS], [])),  # Mixtral
        ("LlamaTokenizerFast", {"add_bos_token": False}, True, ([], [])),
        ("LlamaTokenizerFast", {"add_eos_token": True}, True, ([BOS], [EOS])),
        ("LlamaTokenizerFast", {}, False, ([], [])),
        ("LlamaTokenizerFast", {}, True, ([BOS], [])),
        ("GPTNeoXTokenizerFast", {"add_bos_token": False, "add_eos_token": False}, False, ([], [])),  # OLMoE
        ("Qwen2Tokenizer", {"add_bos_token": True}, False, ([], [])),  # classes that never obeyed
        ("PreTrainedTokenizerFast", {"add_bos_token": False}, True, ([BOS], [])),
    ],
)
def test_what_texts_begin_and_end_with(
    tmp_path: Path, name: str, stated: dict[str, bool], in_file: bool, expected: tuple[list[int], list[int]]
) -> None:
    backend = byte_level()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if in_file:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "<|end|>", **stated}
    read = load_tokenizer(write(tmp_path, backend, tokenizer_config=config))
    ids = read.encode("a cat", add_special_tokens=False)
    assert read.encode("a cat", add_special_tokens=True) == expected[0] + ids + expected[1]


def test_ids_that_disagree_are_refused(tmp_path: Path) -> None:
    for token_id, text, found in [(NEW + 3, "<new>", NEW), (5, "<|tool|>", T)]:
        config = {"added_tokens_decoder": {str(token_id): token(text)}}
        assert refusal(write(tmp_path, small("byte-level"), tokenizer_config=config)) == (
            f"tokenizer_config.json: the token '{text}' has the id {token_id} there, but {found} in the vocabulary: "
            "copy the tokenizer's files from the model's source"
        )
    write(tmp_path, small("byte-level"))
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["added_tokens"][-1]["id"] += 7
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    assert f"has the id {T + 7} there, but {T} in the vocabulary" in refusal(tmp_path)


def test_merges_are_texts_or_pairs(tmp_path: Path) -> None:
    write(tmp_path, small("byte-level, words first"))
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in stored["model"]["merges"]]
    for merges in (pairs, [" ".join(pair) for pair in pairs]):
        stored["model"]["merges"] = merges
        (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
        for text in TEXTS:
            ids = small("byte-level, words first").encode(text).ids
            assert load_tokenizer(tmp_path).encode(text, add_special_tokens=True) == ids


@pytest.mark.parametrize(
    ("begin", "missing", "expected"),
    [
        (b"\n\x0e", ["sentencepiece", "google.protobuf"], "sentencepiece and protobuf"),
        (b"\n\x0e", ["sentencepiece"], "sentencepiece"),
        (b"IQ== 0\n", ["tiktoken"], "tiktoken"),
    ],
)
def test_a_package_that_a_tokenizer_model_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes, missing: list[str], expected: str
) -> None:
    for name in ("sentencepiece", "google.protobuf", "tiktoken"):
        monkeypatch.setitem(sys.modules, name, None if name in missing else ModuleType(name))
    (tmp_path / "tokenizer.model").write_bytes(begin)
    assert refusal(tmp_path) == (
        f"reading {tmp_path}/tokenizer.model needs {expected}, not installed here: "
        f"pip install {expected.replace(' and', '')}, or put a tokenizer.json there"
    )


def test_a_vocabulary_alone_is_converted_or_refused(tmp_path: Path) -> None:
    """By transformers, whose result is compared with the file and with texts."""
    backend = small("byte-level, pattern")
    backend.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_moe"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    read = load_tokenizer(tmp_path)
    for text in TEXTS:
        ids = read.encode(text, add_special_tokens=False)
        assert read.decode(ids, skip_special_tokens=False) == text
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert str(tmp_path / "vocab.json") in refusal(tmp_path)  # a tokenizer of another kind was made of it
