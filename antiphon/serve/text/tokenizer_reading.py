"""Reads the tokenizer and the chat template of a checkpoint folder, in a process with limits on time and memory, before
anything else looks at them. No code of the folder runs, nothing is downloaded.

    python -m antiphon.serve.text.tokenizer_reading --fd N   # the process

A `tokenizer.json` is a program of patterns and tables: one that compiles without an end, wants all memory, or ends the
library that reads it must cost a command one line of error. What has been read within the limits is then built once
more where ids become text, which takes as long and as much memory again, and never less or more. Only that process
and those of `text_service` encode: patterns run on a text may take any time, whatever building them took. What the
library for grammars makes of a tokenizer is tried in the same way.

`tokenizer.json` is taken as it is. What stands beside it is applied as the classes of `transformers` do:

1. `tokenizer_config.json` (else `special_tokens_map.json` and `added_tokens.json`) names tokens by their roles and adds
   tokens, or changes how they are found. A token whose id differs from the stated one is refused.
2. `add_bos_token` and `add_eos_token`, where stated, decide for the classes that obeyed them in transformers 4. Files
   of DeepSeek and others rely on it: their `tokenizer.json` adds nothing.
3. Templates: `chat_template.jinja` and `additional_chat_templates/` before the config's, then `chat_template.json`.

Without a `tokenizer.json`: `tiktoken.model` and `tekken.json` are read by `tokenizer_formats`. Of `tokenizer.model`
and `vocab.json` transformers makes a tokenizer, which is then compared with the file. It reads the first with
sentencepiece and protobuf, or with tiktoken, which we do not require: few checkpoints have nothing else.

Rejected: transformers for all. Its classes build a tokenizer anew from a vocabulary: several versions of it lose spaces
and accents of a byte-level file that names the class Llama, in silence. Its import takes seconds and 200 MB, too.
"""

import array
import importlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from antiphon.base.errors import CheckpointError, UserError
from antiphon.base.logging import get_logger
from antiphon.base.system import interruptible
from antiphon.models.checkpoint_folder import brief, check_regular, read_json
from antiphon.models.gguf.container import SUFFIX, gguf_files
from antiphon.serve.text import grammar_trial, text_process
from antiphon.serve.text.text_process import (
    Answer,
    Encode,
    Job,
    ReadTokenizer,
    TextConfigure,
    TextResult,
    TextWork,
    TokenizerSource,
    TryGrammars,
)
from antiphon.serve.text.text_queue import READ_PROGRAM, TextLimits, TextQueue, TextRequest
from antiphon.serve.text.text_service import expect
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.serve.text.tokenizer_formats import (
    TEKKEN_NAME,
    TEKKEN_ROLES,
    TIKTOKEN_NAME,
    load_gguf,
    load_tekken,
    load_tiktoken,
)

_log = get_logger("serve.text")

_JSON = "tokenizer.json"
_FILES = (_JSON, "tokenizer.model", "vocab.json", TIKTOKEN_NAME, TEKKEN_NAME)
_CONFIG, _ROLES_FILE, _ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_TEMPLATE_FILE, _TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
_BESIDE = (_CONFIG, _ROLES_FILE, _ADDED_FILE, _TEMPLATE_FILE, _TEMPLATE_JSON)  # read where they are there
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The classes of transformers 4 that replaced the file's own post-processor by these two settings.
_OBEY_ADD_BOS = frozenset(
    {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer"}
)
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_PROBES = ("Hello world", "a  b\n\n\tc", "é ñ ü", "日本語 中文", "🙂", "don't 12345")
_READ_TIMEOUT_S = 60.0
_GRAMMARS_TIMEOUT_S = 15.0
_READ_MEMORY_BYTES = 4 * 1024**3
_CONVERT_MEMORY_BYTES = 32 * 1024**3  # libraries that convert other files, torch among them, are mapped, too


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Read the tokenizer of the checkpoint in `folder`, or of a GGUF file; `CheckpointError` when it has none that can
    be read."""
    if folder.suffix == SUFFIX or (not any(os.path.lexists(folder / name) for name in _FILES) and gguf_files(folder)):
        return _load_gguf(folder)
    main = next((folder / name for name in _FILES if os.path.lexists(folder / name)), None)
    if main is None:
        raise CheckpointError(f"{folder} has no tokenizer: expected {_FILES[0]} there; copy it from the model's source")
    beside = [folder / name for name in _BESIDE if os.path.lexists(folder / name)]
    for path in (main, *beside, *folder.glob(_MORE_TEMPLATES)):
        _check_file(path)
    try:
        config = _read_config(folder)
        if main.name == TEKKEN_NAME:
            config = TEKKEN_ROLES | config
        backend = _read_backend(main, config)
        named = _named_tokens(config)
        _add_tokens(backend, config, named)
        _set_post_processor(backend, config, named)
        return _text_tokenizer(backend, _templates(folder, config), named)
    except CheckpointError:
        raise
    except Exception as error:  # the library's own type is Exception; a config may hold anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read: {reason[0]}: copy its files from the model's source"
        ) from error


def _load_gguf(path: Path) -> TextTokenizer:
    try:
        backend, config = load_gguf(path)
        named = _named_tokens(config)
        _set_post_processor(backend, config, named)
        templates = _named_templates(config.get("chat_template"), path.name)
    except CheckpointError:
        raise
    except Exception as error:  # the library's own type is Exception; a file may hold anything
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"the tokenizer in {path} cannot be read: {reason}: download the file again") from error
    return _text_tokenizer(backend, templates, named)


def _text_tokenizer(backend: Tokenizer, templates: dict[str, str], named: dict[str, AddedToken]) -> TextTokenizer:
    sources = templates["default"] if templates.keys() == {"default"} else templates or None
    return TextTokenizer(backend, sources, {name: str(token) for name, token in named.items()})


def _check_file(path: Path) -> None:
    """`CheckpointError` that names the file, for what is no file, or damaged."""
    check_regular(path)
    if path.suffix == ".json":
        read_json(path)
    elif path.suffix == ".jinja":
        _read_text(path)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error.reason}): download it again") from error


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, completed by the two files that older versions wrote beside it."""
    config = _read_if_there(folder / _CONFIG)
    if "added_tokens_decoder" in config:
        return config
    config |= _read_if_there(folder / _ROLES_FILE)
    special = {token.content for token in _named_tokens(config).values()}
    special |= {_added_token(token).content for token in _extra_tokens(config)}
    config["added_tokens_decoder"] = {
        token_id: {"content": text, "special": text in special, "normalized": text not in special}
        for text, token_id in _read_if_there(folder / _ADDED_FILE).items()
    }
    return config


def _added_token(entry: Any, *, special: bool = False) -> AddedToken:
    """A token as configs write it: its text, or an object with its text and how it is found in a text."""
    if isinstance(entry, str):
        return AddedToken(entry, special=special, normalized=False)
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise CheckpointError(f"{_CONFIG}: {brief(entry)} is no token: download it again")
    flags: dict[str, Any] = {"special": special} | {name: bool(entry[name]) for name in _FLAGS if name in entry}
    return AddedToken(entry["content"], **{"normalized": not flags["special"]} | flags)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Tokens by the names that templates know them by: roles first, then a model's own, like `image_token`."""
    entries = {name: config[name] for name in _ROLES if config.get(name) is not None}
    entries |= {
        name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str | dict)
    }
    extra = config.get("extra_special_tokens")
    entries |= extra if isinstance(extra, dict) else {}
    return {name: _added_token(entry, special=True) for name, entry in entries.items()}


def _extra_tokens(config: Mapping[str, Any]) -> list[Any]:
    """Special tokens without a name."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return extra if isinstance(extra, list) else []


def _read_backend(main: Path, config: Mapping[str, Any]) -> Tokenizer:
    if main.name == _JSON:
        backend = Tokenizer.from_file(str(main))
        # What the library makes of the file can be compared with the file: ids that it gives to added tokens itself.
        for token in read_json(main).get("added_tokens") or []:
            _check_id(backend, token["content"], token["id"], main)
    elif main.name == TIKTOKEN_NAME:
        backend = load_tiktoken(main.parent, config)
    elif main.name == TEKKEN_NAME:
        backend = load_tekken(main)
    else:
        backend = _convert(main)
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    return backend


def _check_id(backend: Tokenizer, text: str, stated: int, source: Path | str) -> None:
    token_id = backend.token_to_id(text)
    if token_id != stated:
        raise CheckpointError(
            f"{source}: the token {brief(text)} has the id {stated} there, but {token_id} in the vocabulary: "
            "copy the tokenizer's files from the model's source"
        )


def _add_tokens(backend: Tokenizer, config: Mapping[str, Any], named: Mapping[str, AddedToken]) -> None:
    """Add what the config adds; where it describes a token otherwise than the file, the config decides."""
    known: dict[str, AddedToken] = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    described = sorted((int(token_id), entry) for token_id, entry in config["added_tokens_decoder"].items())
    stated = {}
    wanted: dict[str, AddedToken] = {}
    for token_id, entry in described:
        token = _added_token(entry)
        if backend.token_to_id(token.content) not in (None, token_id):
            _check_id(backend, token.content, token_id, _CONFIG)
        stated[token.content] = token_id
        wanted[token.content] = token
    for token in named.values():
        found = wanted.get(token.content) or known.get(token.content)
        if found is None or not found.special:
            wanted[token.content] = token
    for entry in _extra_tokens(config):
        token = _added_token(entry, special=True)
        if token.content not in known:
            wanted.setdefault(token.content, token)
    changed = [token for token in wanted.values() if repr(known.get(token.content)) != repr(token)]
    if changed:
        backend.add_tokens(changed)
    for text, token_id in stated.items():
        _check_id(backend, text, token_id, _CONFIG)


def _set_post_processor(backend: Tokenizer, config: Mapping[str, Any], named: Mapping[str, AddedToken]) -> None:
    """Have encoding put in front and behind what `add_bos_token` and `add_eos_token` state, if the file does not."""
    if str(config.get("tokenizer_class")).removesuffix("Fast") not in _OBEY_ADD_BOS:
        return
    added: list[int] = backend.encode("", add_special_tokens=True).ids
    wanted: dict[str, tuple[str, int] | None] = {}
    for role in ("bos_token", "eos_token"):
        text = named[role].content if role in named else ""
        token_id = backend.token_to_id(text)
        stated = config.get(f"add_{role}")
        present = bool(added) and token_id == added[0 if role == "bos_token" else -1]
        adds = present if stated is None else bool(stated)
        wanted[role] = (text, token_id) if adds and token_id is not None else None
    bos, eos = wanted["bos_token"], wanted["eos_token"]
    if added == [token[1] for token in (bos, eos) if token is not None]:
        return
    _log.info("the tokenizer begins texts with %s, as %s states", bos[0] if bos else "no token of its own", _CONFIG)
    parts = [*([f"{bos[0]}:0"] if bos else []), "$A:0", *([f"{eos[0]}:0"] if eos else [])]
    special = [token for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=parts, pair=None, special_tokens=special)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name."""
    stored = _named_templates(config.get("chat_template"), _CONFIG)
    found = {path.stem: _read_text(path) for path in sorted(folder.glob(_MORE_TEMPLATES))}
    if (folder / _TEMPLATE_FILE).is_file():
        found["default"] = _read_text(folder / _TEMPLATE_FILE)
    if not found:
        found = stored or _named_templates(_read_if_there(folder / _TEMPLATE_JSON).get("chat_template"), _TEMPLATE_JSON)
    elif "default" in stored:
        found.setdefault("default", stored["default"])
    return found


def _named_templates(stored: Any, source: str) -> dict[str, str]:
    if stored is None or isinstance(stored, str):
        return {} if stored is None else {"default": stored}
    try:
        by_name = stored if isinstance(stored, dict) else {entry["name"]: entry["template"] for entry in stored}
    except (TypeError, KeyError):
        by_name = {"": None}
    if not all(isinstance(part, str) for entry in by_name.items() for part in entry):
        raise CheckpointError(f"{source}: chat_template is neither a text nor texts by name: download it again")
    return dict(by_name)


def _convert(main: Path) -> Tokenizer:
    """What transformers makes of a vocabulary. `CheckpointError` when texts do not come back from it."""
    _check_packages(main)
    from transformers import AutoTokenizer  # seconds and 200 MB, for the few folders without a tokenizer.json

    pretrained = AutoTokenizer.from_pretrained(str(main.parent), local_files_only=True, trust_remote_code=False)
    backend = getattr(pretrained, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise CheckpointError(
            f"the tokenizer in {main.parent} has no fast form: convert it, so that there is a {_JSON}"
        )
    if main.suffix == ".json":
        for text, token_id in read_json(main).items():
            _check_id(backend, text, token_id, main)
    for text in _PROBES:
        read = backend.decode(backend.encode(text, add_special_tokens=False).ids)
        if read != text:
            raise CheckpointError(
                f"{main}: transformers makes a tokenizer of it that reads {text!r} as {read!r}: convert it with the "
                f"version of transformers that wrote it, so that there is a {_JSON}"
            )
    return backend


def _check_packages(main: Path) -> None:
    """transformers reads two formats of `tokenizer.model` with packages that it does not bring. `CheckpointError` names
    those that are missing: transformers itself then takes one format for the other."""
    if main.name != "tokenizer.model":
        return
    with main.open("rb") as file:
        is_sentencepiece = file.read(1) == b"\n"  # the key of the first field; the other format is lines of base64
    packages = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # what they are imported as
    if not is_sentencepiece:
        packages = {"tiktoken": "tiktoken"}
    missing = [name for name, module in packages.items() if not _is_installed(module)]
    if missing:
        raise CheckpointError(
            f"reading {main} needs {' and '.join(missing)}, not installed here: pip install {' '.join(missing)}, or "
            f"put a {_JSON} there"
        )


def _is_installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


class TokenizerReader:
    """A limited process that reads the tokenizer of the checkpoint in `folder`, and then encodes texts with it; for a
    `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        memory_bytes = _READ_MEMORY_BYTES if (folder / "tokenizer.json").exists() else _CONVERT_MEMORY_BYTES
        self._jobs = TextQueue(
            "the tokenizer's files",
            TextConfigure(source=None, memory_bytes=memory_bytes, niceness=0),
            TextLimits(memory_bytes=memory_bytes, max_wait_s=math.inf),
            READ_PROGRAM,
        )

    def __enter__(self) -> "TokenizerReader":
        self._jobs.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._jobs.close()

    def read(self) -> TextTokenizer:
        """The checkpoint's tokenizer. `CheckpointError` when it has none that can be read within the limits. Blocks for
        seconds."""
        what = f"reading the tokenizer in {self._folder}"
        job = ReadTokenizer(str(self._folder))
        try:
            source = expect(self._ask(job, what, _READ_TIMEOUT_S), TokenizerSource)
        except UserError as error:
            raise CheckpointError(str(error)) from None
        with interruptible():
            return source.tokenizer()

    def grammar_problem(self, vocab_size: int) -> str | None:
        """Why answers of a model of `vocab_size` ids cannot follow grammars with this tokenizer; None when they can."""
        try:
            expect(self._ask(TryGrammars(vocab_size), "making grammars", _GRAMMARS_TIMEOUT_S), TextResult)
        except UserError as error:
            return str(error)
        return None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that a prompt begins with. `UserError` beyond the limits."""
        job = Encode(texts=[text], add_special_tokens=True, max_tokens=None)
        (packed,) = expect(self._ask(job, "the tokenizer", _READ_TIMEOUT_S), TextResult).token_ids
        return array.array("I", packed).tolist()

    def _ask(self, job: Job, what: str, timeout_s: float) -> Answer:
        request = TextRequest([job], what, timeout_s, advice="copy its files from the model's source")
        return self._jobs.submit(request).result()[0]


def read_tokenizer(folder: Path, vocab_size: int) -> TextTokenizer:
    """The tokenizer for a server of a model of `vocab_size` ids, with what is wrong with it for grammars."""
    with TokenizerReader(folder) as reader:
        tokenizer = reader.read()
        tokenizer.grammar_problem = reader.grammar_problem(vocab_size)
        return tokenizer


# --- the process -----------------------------------------------------------------------------------------------------


class ReadingWork(TextWork):
    """The jobs of a process that has no tokenizer yet, and then those of `TextWork`."""

    def answer(self, job: Job) -> Answer:
        if isinstance(job, ReadTokenizer):
            self._loaded = load_tokenizer(Path(job.folder))
            return TokenizerSource.of(self._loaded)
        if isinstance(job, TryGrammars):
            self._try_grammars(job.vocab_size)
            return TextResult()
        return super().answer(job)

    def _try_grammars(self, vocab_size: int) -> None:
        padded = max(vocab_size, self._tokenizer.vocab_size)
        try:
            grammar_trial.load_tokenizer(self._tokenizer.backend.to_str(), padded, [0])
        except ValueError as error:
            raise UserError(f"structured output cannot use this tokenizer: {error}") from error


def main() -> None:
    """The program."""
    text_process.main(ReadingWork)


if __name__ == "__main__":
    main()
