"""The OpenAPI description against the server: schemathesis makes requests from it, in process, and checks the answers.

All its default checks but one: data that fits the description may still be refused, because some limits (token ids, the
length of a prompt in tokens, conflicting parameters) cannot be said in JSON schema.
"""

from functools import partial

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from antiphon.serve.api.guard.harmless import HARMLESS
from antiphon.serve.api.server import create_app
from antiphon.serve.api.settings import ServerSettings
from tests.serve.api_harness import fake_engine, small_grammars, small_tokenizer

_app = create_app(fake_engine(), small_tokenizer(), ServerSettings(allowed_hosts=("*",)), small_grammars())
schema = schemathesis.openapi.from_asgi("/openapi.json", _app)


made = partial(
    settings,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@schema.parametrize()
@made(max_examples=8)
def test_answers_are_as_described(case: schemathesis.Case) -> None:
    case.call_and_validate(excluded_checks=[positive_data_acceptance])


@pytest.mark.slow
@schema.parametrize()
@made(max_examples=50)
def test_many_answers_are_as_described(case: schemathesis.Case) -> None:
    case.call_and_validate(excluded_checks=[positive_data_acceptance])


def test_the_description_names_every_endpoint_and_parameter() -> None:
    description = _app.openapi()
    assert set(description["paths"]) == {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/invocations",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/health",
        "/ping",
        "/load",
        "/version",
        "/metrics",
        "/dashboard",
        "/dashboard/data",
        "/placement",
        "/drain/{worker}",
        "/undrain/{worker}",
    }
    components = description["components"]["schemas"]
    promised = {
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "logprobs",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "regex",
        "ebnf",
        "user",
        "truncate_prompt_tokens",
        "truncation_side",
        "best_of",
        "prompt_cache_key",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "add_special_tokens",
        "prompt_logprobs",
        "allowed_token_ids",
        "bad_words",
        "logprob_token_ids",
        "priority",
        "request_id",
        "safety_identifier",
        "metadata",
        *HARMLESS,
    }
    assert set(components["CompletionRequest"]["properties"]) == promised | {"prompt", "echo"}
    chat_only = {"messages", "max_completion_tokens", "top_logprobs", "echo"}  # and what HARMLESS has, obeyed by chats
    chat = components["ChatCompletionRequest"]["properties"]
    assert "enum" not in str(chat["tools"])
    assert {"$ref": "#/components/schemas/NamedToolChoice"} in chat["tool_choice"]["anyOf"][0]["oneOf"]
    assert set(components["ChatCompletionRequest"]["properties"]) == promised | chat_only
    assert components["CompletionRequest"]["properties"]["tools"]["enum"] == [[], None]
    for path, operations in description["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
