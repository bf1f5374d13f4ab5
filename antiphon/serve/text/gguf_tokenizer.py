r"""A tokenizer from a GGUF file's metadata: its vocabulary, merges, special tokens and chat template.

Byte-level vocabularies ("gpt2") are built here. The file does not hold the pattern that cuts a text into words, only
its name in llama.cpp (`tokenizer.ggml.pre`); `_PATTERNS` has those of the families that run, and another name is
refused, since a wrong pattern gives other ids without a word. SentencePiece vocabularies ("llama") go through
transformers' conversion, which recovers the merges from the scores.

Rejected: transformers for both. It skips special tokens that are not spelled in the alphabet of bytes, which are all of
DeepSeek's, and takes GPT-2's pattern where it does not know a name.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from antiphon.base.errors import CheckpointError
from antiphon.models.files import brief
from antiphon.models.gguf.container import GgufArray, gguf_files, read_gguf
from antiphon.serve.text.tiktoken_file import KIMI_PATTERN

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "dots1"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), (_CASED,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    **dict.fromkeys(("gpt-2", "olmo", "dolma"), (_GPT2,)),
    **dict.fromkeys(("refact", "starcoder"), (r"\p{N}", _GPT2)),
    "kimi-k2": (KIMI_PATTERN,),
}  # llama.cpp's names
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # texts are brought into the normal form NFC first
_CONTROL, _USER_DEFINED = 3, 4  # `token_type`
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_gguf(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer in the file (or in the first of its parts), and what a `tokenizer_config.json` would say of it.

    `CheckpointError` if it has none that can be read."""
    file = gguf_files(path)[0]
    metadata = read_gguf(file).metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _array(metadata, "tokens")
    types = _array(metadata, "token_type") or [1] * len(tokens)
    if not tokens or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{file.name}: its tokenizer has {len(tokens)} tokens, {len(types)} types: {_beside()}")
    if kind == "gpt2":
        backend = _byte_level(file, metadata, tokens)
    elif kind == "llama":
        backend = _sentence_piece(metadata, tokens, types)
    else:
        raise CheckpointError(f"{file.name}: its tokenizer is of the kind {brief(kind)}: {_beside()}")
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    return backend, _config(metadata, tokens, kind)


def _beside() -> str:
    return "put the model's tokenizer.json, tokenizer_config.json and config.json beside it, and give the folder"


def _array(metadata: dict[str, Any], key: str) -> list[Any]:
    found = metadata.get(f"tokenizer.ggml.{key}")
    return found.values() if isinstance(found, GgufArray) else []


def _byte_level(file: Path, metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PATTERNS:
        raise CheckpointError(f"{file.name}: tokenizer.ggml.pre = {brief(name)} is not known: {_beside()}")
    merges = [tuple(merge.split(" ", 1)) for merge in _array(metadata, "merges")]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges, ignore_merges=False))
    if name in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    # seconds and 200 MB, for the families with such a vocabulary
    from transformers.integrations.gguf import convert_gguf_tokenizer

    described = {
        "tokenizer_type": "llama",
        "tokens": tokens,
        "scores": _array(metadata, "scores"),
        "token_type": types,
    }
    if merges := _array(metadata, "merges"):
        described["merges"] = merges
    backend: Tokenizer = convert_gguf_tokenizer(str(metadata.get("general.architecture")), described)[0]
    return backend


def _config(metadata: dict[str, Any], tokens: list[str], kind: object) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer"}  # which obeys what is stated of the first token
    for role, key in _ROLES.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(number) is int and 0 <= number < len(tokens):
            config[role] = tokens[number]
    for role in ("bos", "eos"):
        stated = metadata.get(f"tokenizer.ggml.add_{role}_token", kind == "llama" and role == "bos")
        config[f"add_{role}_token"] = bool(stated)
    templates = {
        key.removeprefix("tokenizer.chat_template.") if key != "tokenizer.chat_template" else "default": value
        for key, value in metadata.items()
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
    }
    if templates:
        config["chat_template"] = templates
    return config
