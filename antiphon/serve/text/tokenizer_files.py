"""Reads a tokenizer and its chat template from a checkpoint folder.

`transformers` does it, because it knows the quirks of each family's `tokenizer_config.json`. No code from the
checkpoint is run and nothing is downloaded. But patterns and vocabularies are programs, too: servers read them in a
limited process (`text_service.TokenizerReader`), whose program this module is.
"""

import os
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from antiphon.base.errors import CheckpointError
from antiphon.models.files import check_regular, read_json
from antiphon.serve.text import text_process, tiktoken_file
from antiphon.serve.text.tokenizer import TextTokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", tiktoken_file.FILE_NAME)
_BESIDE = (  # read where they are there
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Read the tokenizer of the checkpoint in `folder`; `CheckpointError` when it has none that can be read."""
    main = next((folder / name for name in _FILES if os.path.lexists(folder / name)), None)
    if main is None:
        raise CheckpointError(f"{folder} has no tokenizer: expected {_FILES[0]} there; copy it from the model's source")
    beside = [folder / name for name in _BESIDE if os.path.lexists(folder / name)]
    for path in (main, *beside, *folder.glob(_MORE_TEMPLATES)):
        _check_file(path)
    try:
        pretrained = _load_pretrained(folder)
    except CheckpointError:
        raise
    except Exception as error:  # loaders of many families, each with errors of its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read: {reason[0]}: copy its files from the model's source"
        ) from error
    backend = getattr(pretrained, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CheckpointError(
            f"the tokenizer in {folder} has no fast form: convert it, so that the folder has a tokenizer.json"
        )
    special_tokens = {name: str(token) for name, token in pretrained.special_tokens_map.items()}
    return TextTokenizer(backend, pretrained.chat_template, special_tokens)


def _check_file(path: Path) -> None:
    """`CheckpointError` that names the file. The loader passes over what is no file, and names none that is damaged."""
    check_regular(path)
    if path.suffix == ".json":
        read_json(path)
    elif path.suffix == ".jinja":
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: not UTF-8 text ({error.reason}): download it again") from error


def _load_pretrained(folder: Path) -> Any:
    """What transformers makes of the folder, without running code that is published beside the tokenizer."""
    if (folder / _FILES[0]).is_file():
        if tiktoken_file.published_code(folder) is not None:  # AutoTokenizer would ask for that code
            return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    elif (folder / tiktoken_file.FILE_NAME).is_file():
        return tiktoken_file.load_tiktoken(folder)
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def main() -> None:
    """The program of a process that reads checkpoints."""
    text_process.main(load_tokenizer)


if __name__ == "__main__":
    main()
