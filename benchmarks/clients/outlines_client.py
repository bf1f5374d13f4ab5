"""What programs on Outlines and guidance do: answers that follow a type, an expression or a grammar.

They ask for them by the parameters of OpenAI's, vLLM's and SGLang's servers. Needs `outlines`, `guidance`, `openai`.
"""

import json
import re
from typing import Any, Literal

import openai
import outlines
from checking import MODEL, OPENAI_URL, Verdict, check
from guidance import assistant, gen, models, select, user
from guidance import json as guided_json
from guidance.models.experimental import VLLMModel
from outlines.types import CFG
from pydantic import BaseModel, ConfigDict, Field

ASKED = "bada do"


class Record(BaseModel):
    """Keys that are listed, bounds and a union, as grammars must read them."""

    model_config = ConfigDict(extra="forbid")
    marks: dict[Literal["a", "b"], bool]
    count: int = Field(ge=1, le=9)
    found: Verdict | None


def check_outlines(client: openai.OpenAI) -> None:
    for name, make in (
        ("openai", outlines.from_openai),
        ("vllm", outlines.from_vllm),
        ("sglang", outlines.from_sglang),
    ):
        model: Any = make(client, MODEL)
        for shape in (Verdict, Record):
            answer = shape.model_validate_json(model(ASKED, shape, max_tokens=2000))
            check(isinstance(answer, shape), f"{shape.__name__}, {name}")
        streamed = "".join(model.stream(ASKED, Verdict, max_tokens=400))
        check(isinstance(Verdict.model_validate_json(streamed), Verdict), f"a streamed object, {name}")
        if name != "openai":
            word = model(ASKED, outlines.regex("[a-c]{3}"), max_tokens=20)
            check(re.fullmatch("[a-c]{3}", word) is not None, f"an expression, {name}")
            check(model(ASKED, Literal["yes", "no"], max_tokens=20) in ("yes", "no"), f"a choice, {name}")
    rules = CFG('start: "x" | "y"')
    check(outlines.from_vllm(client, MODEL)(ASKED, rules, max_tokens=5) in ("x", "y"), "a grammar")


def check_guidance() -> None:
    for kind in (models.OpenAI, VLLMModel):
        asked = kind(MODEL, base_url=OPENAI_URL, api_key="none", echo=False)
        with user():
            asked += ASKED
        with assistant():
            check(isinstance((asked + gen("said", max_tokens=8))["said"], str), f"text, guidance's {kind.__name__}")
            made = (asked + guided_json("made", schema=Verdict, max_tokens=400))["made"]
            check(isinstance(json.loads(made)["good"], bool), f"an object, guidance's {kind.__name__}")
            if kind is VLLMModel:
                check((asked + select(["yes", "no"], name="word"))["word"] in ("yes", "no"), "a choice, guidance")
                word = (asked + gen("word", regex="[a-c]{3}", max_tokens=20))["word"]
                check(re.fullmatch("[a-c]{3}", word) is not None, "an expression, guidance")


def main() -> None:
    check_outlines(openai.OpenAI(base_url=OPENAI_URL, api_key="none", max_retries=0, timeout=60))
    check_guidance()


if __name__ == "__main__":
    main()
