"""Turn the Python standard library's source into packed streams of token ids.

Method:
  1. read every .py file of the running interpreter's stdlib folder, but for tests and data tables;
  2. hold out every fiftieth file (by a hash of its name) for evaluation;
  3. add short ChatML samples ("complete this code", "write this function") cut from the training files;
  4. cut each text at random places and encode the pieces one by one, then join and store as uint16.

Step 4 is for prompts: a tokenizer never puts a boundary where a user stops typing ("def f(self, "), so a
model trained on whole encodings has not seen what follows such a boundary. Dropout of BPE merges would do as
well, but it lengthens every text; a cut each two hundred characters costs one percent.
"""

import ast
import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "__pycache__",
}
_SKIPPED_FILES = {"pydoc_data/topics.py", "stringprep.py", "html/entities.py", "turtle.py"}
_MAX_FILE_BYTES = 400_000
_HELD_OUT_ONE_IN = 50
_MEAN_PIECE_CHARS = 200
_MAX_CHAT_CHARS = 900


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training documents, held-out documents and chat samples, all plain text without end marks."""

    train: list[str]
    held_out: list[str]
    chats: list[str]

    @property
    def train_bytes(self) -> int:
        """Size of the training documents without the chat samples."""
        return sum(len(text.encode()) for text in self.train)


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token that the vocabulary is known to hold."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def chat_text(question: str, answer: str) -> str:
    """One ChatML conversation of two turns, as the model's chat template writes it."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n{answer}{TURN_END}\n"


def stdlib_files(folder: Path) -> list[Path]:
    """The source files below `folder` that count as training text, sorted by name."""
    chosen = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if _SKIPPED_FOLDERS.intersection(name.parts) or name.parts[0].startswith("config-"):
            continue
        if name.as_posix() in _SKIPPED_FILES or path.stat().st_size > _MAX_FILE_BYTES:
            continue
        if not name.name.startswith(("_sysconfigdata", "_pydecimal")):
            chosen.append(path)
    return chosen


def load_corpus(*, chat_fraction: float, seed: int) -> Corpus:
    """Read the running interpreter's standard library.

    Chat samples come to `chat_fraction` of the characters, or less where the library has too few functions.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    held_out: list[str] = []
    for path in stdlib_files(folder):
        text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
        if len(text) < 64:
            continue
        digest = hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest()
        (held_out if digest[0] * 256 + digest[1] < 65536 // _HELD_OUT_ONE_IN else train).append(text)
    budget_chars = int(chat_fraction * sum(len(text) for text in train))
    chats = chat_samples(train, budget_chars, random.Random(seed))
    return Corpus(train=train, held_out=held_out, chats=chats)


def function_sources(text: str) -> list[tuple[str, str]]:
    """(name, source) of the short top-level functions and methods of a file, methods dedented to column 0."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    lines = text.split("\n")
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        indent = node.col_offset
        body = lines[node.lineno - 1 : node.end_lineno]
        source = "\n".join(line[indent:] if not line[:indent].strip() else line for line in body)
        if 80 <= len(source) <= _MAX_CHAT_CHARS:
            found.append((node.name, source))
    return found


def chat_samples(texts: list[str], budget_chars: int, rng: random.Random) -> list[str]:
    """Questions answered by functions of `texts`: complete one's first lines, or write it given its name."""
    functions = [function for text in texts for function in function_sources(text)]
    rng.shuffle(functions)
    samples, num_chars = [], 0
    for name, source in functions:
        if num_chars >= budget_chars:
            break
        lines = source.split("\n")
        num_given = rng.randint(1, max(1, len(lines) // 2))
        if rng.random() < 0.7:
            given, rest = "\n".join(lines[:num_given]), "\n".join(lines[num_given:])
            sample = chat_text(f"Complete this Python code:\n{given}", rest)
        else:
            sample = chat_text(f"Write a Python function named {name}.", source)
        samples.append(sample)
        num_chars += len(sample)
    return samples


def cut(text: str, rng: random.Random) -> list[str]:
    """Split `text` where prompts end: behind a blank, newline, bracket or dot, at times inside a word.

    An indentation is left whole unless chance has it: nobody stops typing in the middle of one.
    """
    pieces, start = [], 0
    while start < len(text):
        end = start + int(rng.expovariate(1 / _MEAN_PIECE_CHARS)) + 1
        if rng.random() < 0.75:
            while end < len(text) and (text[end - 1] not in " \n(." or text[end - 1 : end + 1] == "  "):
                end += 1
        pieces.append(text[start:end])
        start = end
    return pieces


def pack(tokenizer: Tokenizer, corpus: Corpus, path: Path, *, num_passes: int, seed: int) -> int:
    """Write `num_passes` differently cut and shuffled encodings of the training text to `path`.

    The file is a bare array of uint16 token ids. Returns the number of ids in it.
    """
    rng = random.Random(seed)
    end_id = special_id(tokenizer, END_OF_TEXT)
    num_ids = 0
    with path.open("wb") as file:
        for _ in range(num_passes):
            texts = corpus.train + corpus.chats
            rng.shuffle(texts)
            for text in texts:
                encodings = tokenizer.encode_batch(cut(text, rng), add_special_tokens=False)
                ids = [token_id for encoding in encodings for token_id in encoding.ids] + [end_id]
                np.asarray(ids, dtype=np.uint16).tofile(file)
                num_ids += len(ids)
    return num_ids


def top_level_starts(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """For every position of a packed stream: does an unindented line, or a document, begin there?"""
    texts = [tokenizer.decode([token_id]) for token_id in range(tokenizer.get_vocab_size())]
    ends_line = np.array([not text.strip("\n") for text in texts])  # special tokens decode to nothing
    has_text = np.array([bool(text[:1].strip()) for text in texts])
    starts = has_text[ids]
    starts[1:] &= ends_line[ids[:-1]]
    return starts


def pack_held_out(tokenizer: Tokenizer, corpus: Corpus) -> tuple[np.ndarray, int]:
    """Uncut encoding of the held-out files, each behind an end mark, and the number of bytes they hold."""
    end_id = special_id(tokenizer, END_OF_TEXT)
    ids: list[int] = []
    for text in corpus.held_out:
        ids += [*tokenizer.encode(text, add_special_tokens=False).ids, end_id]
    return np.asarray(ids, dtype=np.uint16), sum(len(text.encode()) for text in corpus.held_out)
