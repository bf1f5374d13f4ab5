"""What a run refuses before its first step, and how it says so."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.models.config import load_model_spec
from antiphon.train.config import read_config
from antiphon.train.ranks import sizes_of
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer
from tests.train.harness import config_of, write_model, write_run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.lerning_rate=1", "unknown key optimizer.lerning_rate: did you mean learning_rate"),
        ("stepz=1", "unknown key stepz: did you mean steps"),
        ("steps=0", "steps is 0: it must be at least 1"),
        ("sequence_length=1", "sequence_length is 1: it must be at least 2"),
        ("micro_batch=3", "batch is 4, micro_batch is 3: batch must be a multiple"),
        ("dtype=float16", "dtype is 'float16': it must be 'float32', 'bfloat16' or 'float64'"),
        ("optimizer.betas=[0.9]", "optimizer.betas[1] is missing: add it"),
        ("data.held_out=1.5", "held_out is 1.5: it must be below 1"),
        ("data.files=[]", "data: neither files nor sources is given: name files"),
        ("optimizer.lr=1e-3", "unknown key optimizer.lr: did you mean learning_rate"),
        ("data.kind=dialogue", "kind is 'dialogue': it must be 'text', 'chat' or 'answers'"),
        ("optimizer.schedule_steps=-1", "schedule_steps is -1: it must be at least 0"),
        ("optimizer.frozen=[3]", "optimizer.frozen[0] is 3: it must be a valid string"),
        ('optimizer.rates={"*"=-1.0}', "it must be at least 0"),
        ("model.path=${NO_SUCH_VARIABLE}/x", "NO_SUCH_VARIABLE"),
        ("communication.attention=float8", "attention is 'float8' and parallel.tensor is 1, so no rank gathers"),
        (
            "parallel={dispatch='two_level', deduplicate=false}",
            "dispatch is 'two_level', expert_tensor is 1, deduplicate",
        ),
        ("communication.attention=float4", "attention is 'float4': it must be 'plain' or 'float8'"),
        ("communication.level_chunks=2", "level_chunks is 2 and hierarchical false: set that, or leave this out"),
        ("communication.timeout_s=1e30", "communication.timeout_s is 1e+30: it must be at most 1000000"),
        ("output.folder=costs$5", "costs$5: a $ begins the name of a variable: write $$ for the character"),
        ("communication.level_chunks=0", "communication.level_chunks is 0: it must be at least 1"),
        ("memory.reuse_rows=sometimes", "memory.reuse_rows is 'sometimes'"),
        ("device=gpu", "device is 'gpu': it must be 'auto', 'cpu' or 'cuda'"),
        ("watch.on_spike=stop", "watch.on_spike is 'stop': it must be 'warn', 'skip' or 'rollback'"),
        ("watch.norm_ratio=-1", "watch.norm_ratio is -1: it must be at least 0"),
        ("watch.loss_rise=x", "watch.loss_rise is 'x'"),
        ("output.wandb=3", "output.wandb is 3"),
        ('data.evaluation=[{name="files", files=["x"]}]', "evaluation: 'files' is the name of another source or set"),
        ('data.evaluation=[{name="a", files=["x"], weight=1.0}]', "evaluation: 'a' has a weight or epochs"),
        ('data.evaluation=[{name="a", files=[]}]', "data.evaluation[0].files"),
        ("loss.mtp=-1", "loss.mtp is -1: it must be at least 0"),
        ("optimizer=3", "optimizer is 3: it must be an object"),
        ("batch=1e308", "batch is 1e+308: it must be at most 1048576"),
        ("batch=0x" + "f" * 5000, "batch is a number of more than 4,000 digits: it must be at most 1048576"),
        ("batch=" + "[" * 50_000, "batch is '[[["),
        ("batch=9e15", "batch is 9000000000000000.0: it must be at most 1048576"),
        ("steps=2\nbatch=3", "steps is '2\\nbatch=3'"),
        ('output.folder="a\\u0000b"', "'a\\x00b' is no path: it holds a zero byte"),
        ("seed=1e30", "seed is 1e+30: it must be at most 9007199254740992"),
    ],
)
def test_wrong_keys_and_values(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config(write_run(tmp_path), [change])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("way", "words"),
    [("dispatch='two_level'", "'two_level' and expert_tensor is 1"), ("expert=2, expert_tensor=2", "_tensor is 2")],
)
def test_sums_between_exchanges_that_are_two_each_way(tmp_path: Path, way: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"sums is 'between', .*{words}: rows travel twice each way then"):
        config_of(tmp_path, "communication.sums=between", f"parallel={{{way}}}")


def test_set_needs_a_key_and_a_value(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--set steps: write key=value"):
        read_config(write_run(tmp_path), ["steps"])


def test_variables_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_FOLDER", "/somewhere")
    config = read_config(
        write_run(tmp_path), ['data.files=["${SOME_FOLDER}/a", "${PYTHON_LIBRARY}/b", "c", "../../d"]']
    )
    first, second, third, fourth = config.data.files
    assert first == "/somewhere/a"
    assert second.endswith("/b")
    assert third == str(tmp_path / "c")
    assert fourth == str(tmp_path.parents[1] / "d")
    assert config.as_table()["optimizer"]["learning_rate"] == 1e-2


def test_a_home_of_nobody_is_a_name_like_others(tmp_path: Path) -> None:
    config = read_config(write_run(tmp_path), ["output.folder=~nobody-of-that-name/x"])
    assert config.output.folder == str(tmp_path / "~nobody-of-that-name/x")


def test_a_mark_of_byte_order_is_no_key(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_config(file).steps == 6


def test_a_file_that_nests_without_end(tmp_path: Path) -> None:
    for name, kind in (("x.toml", "TOML"), ("x.json", "JSON")):
        file = tmp_path / name
        file.write_text("a = " * (kind == "TOML") + "[" * 100_000)
        with pytest.raises(UserError, match=rf"{name}: not valid {kind}: "):
            read_config(file)


def refused(tmp_path: Path, *changes: str, **model: object) -> str:
    with pytest.raises(UserError) as caught:
        Trainer(prepare(config_of(tmp_path, *changes, **model))).run()
    return str(caught.value)


def test_data_that_is_none(tmp_path: Path) -> None:
    assert "names no file" in refused(tmp_path, 'data.files=["nothing/*.txt"]')
    assert "leaves none of 40 files" in refused(tmp_path, 'data.exclude=["text/*"]')
    (tmp_path / "short.txt").write_text("the cat\n")
    assert "sequence_length is 16: give more text" in refused(tmp_path, 'data.files=["short.txt"]', "data.held_out=0")
    assert "the model's positions end at 64" in refused(tmp_path, "sequence_length=65")


def test_ids_have_no_place(tmp_path: Path) -> None:
    assert "/dev/null cannot be written (File exists): make room, or name another" in refused(
        tmp_path, "data.cache=/dev/null"
    )


def test_files_that_are_not_text(tmp_path: Path) -> None:
    config_of(tmp_path)
    (tmp_path / "text/zz.txt").write_bytes(b"abc\0def")
    assert "zz.txt: holds a zero byte at byte 3" in refused_as_is(tmp_path)
    (tmp_path / "text/zz.txt").write_bytes(b"abc\xff\xfe")
    assert "zz.txt: not UTF-8 text (invalid start byte at byte 3)" in refused_as_is(tmp_path)
    (tmp_path / "text/zz.txt").unlink()
    (tmp_path / "text/zz.jsonl").write_text('{"text": "fine"}\n{broken\n')
    assert "zz.jsonl: line 2 is not JSON" in refused_as_is(tmp_path, 'data.files=["text/*"]')
    (tmp_path / "text/zz.jsonl").write_text(json.dumps({"body": "x"}))
    assert "no text under 'text' (there is: body): set data.text_key" in refused_as_is(
        tmp_path, 'data.files=["text/*"]'
    )


def refused_as_is(tmp_path: Path, *changes: str) -> str:
    with pytest.raises(UserError) as caught:
        Trainer(prepare(read_config(tmp_path / "train.toml", changes))).run()
    return str(caught.value)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    assert "the tokenizer has" in refused(tmp_path, vocab_size=200)
    write_model(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text("{")
    assert "no tokenizer can be read" in refused_as_is(tmp_path)


def test_two_levels_need_nodes(tmp_path: Path) -> None:
    config = config_of(tmp_path, "parallel.dispatch=two_level", "parallel.expert=4", "communication.node_size=4")
    spec = load_model_spec(Path(config.model.path))
    with pytest.raises(
        UserError, match=r"'two_level' and the 4 ranks that share experts are not equally many, more th"
    ):
        sizes_of(config, spec, 4)
    several = replace(config, communication=replace(config.communication, node_size=2))
    assert sizes_of(several, spec, 4).expert == 4
    for changes in (("communication.pipeline_experts=true",), ("overlap.inside=true",)):
        with pytest.raises(UserError, match=r"parallel.dispatch is 'two_level'"):
            config_of(tmp_path, "parallel.dispatch=two_level", *changes)
