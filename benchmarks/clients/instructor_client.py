"""What programs on Instructor do: answers as objects, by tools and by schemas. Usage: `instructor_client.py URL MODEL`.

Runs in an environment with `instructor` and `anthropic`; an exception or a failed check ends it with exit code 1.
"""

import sys
from typing import Any

import anthropic
import instructor
import openai
from checking import check
from instructor import Mode
from pydantic import BaseModel, ConfigDict

HELLO: Any = [{"role": "user", "content": "bada do"}]


class InstructorVerdict(BaseModel):
    """An opinion."""

    model_config = ConfigDict(extra="forbid")
    good: bool


def main() -> None:
    url, model = sys.argv[1:]
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        options: Any = {"model": model, "messages": HELLO, "max_tokens": 400, "temperature": 0.5, "seed": 3}
        verdict = client.create(response_model=InstructorVerdict, max_retries=0, **options)
        check(isinstance(verdict, InstructorVerdict), f"an object by {mode.name}")
        *_, last = client.create_partial(response_model=InstructorVerdict, max_retries=0, **options)
        check(isinstance(last.good, bool), f"a streamed object by {mode.name}")
    other = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none", timeout=60))
    verdict = other.create(response_model=InstructorVerdict, model=model, messages=HELLO, max_tokens=400, max_retries=0)
    check(isinstance(verdict, InstructorVerdict), "an object over Anthropic's API")


if __name__ == "__main__":
    main()
