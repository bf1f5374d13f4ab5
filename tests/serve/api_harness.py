"""A small tokenizer, and the real server on a free port in a thread, for the tests of the HTTP API."""

import http.client
import json
import socket
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from antiphon.base.errors import UserError
from antiphon.serve.api import server as server_module
from antiphon.serve.api.server import DrainingServer, create_app, listen, make_server, reserve, url_of
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.text.grammar_text import json_grammar
from antiphon.serve.text.structured import GrammarCompiler
from antiphon.serve.text.text_service import TextService
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.serve.text.tokenizer_reading import load_tokenizer
from tests.serve.fake_engine import FakeEngine

END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL_VOCAB_SIZE = 512


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """A byte-level BPE of 400 tokens, trained on this file."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([Path(__file__).read_text()], trainer)
    pretrained = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    pretrained.chat_template = chat_template
    pretrained.save_pretrained(str(folder))


@cache
def small_tokenizer(chat_template: str = CHAT_TEMPLATE) -> TextTokenizer:
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), chat_template)
        return load_tokenizer(Path(folder))


@cache
def small_grammars() -> GrammarCompiler:
    tokenizer = small_tokenizer()
    return GrammarCompiler(tokenizer.backend, MODEL_VOCAB_SIZE, (eos_id(),))


def compiling(compiler: GrammarCompiler, schema: dict[str, Any], client: Hashable = "") -> "Future[str]":
    """The grammar of JSON that fits `schema`, as a request asks for it."""
    return compiler.compile(partial(json_grammar, schema), client, "the JSON schema")


def followed(compiler: GrammarCompiler, schema: dict[str, Any]) -> str:
    """The same, waited for."""
    return compiling(compiler, schema).result()


def ids(text: str) -> list[int]:
    return small_tokenizer().encode(text, add_special_tokens=False)


def eos_id() -> int:
    return ids(END)[0]


def fake_engine(**options: Any) -> FakeEngine:
    engine = FakeEngine(vocab_size=MODEL_VOCAB_SIZE, eos_token_id=eos_id(), **options)
    engine.grammars = small_grammars()
    return engine


def says(text: str, *, ending: bool = True) -> FakeEngine:
    """An engine whose every answer is `text`, cut at `max_tokens`."""
    script = [*ids(text), *([eos_id()] if ending else [])]
    return fake_engine(script=lambda _prompt, params: script[: params.max_tokens])


@dataclass
class Live:
    """A running server and a way to talk to it."""

    url: str
    engine: FakeEngine
    server: DrainingServer
    http: httpx.Client
    api_key: str

    @cached_property
    def openai(self) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, timeout=30, http_client=http
        )

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "hello", **body})

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return self.http.post("/v1/chat/completions", json={"messages": messages, **body})

    def connect(self, *, receive_buffer_bytes: int | None = None) -> socket.socket:
        """A bare connection, for what no HTTP client would send or leave unread."""
        connection = socket.socket()
        connection.settimeout(30)
        if receive_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        connection.connect(("127.0.0.1", httpx.URL(self.url).port or 80))
        return connection

    def metric(self, name: str) -> float:
        """One sample of /metrics; 0 when it is not there."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.split(" ")[-1]) for line in lines if line.startswith(f"antiphon:{name} ")), 0.0)


def post(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a request."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next response; a body without a length goes on to the end."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def refusal(connection: socket.socket, status: int) -> dict[str, Any]:
    """The error of the next response, which ends its connection."""
    answer = read_answer(connection)
    assert answer[0] == status
    assert answer[1]["content-type"] == "application/json"
    assert answer[1]["connection"] == "close"
    error: dict[str, Any] = json.loads(answer[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def is_closed(connection: socket.socket, patience_s: float = 20.0) -> bool:
    """Whether the server closes the connection, having said nothing more."""
    connection.settimeout(patience_s)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


_describe = server_module._describe
_descriptions: dict[bool, dict[str, Any]] = {}


def described(app: FastAPI, *, with_keys: bool) -> dict[str, Any]:
    """All servers describe themselves alike, and working it out takes a third of a start."""
    if with_keys not in _descriptions:
        _descriptions[with_keys] = _describe(app, with_keys=with_keys)
    return _descriptions[with_keys]


def text_pids(service: TextService) -> list[int]:
    """Its processes that run now."""
    processes = [jobs._process for jobs in service._queues]
    return [process.pid for process in processes if process is not None]


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on `host:port` (port 0: any free one), or `UserError` with the reason."""
    listener = reserve(host, port)
    try:
        listen(listener, host)
    except UserError:
        listener.close()
        raise
    return listener


@contextmanager
def live(
    engine: FakeEngine, *, chat_template: str = CHAT_TEMPLATE, tokenizer: TextTokenizer | None = None, **settings: Any
) -> Iterator[Live]:
    """Serve `engine` until the block ends."""
    # Requests that tests write by hand are for the host x.
    server_settings = ServerSettings(port=0, **({"allowed_hosts": ("x",)} | settings))
    tokenizer = tokenizer or small_tokenizer(chat_template)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "_describe", described)
        app = create_app(engine, tokenizer, server_settings, small_grammars())
    server = make_server(app, server_settings)
    listener = bind("127.0.0.1", 0)
    url = url_of(listener)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert server.ready.wait(10)
    key = (*server_settings.api_keys, "none")[0]
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(
        base_url=url, headers=headers, timeout=30, verify=False
    ) as http:  # to read certificates takes long
        made = Live(url, engine, server, http, key)
        yield made
        if "openai" in vars(made):
            made.openai.close()
    server.should_exit = server.force_exit = True
    engine.release()
    thread.join(10)
    assert not thread.is_alive()
