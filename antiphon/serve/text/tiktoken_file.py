r"""Tokenizers that are published as ranks of byte sequences: Kimi-K2's `tiktoken.model`, Mistral's `tekken.json`.

`tiktoken.model` has one line per token: its bytes in base64, and its rank, which is its id. The code beside it adds a
pattern that cuts a text into words, and how many ids are reserved for special tokens. Both are written here, so that no
code of a checkpoint runs. `tokenizer_config.json` names the special tokens. `tekken.json` says all that itself; its
special tokens have the first ids.

1. Ranks become a vocabulary, and every way to cut a token into two tokens a merge, in the order of ranks: byte-pair
   encoding with these merges joins what tiktoken joins.
2. A word that is a token is that token, as in tiktoken, even if no merges lead to it (`ignore_merges`).

The published code encodes runs of more than 25,000 characters without a space in parts; here they are encoded whole.
Rejected: the `tiktoken` package at run time, a second tokenizer behind everything that reads the first one's tables.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from antiphon.base.errors import CheckpointError
from antiphon.models.files import open_regular, read_json
from antiphon.serve.text.detokenizer import byte_level_alphabet

FILE_NAME = "tiktoken.model"
TEKKEN_NAME = "tekken.json"
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
TEKKEN_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
NUM_RESERVED = {"tokenization_kimi": 256, "tokenization_moonshot": 258}  # by the name of the published code


def load_tiktoken(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of `folder`. `CheckpointError` if the file is damaged or made for code that is not known here."""
    code = _published_code(config)
    if code not in NUM_RESERVED:
        raise CheckpointError(
            f"{folder / FILE_NAME}: made for the code {code!r}, which is not run: only {' and '.join(NUM_RESERVED)} "
            f"are known, convert the tokenizer, so that the folder has a tokenizer.json"
        )
    ranks = read_ranks(folder / FILE_NAME)
    tokenizer = byte_pair_tokenizer(ranks, KIMI_PATTERN)
    tokenizer.add_tokens(_special_tokens(config, len(ranks), NUM_RESERVED[code]))
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
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
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
