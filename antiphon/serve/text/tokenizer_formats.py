r"""Tokenizers that are published as ranks of byte sequences (Kimi-K2's `tiktoken.model`, Mistral's `tekken.json`), or
as the vocabulary and merges in a GGUF file's metadata.

`tiktoken.model` has one line per token: its bytes in base64, and its rank, which is its id. The code beside it adds a
pattern that cuts a text into words, and how many ids are reserved for special tokens. Both are written here, so that no
code of a checkpoint runs. `tokenizer_config.json` names the special tokens. `tekken.json` says all that itself; its
special tokens have the first ids.

1. Ranks become a vocabulary, and every way to cut a token into two tokens a merge, in the order of ranks: byte-pair
   encoding with these merges joins what tiktoken joins.
2. A word that is a token is that token, as in tiktoken, even if no merges lead to it (`ignore_merges`).

The published code encodes runs of more than 25,000 characters without a space in parts; here they are encoded whole.
Rejected: the `tiktoken` package at run time, a second tokenizer behind everything that reads the first one's tables.

Of GGUF files byte-level vocabularies ("gpt2") are built here. The file does not hold the pattern that cuts a text into
words, only its name in llama.cpp (`tokenizer.ggml.pre`); `_PATTERNS` has those of the families that run, and another
name is refused, since a wrong pattern gives other ids without a word. SentencePiece vocabularies ("llama") go through
transformers' conversion, which recovers the merges from the scores. Rejected: transformers for both. It skips special
tokens that are not spelled in the alphabet of bytes, which are all of DeepSeek's, and takes GPT-2's pattern where it
does not know a name.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint_folder import brief, open_regular, read_json
from antiphon.models.gguf.container import GgufArray, gguf_files, read_gguf
from antiphon.serve.text.tokenizer import byte_level_alphabet

TIKTOKEN_NAME = "tiktoken.model"
TEKKEN_NAME = "tekken.json"
_CONFIG_NAME = "tokenizer_config.json"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
TEKKEN_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_NUM_RESERVED = {"tokenization_kimi": 256, "tokenization_moonshot": 258}  # by the name of the published code


def load_tiktoken(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of `folder`. `CheckpointError` if the file is damaged or made for code that is not known here."""
    code = _published_code(config)
    if code not in _NUM_RESERVED:
        raise CheckpointError(
            f"{folder / TIKTOKEN_NAME}: made for the code {code!r}, which is not run: only "
            f"{' and '.join(_NUM_RESERVED)} are known, convert the tokenizer, so that the folder has a tokenizer.json"
        )
    ranks = read_ranks(folder / TIKTOKEN_NAME)
    tokenizer = byte_pair_tokenizer(ranks, KIMI_PATTERN)
    tokenizer.add_tokens(_special_tokens(config, len(ranks), _NUM_RESERVED[code]))
    return tokenizer


def _published_code(config: Mapping[str, Any]) -> str | None:
    """The module beside a tokenizer that its config names: ``"tokenization_kimi"``, None if there is none."""
    entry = (config.get("auto_map") or {}).get("AutoTokenizer")
    entry = entry[0] if isinstance(entry, list) and entry else entry
    return entry.split("--")[-1].partition(".")[0] if isinstance(entry, str) else None


def read_ranks(file: Path) -> dict[bytes, int]:
    """Tokens' bytes to their ids, which are 0, 1, 2, ... without a gap, with every byte among them."""
    ranks: dict[bytes, int] = {}
    try:
        with open_regular(file) as lines:
            for line in lines:
                if line.strip():
                    token, rank = line.split()
                    ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(f"{file}: line {len(ranks) + 1} is damaged: download it again") from error
    return _checked(ranks, file)


def _checked(ranks: dict[bytes, int], file: Path) -> dict[bytes, int]:
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file}: the ranks of its {len(ranks)} tokens are not 0, 1, 2, ...: download it again")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{file}: has no token for the byte {missing[0]}: download it again")
    return ranks


def load_tekken(file: Path) -> Tokenizer:
    """The tokenizer in Mistral's `tekken.json`; texts begin with its BOS token. `CheckpointError` if it is damaged, or
    so old that it does not name its special tokens."""
    content = read_json(file)
    if not content.get("special_tokens"):
        raise CheckpointError(
            f"{file}: names no special tokens, as its first versions did: convert it, so that there is a tokenizer.json"
        )
    try:
        config = content["config"]
        names = {int(token["rank"]): str(token["token_str"]) for token in content["special_tokens"]}
        num_special = int(config.get("default_num_special_tokens") or len(names))
        num_ranks = int(config.get("default_vocab_size") or num_special + len(content["vocab"])) - num_special
        entries = content["vocab"][:num_ranks]
        ranks = {base64.b64decode(entry["token_bytes"], validate=True): int(entry["rank"]) for entry in entries}
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise CheckpointError(f"{file}: damaged ({type(error).__name__}: {error}): download it again") from error
    special = [names.get(token_id, f"<SPECIAL_{token_id}>") for token_id in range(num_special)]
    tokenizer = byte_pair_tokenizer(_checked(ranks, file), pattern, special)
    bos = TEKKEN_ROLES["bos_token"]
    if bos in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[f"{bos}:0", "$A:0"], pair=None, special_tokens=[(bos, special.index(bos))]
        )
    return tokenizer


def byte_pair_tokenizer(ranks: Mapping[bytes, int], pattern: str, special: Sequence[str] = ()) -> Tokenizer:
    """Byte-level byte-pair encoding of the words that `pattern` finds. `special` tokens have the ids before `ranks`."""
    spelling = {byte: character for character, byte in byte_level_alphabet().items()}

    def spelled(token: bytes) -> str:
        return "".join(spelling[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += [(spelled(left), spelled(right)) for left, right in known]
    vocabulary = {spelled(token): len(special) + rank for token, rank in ranks.items()}
    vocabulary |= {text: token_id for token_id, text in enumerate(special)}
    tokenizer = _byte_level(vocabulary, merges, (pattern,), ignore_merges=True)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _byte_level(
    vocabulary: dict[str, int], merges: list[Any], patterns: Sequence[str], *, ignore_merges: bool
) -> Tokenizer:
    """Byte-pair encoding within the words that `patterns`, one after the other, cut a text into."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _special_tokens(config: Mapping[str, Any], first: int, num_reserved: int) -> list[AddedToken]:
    """The tokens behind the ranks, in the order of their ids: named ones, and reserved ones between them."""
    named = {int(token_id): token for token_id, token in (config.get("added_tokens_decoder") or {}).items()}
    ids = range(first, first + num_reserved)
    if outside := sorted(named.keys() - set(ids)):
        raise CheckpointError(
            f"{_CONFIG_NAME}: added_tokens_decoder has the id {outside[0]}: special tokens of this tokenizer lie from "
            f"{ids[0]} to {ids[-1]}, download it and {TIKTOKEN_NAME} again"
        )
    tokens = [named.get(i, {"content": f"<|reserved_token_{i}|>", "special": True}) for i in ids]
    return [AddedToken(str(token["content"]), special=bool(token.get("special")), normalized=False) for token in tokens]


# --- GGUF -------------------------------------------------------------------------------------------------------------

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
_UNCASED_THERE = (  # letters with case, which DeepSeek's first vocabularies do not count among these
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df2a"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNCASED_THERE}]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe")
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "dots1"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), (_CASED,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    "deepseek-llm": _DEEPSEEK_LLM,
    **dict.fromkeys(("gpt-2", "olmo", "dolma"), (_GPT2,)),
    **dict.fromkeys(("refact", "starcoder"), (r"\p{N}", _GPT2)),
    "kimi-k2": (KIMI_PATTERN,),
}  # llama.cpp's names
_COMPOSED = ("qwen2", "deepseek-r1-qwen", "olmo")  # texts are brought into the normal form NFC first
_WHOLE_WORDS = (*_LLAMA3_NAMES, "kimi-k2")  # a word that is a token is that token, even if no merges lead to it
_CONTROL, _USER_DEFINED = 3, 4  # `token_type`
_PHI, _SPACE = "phimoe", "\u2581"
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
    if metadata.get("general.architecture") == _PHI:
        raise CheckpointError(f"{file.name}: a file of Phi does not say which of its tokens strip spaces: {_beside()}")
    if kind == "gpt2":
        backend = _gpt2(file, metadata, tokens)
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


def _gpt2(file: Path, metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PATTERNS:
        raise CheckpointError(f"{file.name}: tokenizer.ggml.pre = {brief(name)} is not known: {_beside()}")
    merges = [tuple(merge.split(" ", 1)) for merge in _array(metadata, "merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = _byte_level(vocabulary, merges, _PATTERNS[name], ignore_merges=name in _WHOLE_WORDS)
    if name in _COMPOSED:
        backend.normalizer = normalizers.NFC()
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
    if metadata.get("tokenizer.ggml.add_space_prefix") is False:  # as ERNIE's; the conversion does not look
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _config(metadata: dict[str, Any], tokens: list[str], kind: object) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer"}  # which obeys what is stated of the first token
    for role, key in _ROLES.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(number) is int and 0 <= number < len(tokens):
            config[role] = tokens[number]
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES  # as llama.cpp does unasked
    for role in ("bos", "eos"):
        stated = metadata.get(f"tokenizer.ggml.add_{role}_token", begins and role == "bos")
        config[f"add_{role}_token"] = bool(stated)
    templates = {
        key.removeprefix("tokenizer.chat_template.") if key != "tokenizer.chat_template" else "default": value
        for key, value in metadata.items()
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
    }
    if templates:
        config["chat_template"] = templates
    return config
