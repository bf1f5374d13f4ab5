"""What a chat template reads, found by parsing it; nothing of it is run.

A value for a variable that the template does not read would be dropped in silence, so callers ask first.
"""

import re
from functools import lru_cache

import jinja2
from jinja2 import meta

# Hugging Face's tag around generated text; it changes nothing about what is read.
_GENERATION_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")

# What the server itself gives to a template, or to the function that renders it.
_NOT_FOR_REQUESTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@lru_cache(maxsize=8)
def variables_read(template: str) -> frozenset[str]:
    """All variables that `template` reads without setting them; none when it cannot be parsed (rendering says why)."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", template))))
    except (jinja2.TemplateSyntaxError, RecursionError):
        return frozenset()


def settable_variables(template: str) -> frozenset[str]:
    """The variables that a request may set: not the conversation, the tools, or the tokenizer's special tokens."""
    names = variables_read(template) - _NOT_FOR_REQUESTS
    return frozenset(name for name in names if not name.endswith("_token"))
