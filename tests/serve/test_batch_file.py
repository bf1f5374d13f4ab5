"""Files of requests: every line answered once, whatever interrupted the run, and mistakes named before any work."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.cli.serve import check_refusals
from antiphon.serve.api.server import create_app
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.batch_file import BatchCounts, answer_batch, answers_file, check_requests
from antiphon.serve.engine_api import QueueFull
from tests.serve.api_harness import fake_engine, small_grammars, small_tokenizer
from tests.serve.fake_engine import FakeEngine

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
}


def line(custom_id: str, path: str = "/v1/completions", **body: Any) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": path, "body": BODIES.get(path, {}) | body}
    return json.dumps(request) + "\n"


def run(folder: Path, engine: FakeEngine | None = None) -> BatchCounts:
    app = create_app(engine or fake_engine(), small_tokenizer(), ServerSettings(), small_grammars())
    try:
        with answers_file(folder / "out") as (output, before):
            return asyncio.run(answer_batch(app, folder / "in", output, before, 8, lambda done, total: None))
    finally:
        app.state.context.texts.close()


def results(folder: Path) -> dict[str, Any]:
    lines = [json.loads(each) for each in (folder / "out").read_text().splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each["response"] for each in lines}


def test_each_line_is_answered_as_over_http(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("".join(line(path, path) for path in BODIES) + line("wrong", n=100) + "\n")
    counts = run(tmp_path)
    assert (counts.num_answered, counts.num_refused, counts.num_skipped) == (4, 1, 0)
    assert counts.tokens["completion"] == 12
    found = results(tmp_path)
    assert [found[path]["status_code"] for path in BODIES] == [200] * 4
    assert found["/v1/chat/completions"]["body"]["object"] == "chat.completion"
    assert found["wrong"]["status_code"] == 400
    assert found["wrong"]["body"]["error"]["param"] == "n"


def test_refusals_end_the_command_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line("right") + line("wrong", n=100))
    with pytest.raises(UserError, match="requests refused: 1; ") as refused:
        check_refusals(run(tmp_path), tmp_path / "out")
    assert refused.value.exit_code == 1


def test_an_id_of_half_a_character_comes_back(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line("\ud800") + line("b"))
    assert run(tmp_path).num_answered == 2
    assert results(tmp_path).keys() == {"\ud800", "b"}
    assert run(tmp_path).num_skipped == 2


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("".join(line(str(number)) for number in range(20)))
    run(tmp_path)
    written = (tmp_path / "out").read_text().splitlines(keepends=True)
    failed = json.loads(written[3])
    failed["response"]["status_code"] = 500
    (tmp_path / "out").write_text("".join([*written[:3], json.dumps(failed) + "\n", *written[4:10], written[10][:-20]]))
    engine = fake_engine()
    counts = run(tmp_path, engine)
    assert (counts.num_skipped, counts.num_answered, len(engine.submissions)) == (9, 11, 11)
    assert sorted(results(tmp_path), key=int) == [str(number) for number in range(20)]
    assert run(tmp_path).num_skipped == 20


def test_two_runs_do_not_write_the_same_answers(tmp_path: Path) -> None:
    """The second would put another file in the place of the first one's, whose answers would be lost."""
    with answers_file(tmp_path / "out") as (output, _):
        output.write(json.dumps({"custom_id": "a", "response": {"status_code": 200}}) + "\n")
        output.flush()
        with pytest.raises(UserError, match="out: another batch writes it"), answers_file(tmp_path / "out"):
            pass
    with answers_file(tmp_path / "out") as (_, before):
        assert before == {"a"}


def test_answers_to_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")
    with pytest.raises(UserError, match="out is no file"), answers_file(tmp_path / "out"):
        pass


def test_what_finds_no_room_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line("a"))
    engine = fake_engine()
    engine.refuse_with = QueueFull("full", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        submit, num_tries = engine.submit, 0

        def refuse_once(*asked: Any, **options: Any) -> Any:
            nonlocal num_tries
            num_tries += 1
            if num_tries > 1:
                engine.refuse_with = None
            return submit(*asked, **options)

        patch.setattr(engine, "submit", refuse_once)
        assert run(tmp_path, engine).num_answered == 1


def test_answers_behind_a_link_are_gone_on_with_there(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line("a") + line("b"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere/answers")
    for _ in range(2):
        run(tmp_path)
        assert (tmp_path / "out").is_symlink()
        first, *_ = (tmp_path / "elsewhere/answers").read_text().splitlines(keepends=True)
        (tmp_path / "elsewhere/answers").write_text(first)
    assert run(tmp_path).num_skipped == 1
    assert results(tmp_path).keys() == {"a", "b"}


def test_a_pipe_of_requests_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in")
    with pytest.raises(UserError, match="in is no file, and requests are read more than once"):
        check_requests(tmp_path / "in")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests"),
        ("{", "in line 1 is not JSON"),
        (line("a") + "{}\n", "in line 2 has no body"),
        (line("a") + line("b") + line("a"), "in lines 1 and 3 have the same custom_id 'a'"),
        (line("a", "/v1/embeddings"), "in line 1 asks for POST /v1/embeddings: use POST /v1/chat/completions"),
        (line("a", stream=True), "in line 1 has stream"),
        (line("a", background=True), "in line 1 has background"),
    ],
)
def test_mistakes_are_found_before_any_work(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "in").write_text(text)
    with pytest.raises(UserError, match=message):
        check_requests(tmp_path / "in")


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line("a"))
    (tmp_path / "out").write_text("a diary\nof years\n")
    with pytest.raises(UserError, match="out line 1 is no answer of a batch"):
        run(tmp_path)
    assert (tmp_path / "out").read_text() == "a diary\nof years\n"
    (tmp_path / "out").write_text('{"custom_id": "a", "response": {"status_code": "of years"}}\n')
    with pytest.raises(UserError, match="out line 1 is no answer of a batch"):
        run(tmp_path)
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out is no file: name one"):
        run(tmp_path)
