"""What programs on Instructor do: answers as objects, by tools and by schemas. Needs `instructor` and `anthropic`."""

from typing import Any

import anthropic
import instructor
import openai
from checking import HELLO, MODEL, OPENAI_URL, URL, Verdict, check
from instructor import Mode


def main() -> None:
    plain = openai.OpenAI(base_url=OPENAI_URL, api_key="none", max_retries=0, timeout=60)
    options: Any = {"response_model": Verdict, "model": MODEL, "messages": HELLO, "max_tokens": 400, "max_retries": 0}
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        verdict = client.create(**options, temperature=0.5, seed=3)
        check(isinstance(verdict, Verdict), f"an object by {mode.name}")
        *_, last = client.create_partial(**options, temperature=0.5, seed=3)
        check(isinstance(last.good, bool), f"a streamed object by {mode.name}")
    other = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="none", timeout=60))
    check(isinstance(other.create(**options), Verdict), "an object over Anthropic's API")


if __name__ == "__main__":
    main()
