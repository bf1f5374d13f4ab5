"""Run the API tests that vLLM's source package brings against a server of ours: the same requests, the same answers.

    python scripts/peer_suite.py [--only TEXT] [--json FILE] [--keep FOLDER]

1. the source package comes from the package registry; its tests are unpacked into a temporary folder
2. `peer_suite/launcher.py` takes the place of the file that starts the peer's server, `peer_suite/conftest.py` lets the
   tests be imported without the peer; nothing else is changed
3. a tiny checkpoint that thinks, answers and stops after some twenty words each is served to every test that starts a
   server
4. a table: passed, failed, left out, and why; exit code 1 if fewer than 95% of the tests that apply pass

`peer_suite/left_out.json` lists what does not apply, with reasons, and which failures are known, with theirs. SGLang's
source package brings no tests of its API. The peer's files stay in the temporary folder.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from make_model import SPECIAL_TOKENS, YardstickShape, make_model  # noqa: E402

PIECES = Path(__file__).with_name("peer_suite")
ENVIRONMENT = ROOT / ".peers" / "suite"
PACKAGE, VERSION = "vllm", "0.33.0"
FOLDERS = ("tests/entrypoints/openai", "tests/entrypoints/anthropic")
ALSO = ("tests/entrypoints/__init__.py", "tests/__init__.py", "tests/entrypoints/conftest.py", "examples/")
SHAPE = YardstickShape(
    num_layers=2,
    hidden_size=64,
    num_experts=8,
    num_experts_per_token=2,
    expert_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=8192,
    max_position_embeddings=65536,
)
REQUIREMENTS = ("pytest<9.1", "pytest-asyncio", "openai", "anthropic", "requests", "httpx", "transformers", "numpy")
REQUIREMENTS += ("fastapi", "regex", "schemathesis", "jsonschema", "jinja2")
TEST_TIMEOUT_S = 3600.0
NEEDED_SHARE = 0.95
NEXT_THOUGHT, NEXT_WORD = 15.0, 10.0  # logits of the word that follows in reasoning, and in an answer
ENDING, PUNCTUATION = 30.0, 7.0  # of an end that is due, of a quote
LOUDNESS = 8.0  # of an embedding beside what the layers add
REASONING_WORDS, ANSWER_WORDS = 20, 24
STAYING = 4.0  # logits of the words of the stretch that one is in, reasoning or answer
MARKED, PUNCTUATED, PLACED = 0.7, 0.4, 0.4  # parts of an embedding: something ends here; no word; the stretch it is in
THINK, NO_THINK, CALL, NO_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
TURNS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call as <tool_call>{...}</tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ 'tool' if message.role == 'tool' else message.role }}\n"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
PLAIN = TURNS + "{% endif %}"
THINKING = TURNS + (
    "<think>{% if enable_thinking is defined and enable_thinking is false %}\n\n</think>{% endif %}{% endif %}"
)


def fetch(folder: Path) -> Path:
    """The peer's source package, unpacked: only what its API tests read."""
    kept = ENVIRONMENT / f"{PACKAGE}-{VERSION}.tar.gz"
    if not kept.exists():
        index = f"{registry()}/{PACKAGE}/"
        request = urllib.request.Request(index, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            files = {file["filename"]: file for file in json.load(answer)["files"]}
        file = files[kept.name]
        print(f"{kept.name}: {file.get('size', 0) / 1e6:.0f} MB from {index}", flush=True)
        with urllib.request.urlopen(file["url"], timeout=300) as answer:
            body = answer.read()
        wanted = file["hashes"].get("sha256")
        if wanted and hashlib.sha256(body).hexdigest() != wanted:
            raise SystemExit(f"error: {kept.name} is not the file that {index} describes: try again")
        kept.write_bytes(body)
    top = f"{PACKAGE}-{VERSION}/"
    with tarfile.open(kept) as archive:
        wanted_names = tuple(top + name for name in (*FOLDERS, *ALSO))
        archive.extractall(folder, [m for m in archive if m.name.startswith(wanted_names)], filter="data")
    return folder / top


def registry() -> str:
    """The index that pip uses."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    said = subprocess.run(command, check=False, capture_output=True, text=True)
    return said.stdout.strip().rstrip("/") or "https://pypi.org/simple"


def install() -> Path:
    """The tests' own environment; its Python."""
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".complete"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        stamp.touch()
    return python


def make_checkpoint(folder: Path) -> None:
    """A tiny model with Qwen3's marks as tokens that keeps to a plan: each word has one likely successor, reasoning has
    about `REASONING_WORDS` and an answer `ANSWER_WORDS` of them, and strings of JSON end soon."""
    make_model(SHAPE, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([THINK, NO_THINK, CALL, NO_CALL])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    for name, ours in (("config.json", {"vocab_size": size}), ("tokenizer_config.json", {"chat_template": PLAIN})):
        values = json.loads((folder / name).read_text("utf-8"))
        (folder / name).write_text(json.dumps(values | ours), "utf-8")
    (folder.parent / "thinking.jinja").write_text(THINKING, "utf-8")
    shard = folder / f"model-00001-of-{SHAPE.num_layers + 1:05d}.safetensors"
    tensors = load_file(shard)
    embed, head = planned_words(tokenizer)
    tensors |= {"model.embed_tokens.weight": (LOUDNESS * embed).bfloat16(), "lm_head.weight": head.bfloat16()}
    save_file(tensors, shard, metadata={"format": "pt"})


def planned_words(tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of length sqrt(hidden size) and the head that follows the plan. Tokens are told apart by random
    directions; four directions are kept free: the last word of a stretch of reasoning, that of an answer, no word, and
    reasoning (forwards) or answer (backwards)."""
    draw = torch.Generator().manual_seed(1)
    width, size = SHAPE.hidden_size, tokenizer.get_vocab_size()
    basis = torch.linalg.qr(torch.randn(width, 4, generator=draw))[0]
    random = torch.randn(size, width, generator=draw)
    random = torch.nn.functional.normalize(random - random @ basis @ basis.T, dim=1) * width**0.5
    marks = basis.T * width**0.5
    texts = [tokenizer.id_to_token(token) for token in range(size)]
    special = {tokenizer.token_to_id(mark) for mark in (*SPECIAL_TOKENS, THINK, NO_THINK, CALL, NO_CALL)}
    is_word = [any(c.isascii() and c.isalpha() for c in text) and t not in special for t, text in enumerate(texts)]
    words = [token for token in torch.randperm(size, generator=draw).tolist() if is_word[token]]
    num_reasoning = 3 * len(words) // 4 // REASONING_WORDS * REASONING_WORDS
    reasoning, answers = words[:num_reasoning], words[num_reasoning:]
    successor = dict(zip(words, [*words[1:], words[0]], strict=True))
    successor |= {tokenizer.token_to_id(THINK): reasoning[0], tokenizer.token_to_id(NO_THINK): answers[0]}
    embed, head = random.clone(), torch.zeros(size, width)
    no_words = [token for token in range(size) if not is_word[token] and token not in special]
    for number, token in enumerate(no_words):
        successor[token] = answers[0 if texts[token] == "Ċ" else number * ANSWER_WORDS % len(answers)]
    ends = (reasoning[REASONING_WORDS - 1 :: REASONING_WORDS], answers[ANSWER_WORDS - 1 :: ANSWER_WORDS], no_words)
    places = torch.zeros(size, 1)
    places[[*reasoning, tokenizer.token_to_id(THINK)]] = 1.0
    places[[*answers, tokenizer.token_to_id(NO_THINK)]] = -1.0
    for mark, tokens, part in zip(marks, ends, (MARKED, MARKED, PUNCTUATED), strict=False):
        embed[tokens] = (1 - part**2) ** 0.5 * random[tokens] + part * mark
    embed = (1 - (PLACED * places) ** 2) ** 0.5 * embed + PLACED * places * marks[3]
    for token, follower in successor.items():
        head[follower] += random[token] * ((NEXT_THOUGHT if places[follower] > 0 else NEXT_WORD) / width)
    head[words] += places[words] * marks[3] * (STAYING / PLACED / width)
    for token, mark in ((NO_THINK, marks[0]), ("<|im_end|>", marks[1])):
        head[tokenizer.token_to_id(token)] = mark * (ENDING / MARKED / width)
    for rank, token in enumerate(('"', "}", "]", ",")):
        ending = (marks[0] + marks[1]) * (0.7 * ENDING / MARKED / width)
        head[tokenizer.token_to_id(token)] = ending * (1 - 0.1 * rank) + marks[2] * (
            (PUNCTUATION - 0.5 * rank) / PUNCTUATED / width
        )
    return embed, head


def run_tests(python: Path, suite: Path, work: Path, only: str) -> None:
    shutil.copy(PIECES / "launcher.py", suite / "tests" / "utils.py")
    shutil.copy(PIECES / "conftest.py", suite / "tests" / "conftest.py")
    (suite / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n", "utf-8")
    command = [str(python), "-m", "pytest", *FOLDERS, "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command += ["-k", only] if only else []
    set_here = {"PEER_SUITE": str(work), "PEER_SUITE_PYTHON": sys.executable, "PYTHONPATH": str(suite)}
    with (work / "tests.log").open("wb") as log:
        subprocess.run(
            command,
            check=False,
            cwd=suite,
            env=os.environ | set_here,
            stdout=log,
            stderr=log,
            timeout=TEST_TIMEOUT_S,
        )


def merged(lines: list[dict[str, str]], left_out: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each test: a failure counts before anything else that was noted of it."""
    rows: dict[str, dict[str, str]] = {}
    for row in lines:
        reason = reason_of(row["test"], left_out)
        if row["outcome"] == "not collected" and reason:
            row |= {"outcome": "left out", "reason": reason}
        if row["test"] not in rows or row["outcome"] == "failed":
            rows[row["test"]] = row
    return list(rows.values())


def reason_of(test: str, listed: list[dict[str, Any]]) -> str:
    """The reason in the first row of a list that names a part of the test's name, ``$`` its end; "" for none."""
    return next((row["reason"] for row in listed if any(part in f"{test}$" for part in row["tests"])), "")


def show(rows: list[dict[str, str]], known: list[dict[str, Any]]) -> float:
    """Prints what happened; the share of the tests that apply which passed."""
    for row in rows:
        if row["outcome"] in ("failed", "not collected"):
            known_for = reason_of(row["test"], known) or "no"
            print(f"{row['outcome']}: {row['test']}\n    {row['reason']}\n    known: {known_for}")
    reasons = Counter(row["reason"].partition(":")[0] for row in rows if row["outcome"] == "left out")
    counts = Counter(row["outcome"] for row in rows)
    apply = counts["passed"] + counts["failed"]
    print("\n| outcome | tests |\n|---|---|")
    print("\n".join(f"| {outcome} | {count} |" for outcome, count in sorted(counts.items())))
    print("\n| left out for | tests |\n|---|---|")
    print("\n".join(f"| {reason} | {count} |" for reason, count in reasons.most_common()))
    share = counts["passed"] / apply if apply else 0.0
    print(f"\n{counts['passed']} of the {apply} tests that apply pass: {share:.1%}")
    return share


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the API tests that vLLM's source package brings against us.")
    parser.add_argument("--only", default="", help="only tests whose names fit this expression of pytest -k")
    parser.add_argument("--json", type=Path, help="write a row for each test to this file")
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it")
    options = parser.parse_args(arguments)
    python = install()
    listed = json.loads((PIECES / "left_out.json").read_text("utf-8"))
    with tempfile.TemporaryDirectory(prefix="antiphon-peer-suite-") as name:
        work = options.keep or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        (work / "results.jsonl").unlink(missing_ok=True)
        (work / "left_out.json").write_text(json.dumps(listed["left_out"]), "utf-8")
        suite = fetch(work)
        make_checkpoint(work / "checkpoint")
        run_tests(python, suite, work, options.only)
        results = work / "results.jsonl"
        if not results.exists():
            print(f"error: no test ran: {(work / 'tests.log').read_text('utf-8')[-2000:]}", file=sys.stderr)
            return 1
        rows = merged([json.loads(line) for line in results.read_text("utf-8").splitlines()], listed["left_out"])
    share = show(rows, listed["known"])
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    return int(share < NEEDED_SHARE)


if __name__ == "__main__":
    sys.exit(main())
