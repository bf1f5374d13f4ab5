"""LangChain's own standard tests of a chat model, against a server. Needs `langchain-openai` and `langchain-tests`.

Left out is what a model must be trained for: to end its strings, and to stop by itself after it has seen the result of
a tool. Exit code 1 if a test fails, or if hardly any ran.
"""

import sys
from typing import Any

import pytest
from checking import MODEL, OPENAI_URL
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

_LEAST = 15  # of the tests in version 1.1
_TRAINED = ("agent_loop", "tool_calling", "bind_runnables", "structured_output", "json_mode", "unicode_tool_call")


class TestServer(ChatModelIntegrationTests):
    """The standard tests; properties say what the server can."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        options = {"model": MODEL, "base_url": OPENAI_URL, "api_key": "none", "timeout": 60, "max_retries": 0}
        return {**options, "stream_usage": True, "max_tokens": 400, "temperature": 0.5, "seed": 3}

    @property
    def model_override_value(self) -> str:
        return MODEL

    @property
    def supports_json_mode(self) -> bool:
        return True


class Count:
    """Tests that passed."""

    passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


def main() -> int:
    count = Count()
    options = ["-q", "-p", "no:cacheprovider", "--tb=line", "-rf", "--rootdir=/", "-o", "asyncio_mode=auto"]
    # One loop: the client keeps its connections from test to test.
    options += [f"-oasyncio_default_{what}_loop_scope=session" for what in ("test", "fixture")]
    options += ["-k", f"not ({' or '.join(_TRAINED)})"]
    code = pytest.main([*options, __file__], plugins=[count])
    if count.passed < _LEAST:
        print(f"failed: {count.passed} standard tests passed, of at least {_LEAST}")
        return 1
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
