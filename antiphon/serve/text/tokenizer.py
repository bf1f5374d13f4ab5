"""A model's tokenizer and chat template, read from its checkpoint folder.

`transformers` only *loads*: it knows the quirks of each family's `tokenizer_config.json` and renders chat templates
in its sandbox. Encoding goes straight to the Rust tokenizer behind it, decoding through `TokenBytes`. No code from
the checkpoint is run and nothing is downloaded.
"""

import re
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from antiphon.base.errors import CheckpointError, UserError
from antiphon.serve.text.detokenizer import IncrementalDetokenizer
from antiphon.serve.text.token_bytes import TokenBytes

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")

ChatMessage = dict[str, Any]


class TextTokenizer:
    """Text to ids and back for one model. Safe to call from several threads."""

    def __init__(self, pretrained: PreTrainedTokenizerFast) -> None:
        self._pretrained = pretrained
        self.backend: tokenizers.Tokenizer = pretrained.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.token_bytes = TokenBytes(self.backend)
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; `add_special_tokens` puts in front what the model was trained with (often a BOS token)."""
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except UnicodeEncodeError as error:
            raise UserError("the text holds a lone surrogate, which is not a character: remove it") from error
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`; bytes that are no character become U+FFFD, ids without a token become nothing."""
        bytes_of = self.token_bytes.in_text if skip_special_tokens else self.token_bytes.of
        return b"".join(map(bytes_of, token_ids)).decode("utf-8", errors="replace")

    def token_string(self, token_id: int) -> str:
        """One token for people to read; half a character is written ``bytes:\\xe2\\x82`` as OpenAI does."""
        raw = self.token_bytes.of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh incremental detokenizer for one sequence."""
        return IncrementalDetokenizer(self.token_bytes)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._pretrained.chat_template)

    def template_reads(self, key: str) -> bool:
        """Whether the chat template mentions `message.key`; a key it does not read would be dropped in silence."""
        return re.search(rf"""\.{key}\b|['"]{key}['"]""", str(self._pretrained.chat_template)) is not None

    def render_chat(self, messages: list[ChatMessage], *, add_generation_prompt: bool) -> str:
        """The conversation as one text. Special tokens are part of it: encode it without adding any."""
        if not self.has_chat_template:
            raise UserError("this model has no chat template: use /v1/completions with a prompt")
        try:
            rendered = self._pretrained.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # the template is the checkpoint's program: it may raise anything at all
            raise UserError(f"the model's chat template does not accept these messages: {error}") from error
        return str(rendered)


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Read the tokenizer of the checkpoint in `folder`; `CheckpointError` when it has none that can be read."""
    if not any((folder / name).is_file() for name in _FILES):
        raise CheckpointError(f"{folder} has no tokenizer: expected {_FILES[0]} there; copy it from the model's source")
    try:
        pretrained = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # loaders of many families, each with errors of its own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {reason[0]}") from error
    if not isinstance(getattr(pretrained, "backend_tokenizer", None), tokenizers.Tokenizer):
        raise CheckpointError(
            f"the tokenizer in {folder} has no fast form: convert it, so that the folder has a tokenizer.json"
        )
    return TextTokenizer(pretrained)
