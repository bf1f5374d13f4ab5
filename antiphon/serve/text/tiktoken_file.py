r"""A tokenizer that is published as `tiktoken.model` with Python code beside it: Kimi-K2's and Moonlight's.

The file has one line per token: its bytes in base64, and its rank, which is its id. The code beside it adds a pattern
that cuts a text into words, and how many ids are reserved for special tokens. Both are written here, so that no code of
a checkpoint runs. `tokenizer_config.json` names the special tokens.

1. Ranks become a vocabulary, and every way to cut a token into two tokens a merge, in the order of ranks: byte-pair
   encoding with these merges joins what tiktoken joins.
2. A word that is a token is that token, as in tiktoken, even if no merges lead to it (`ignore_merges`).

The published code encodes runs of more than 25,000 characters without a space in parts; here they are encoded whole.
Rejected: the `tiktoken` package at run time, a second tokenizer behind everything that reads the first one's tables.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from antiphon.base.errors import CheckpointError
from antiphon.models.files import open_regular, read_json
from antiphon.serve.text.tokenizer import byte_level_alphabet

FILE_NAME = "tiktoken.model"
CONFIG_NAME = "tokenizer_config.json"
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
NUM_RESERVED = {"tokenization_kimi": 256, "tokenization_moonshot": 258}  # by the name of the published code
SPECIAL_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tiktoken(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of `folder`. `CheckpointError` if the file is damaged or made for code that is not known here."""
    config, code = _config(folder), published_code(folder)
    if code not in NUM_RESERVED:
        raise CheckpointError(
            f"{folder / FILE_NAME}: made for the code {code!r}, which is not run: only {' and '.join(NUM_RESERVED)} "
            f"are known, convert the tokenizer, so that the folder has a tokenizer.json"
        )
    ranks = read_ranks(folder / FILE_NAME)
    tokenizer = byte_pair_tokenizer(ranks, KIMI_PATTERN)
    tokenizer.add_tokens(_special_tokens(config, len(ranks), NUM_RESERVED[code]))
    roles = {role: _text_of(config[role]) for role in SPECIAL_ROLES if config.get(role)}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_chat_template(folder, config),
        clean_up_tokenization_spaces=False,
        **roles,
    )


def published_code(folder: Path) -> str | None:
    """The module beside a tokenizer that its config names: ``"tokenization_kimi"``, None if there is none."""
    entry = (_config(folder).get("auto_map") or {}).get("AutoTokenizer")
    entry = entry[0] if isinstance(entry, list) and entry else entry
    return entry.split("--")[-1].partition(".")[0] if isinstance(entry, str) else None


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}


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
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{file}: the ranks of its {len(ranks)} tokens are not 0, 1, 2, ...: download it again")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{file}: has no token for the byte {missing[0]}: download it again")
    return ranks


def byte_pair_tokenizer(ranks: Mapping[bytes, int], pattern: str) -> Tokenizer:
    """Byte-level byte-pair encoding of the words that `pattern` finds."""
    spelling = {byte: character for character, byte in byte_level_alphabet().items()}

    def spelled(token: bytes) -> str:
        return "".join(spelling[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += [(spelled(left), spelled(right)) for left, right in known]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _special_tokens(config: Mapping[str, Any], first: int, num_reserved: int) -> list[AddedToken]:
    """The tokens behind the ranks, in the order of their ids: named ones, and reserved ones between them."""
    named = {int(token_id): token for token_id, token in (config.get("added_tokens_decoder") or {}).items()}
    ids = range(first, first + num_reserved)
    if outside := sorted(named.keys() - set(ids)):
        raise CheckpointError(
            f"{CONFIG_NAME}: added_tokens_decoder has the id {outside[0]}: special tokens of this tokenizer lie from "
            f"{ids[0]} to {ids[-1]}, download it and {FILE_NAME} again"
        )
    tokens = [named.get(i, {"content": f"<|reserved_token_{i}|>", "special": True}) for i in ids]
    return [AddedToken(str(token["content"]), special=bool(token.get("special")), normalized=False) for token in tokens]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Its source, or several by name."""
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    return {entry["name"]: entry["template"] for entry in template} if isinstance(template, list) else template


def _text_of(token: str | Mapping[str, Any]) -> str:
    """A special token is written as its text or as an object with its text."""
    return token if isinstance(token, str) else str(token["content"])
