"""Chats: their texts and what is learned of them, packing, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from antiphon.base.errors import UserError
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.models.config import load_model_spec
from antiphon.train.config_tables import DataConfig, SourceConfig
from antiphon.train.documents import Document
from antiphon.train.encoder import ChatTexts, Encoder
from antiphon.train.samples import Samples
from antiphon.train.token_file import SourceTokens, TokenFile
from antiphon.train.tokens import open_tokens, tokenize
from tests.train.harness import write_model

CHAT_ML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{%- elif m.role == 'assistant' %} {%- generation %} {{ m.content | trim }}{{ eos_token }}{%- endgeneration %}"
    "{%- endif %}{% endfor %}"
)
TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}{%- generation %}"
    "{{- m.content or '' }}{%- for c in m.tool_calls or [] %}{{- '<call>' + (c.function | tojson) + '</call>' }}"
    "{%- endfor %}{{- '<|im_end|>' }}{%- endgeneration %}{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}"
    "{{- '\n' }}{%- endfor %}"
)
LAST_ONLY = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' and loop.last %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{%- for m in messages -%}{%- set role = 'model' if m.role == 'assistant' else m.role -%}"
    "{{ '<start>' + role + '\n' }}{%- if role == 'model' -%}{%- generation -%}{{ m.content | trim }}{{ '<stop>\n' }}"
    "{%- endgeneration -%}{%- else -%}{{ m.content | trim }}{{ '<stop>\n' }}{%- endif -%}{%- endfor -%}"
)
MACRO = (
    "{% macro turn(m) %}{{ '(' + m.role + ')' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}"
)
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]},
    {
        "messages": [
            {"role": "system", "content": "be an old barn"},
            {"role": "user", "content": "one  two"},
            {"role": "assistant", "content": "three\n\nfour"},
            {"role": "user", "content": "five"},
            {"role": "assistant", "content": "six"},
        ]
    },
]
CALL = {"type": "function", "function": {"name": "roof", "arguments": {"rain": 1}}}
WITH_TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "is it red"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "red"},
        {"role": "assistant", "content": "it is red"},
    ],
    "tools": [{"type": "function", "function": {"name": "roof", "description": "rain fell"}}],
}


def encoder(folder: Path, template: str) -> Encoder:
    """Of a model whose folder has this template."""
    write_model(folder)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<end>", "eos_token": "<end>"}))
    config = DataConfig(files=("x.jsonl",), kind="chat")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Encoder(tokenizer, folder, load_model_spec(folder), config, seed=0)


@pytest.mark.parametrize("template", [CHAT_ML, LLAMA, TOOLS, LAST_ONLY, GEMMA])
def test_what_is_learned_is_the_mask_of_transformers(tmp_path: Path, template: str) -> None:
    ours = encoder(tmp_path, template)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<end>", eos_token="<end>", chat_template=template
    )
    source = SourceConfig(name="chats", files=("x.jsonl",), kind="chat")
    for record in [*CHATS, *([WITH_TOOLS] if template == TOOLS else [])]:
        ((_, (ids, learned, _)),) = ours.encode([(Document("", 0, 1.0, record), Path("x.jsonl"))], source)
        wanted = theirs.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = [bool(each) for each in wanted["assistant_masks"]]
        assert any(mask)
        num = len(mask)
        assert ids[:num].tolist() == wanted["input_ids"]
        assert learned[:num].tolist() == mask
        assert len(ids) - num in (0, 1), "an end mark where the template has none"


def texts(template: str, record: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Each text, and the parts of it that are learned."""
    found = ChatTexts(template, {}, "model").of(record, "a.jsonl")
    return [(text, [text[first:end] for first, end in spans]) for text, spans in found]


PLAIN = CHAT_ML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
FORGETS = (  # the reasoning of earlier turns, as Qwen3's template does
    "{% set last = messages | map(attribute='role') | list %}{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{% if m.thinking and loop.last %}{{ '(' + m.thinking + ')' }}{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def test_without_marks_an_answer_is_what_follows_its_prompt() -> None:
    ((text, learned),) = texts(PLAIN, CHATS[1])
    assert text == texts(CHAT_ML, CHATS[1])[0][0]
    assert learned == ["three\n\nfour<|im_end|>", "six<|im_end|>"]


def test_marks_inside_a_macro_hold_too() -> None:
    """`transformers` takes other places there: it counts what was written outside of the macro only."""
    assert texts(MACRO, CHATS[0]) == [("(user)the cat(assistant)sat on the mat!", ["sat on the mat!"])]


def test_a_template_that_rewrites_earlier_turns_makes_a_text_of_each() -> None:
    chat = {
        "messages": [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "2", "thinking": "a"},
            {"role": "user", "content": "3"},
            {"role": "assistant", "content": "4", "thinking": "b"},
        ]
    }
    assert texts(FORGETS, chat) == [
        ("<user>1<assistant>(a)2", ["(a)2"]),
        ("<user>1<assistant>2<user>3<assistant>(b)4", ["(b)4"]),
    ]


def test_prompts_and_answers_need_no_template(tmp_path: Path) -> None:
    assert texts("", {"prompt": "the cat ", "answer": "sat"}) == [("the cat sat", ["sat"])]
    write_model(tmp_path / "model")
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "the cat sat", "answer": " on <end> mat"}) + "\n")
    config = DataConfig(files=(str(file),), kind="answers", held_out=0.0)
    tokenize(config, tmp_path / "model", load_model_spec(tmp_path / "model"), tmp_path / "cache", seed=0)
    found = open_tokens(tmp_path / "cache", "train")
    assert found.learned is not None
    assert found.ids[-1] == 0
    assert found.ids.tolist().count(0) == 1, "control tokens in texts are text"
    tokenizer = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    assert tokenizer.decode(found.ids[found.learned == 1].tolist()) == " on <end> mat"


def test_chats_of_tables_and_lines_are_the_same(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(PLAIN)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in CHATS))
    parquet.write_table(pyarrow.Table.from_pylist(CHATS), tmp_path / "a.parquet")
    ids = []
    for name in ("a.jsonl", "a.parquet"):
        config = DataConfig(files=(str(tmp_path / name),), kind="chat", held_out=0.0)
        tokenize(config, tmp_path / "model", load_model_spec(tmp_path / "model"), tmp_path / name[2:], seed=0)
        ids.append(open_tokens(tmp_path / name[2:], "train").ids.tolist())
    assert ids[0] == ids[1]


def test_windows_begin_with_a_chat_and_hold_whole_ones() -> None:
    starts = np.asarray([0, 4, 9, 12, 33])
    tokens = TokenFile(
        np.arange(40), starts, 0, learned=np.ones(40, np.uint8), sources=(SourceTokens("chats", 0, 40, is_chat=True),)
    )
    samples = Samples(tokens, 9, seed=0, document_masks=True, shuffled=False)
    batch = samples.batch(range(samples.num_windows), torch.device("cpu"))
    assert batch.ids_BS[:, 0].tolist() == [0, 9, 12, 21, 30]
    learned = [row[row != IGNORED].tolist() for row in batch.targets_BS]
    assert learned[0] == [1, 2, 3, 5, 6, 7, 8], "two whole chats; nothing is learned across them"
    assert learned[1] == [10, 11], "the next one is longer than what is left"
    assert [*learned[2], *learned[3], *learned[4]] == [*range(13, 33), *range(34, 40)], "a long one is cut"


def test_what_is_no_chat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model: has no chat template .* use kind 'answers'"):
        texts("", CHATS[0])
    with pytest.raises(UserError, match=r"a\.jsonl: messages have to be a list of objects with role and content"):
        texts(PLAIN, {"messages": ["hello"]})
    with pytest.raises(UserError, match=r"a\.jsonl: the chat template does not accept these messages: no system"):
        texts("{{ raise_exception('no system') }}", CHATS[1])
    with pytest.raises(UserError, match="the chat template cannot be used"):
        texts("{% for %}", CHATS[0])
    assert texts(PLAIN, {"messages": CHATS[0]["messages"][:1]}) == []
    write_model(tmp_path / "model")
    for name, content, said in (
        ("a.jsonl", '{"text": "x"}', r"line 1: no messages \(there is: text\): data.kind 'chat' needs them"),
        ("a.txt", "x", r"data.kind is 'chat', which is read from .jsonl, .json, .parquet and .arrow: convert it"),
    ):
        (tmp_path / name).write_text(content)
        config = DataConfig(files=(str(tmp_path / name),), kind="chat")
        with pytest.raises(UserError, match=said):
            tokenize(config, tmp_path / "model", load_model_spec(tmp_path / "model"), tmp_path / "cache", seed=0)
