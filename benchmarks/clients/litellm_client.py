"""What programs on LiteLLM do: chat, stream, complete, call a tool. Usage: `litellm_client.py URL MODEL`.

Runs in an environment with `litellm`; an exception or a failed check ends it with exit code 1.
"""

import json
import sys
from typing import Any

import litellm
from checking import check

HELLO = [{"role": "user", "content": "bada do"}]
SCHEMA = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}
TOOL = {"type": "function", "function": {"name": "judge", "parameters": {**SCHEMA, "additionalProperties": False}}}


def main() -> None:
    url, model = sys.argv[1:]
    options: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "timeout": 60}
    for provider in ("openai", "hosted_vllm"):
        name = f"{provider}/{model}"
        answer = litellm.completion(model=name, messages=HELLO, max_tokens=8, **options)
        check(answer.usage.completion_tokens == 8, f"chat as {provider}")
        stream = litellm.completion(
            model=name, messages=HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True}, **options
        )
        check(len(list(stream)) > 5, f"streamed chat as {provider}")
        called = litellm.completion(
            model=name, messages=HELLO, max_tokens=400, seed=3, tools=[TOOL], tool_choice="required", **options
        )
        (call, *_) = called.choices[0].message.tool_calls
        check(isinstance(json.loads(call.function.arguments)["good"], bool), f"a tool is called as {provider}")
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "yes"} for call in called.choices[0].message.tool_calls
        ]
        turns = [*HELLO, called.choices[0].message, *results]
        again = litellm.completion(model=name, messages=turns, max_tokens=8, tools=[TOOL], **options)
        check(again.usage.completion_tokens > 0, f"its result is read as {provider}")
        long = [{"role": "user", "content": "bada do " * 20_000}]
        try:
            litellm.completion(model=name, messages=long, max_tokens=8, **options)
        except litellm.ContextWindowExceededError:
            check(True, f"a prompt that is too long is known as such as {provider}")
    text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="bada", max_tokens=8, **options)
    check(bool(text.choices[0].text), "completion")


if __name__ == "__main__":
    main()
