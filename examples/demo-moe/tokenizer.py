"""Trains the demo model's tokenizer on the files that `train.toml` names: byte-level BPE, cheap for Python's layout.

    python examples/demo-moe/tokenizer.py FOLDER

Pre-tokens, in order of preference: runs of newlines; runs of two or more blanks (an indentation is a token);
words with at most one blank in front; up to three digits; runs of punctuation with at most one blank in
front. Newlines never merge with the indentation behind them, although that would save a token a line: prompts
end behind a newline, and the boundary must then be one the model knows.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from antiphon.train.config import read_config
from antiphon.train.documents import find_files

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
VOCABULARY, CONTEXT = 4096, 1024
_PRE_TOKEN = r"[\r\n]+| {2,}|\t+| ?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn `vocab_size` tokens (special tokens first) from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Write the tokenizer's files into the folder that is named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    data = read_config(Path(__file__).with_name("train.toml")).data
    files = find_files(replace(data, files=data.files[:1]))
    tokenizer = train_tokenizer((file.read_text(errors="replace") for file in files), VOCABULARY)
    save_tokenizer(tokenizer, folder, context_length=CONTEXT)


main()
