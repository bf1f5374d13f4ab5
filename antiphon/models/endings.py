"""Which tokens end a text, by all the files of a checkpoint that say so.

`config.json`, `generation_config.json` and the tokenizer may each name others. A model that was tuned to chat ends its
turn with a token that often only the newest of these files knows; one that is missed lets an answer run into the next
turn. So each of them counts. Only the engine asks, once: the tokenizer's file may hold 20 MB.
Rejected: `generation_config.json` alone, as transformers does. Many folders have none, or one that was left behind.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from antiphon.base.errors import CheckpointError
from antiphon.base.logging import get_logger
from antiphon.models.config import config_file, read_config, stated_endings
from antiphon.models.files import brief, read_json
from antiphon.specs.model import ModelSpec

_log = get_logger("models")
_NUMBER = re.compile("[0-9]{1,9}")
_NAMING = ("tokenizer_config.json", "special_tokens_map.json")


def with_tokenizer_ending(path: Path, spec: ModelSpec) -> ModelSpec:
    """`spec` with the tokenizer's `eos_token` among the tokens that end a text; a line of the log says so.

    A tokenizer that is damaged or not there says nothing here; who needs it reads it and says what is wrong."""
    folder = config_file(path).parent
    try:
        text = _ending_text(folder)
        token = None if text is None else _id_of(folder, text)
    except CheckpointError:
        return spec
    if token is None or not 0 <= token < spec.vocab_size or token in spec.eos_token_ids:
        return spec
    others = spec.eos_token_ids if stated_endings(read_config(path), folder) else ()
    named = " or ".join(map(str, others)) or "none"
    _log.info(
        "a text ends at token %d (%s) too, the tokenizer's eos_token: config.json and generation_config.json name %s",
        token,
        brief(text),
        named,
    )
    return replace(spec, eos_token_ids=(*others, token))


def _ending_text(folder: Path) -> str | None:
    for name in _NAMING:
        token = _json_of(folder / name).get("eos_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            return text
    return None


def _id_of(folder: Path, text: str) -> int | None:
    """The token's number: in the file that names it, or in the tokenizer's own."""
    added = _json_of(folder / _NAMING[0]).get("added_tokens_decoder")
    for number, token in added.items() if isinstance(added, Mapping) else ():
        if isinstance(token, Mapping) and token.get("content") == text and _NUMBER.fullmatch(number):
            return int(number)
    tokenizer = _json_of(folder / "tokenizer.json")
    listed = tokenizer.get("added_tokens")
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, Mapping) and token.get("content") == text:
            return _whole(token.get("id"))
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    for names in (vocabulary, _json_of(folder / "added_tokens.json"), _json_of(folder / "vocab.json")):
        if isinstance(names, Mapping) and text in names:
            return _whole(names[text])
    if isinstance(vocabulary, list):  # Unigram's: pairs of a text and its score, in the order of their numbers
        return next(
            (number for number, pair in enumerate(vocabulary) if isinstance(pair, list) and pair[:1] == [text]), None
        )
    return None


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _json_of(path: Path) -> dict[str, Any]:
    return read_json(path) if os.path.lexists(path) else {}
