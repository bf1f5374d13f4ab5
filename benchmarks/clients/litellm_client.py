"""What programs on LiteLLM do: chat, stream, complete, call a tool. Needs `litellm`."""

import json
from functools import partial
from typing import Any

import litellm
from checking import HELLO, MODEL, OPENAI_URL, TOO_LONG, Verdict, check, check_refused

TOOL = {"type": "function", "function": {"name": "judge", "parameters": Verdict.model_json_schema()}}
OPTIONS: dict[str, Any] = {"api_base": OPENAI_URL, "api_key": "none", "num_retries": 0, "timeout": 60}


def main() -> None:
    for provider in ("openai", "hosted_vllm"):
        complete = partial(litellm.completion, model=f"{provider}/{MODEL}", max_tokens=8, **OPTIONS)
        check(complete(messages=HELLO).usage.completion_tokens == 8, f"chat as {provider}")
        stream = complete(messages=HELLO, stream=True, stream_options={"include_usage": True})
        check(len(list(stream)) > 5, f"streamed chat as {provider}")
        message = (
            complete(messages=HELLO, max_tokens=400, seed=3, tools=[TOOL], tool_choice="required").choices[0].message
        )
        (call, *_) = message.tool_calls
        check(isinstance(json.loads(call.function.arguments)["good"], bool), f"a tool is called as {provider}")
        results = [{"role": "tool", "tool_call_id": each.id, "content": "yes"} for each in message.tool_calls]
        again = complete(messages=[*HELLO, message, *results], tools=[TOOL])
        check(again.usage.completion_tokens > 0, f"its result is read as {provider}")
        what = f"a prompt that is too long is known as such as {provider}"
        check_refused(partial(complete, messages=TOO_LONG), litellm.ContextWindowExceededError, what)
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="bada", max_tokens=8, **OPTIONS)
    check(bool(text.choices[0].text), "completion")


if __name__ == "__main__":
    main()
