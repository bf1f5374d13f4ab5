"""Schemathesis makes requests from the running server's own description: none may end as a 5xx.

The checks of every answer against the description run in process, in `test_api_schema`.
"""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.serve.server_harness import ServerProcess

MAX_EXAMPLES = 40


@pytest.mark.slow
def test_nothing_is_a_server_error(live_server: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{live_server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == 27
    asked = [(operation, GenerationMode.POSITIVE) for operation in operations]
    asked += [(operation, GenerationMode.NEGATIVE) for operation in operations if operation.body]
    for operation, mode in asked:

        @settings(
            max_examples=MAX_EXAMPLES,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and "messages" in case.body:
                case.body.setdefault("max_tokens", 4)  # a chat's default is all of the context: right, but long
            if isinstance(case.body, dict) and "input" in case.body:
                case.body.setdefault("max_output_tokens", 4)
            if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int):
                case.body["max_tokens"] = min(case.body["max_tokens"], 64)
            response = case.call(timeout=60)
            assert response.status_code < 500, response.text

        ask()
    assert live_server.complete().status_code == 200
    assert live_server.http.get("/health").status_code == 200
