"""Folders as the hub's tools leave them: each gives the model's own logits, or one line that says what to do.

A row of a table is one thing that a tool does to a folder. `conftest.save_model` saves the model that it is done to.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.checkpoint_folder import model_folder, model_name
from antiphon.models.config import load_model_spec, with_tokenizer_ending

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 12345\n"
Change = Callable[[Path], object]


def shards(folder: Path, count: int = 2, name: str = "model-{:05}-of-{:05}.safetensors", index: str = INDEX) -> None:
    """The weights in `count` files, and an index of them unless its name is empty."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    file_of = {tensor: name.format(number % count + 1, count) for number, tensor in enumerate(sorted(tensors))}
    for file in set(file_of.values()):
        save_file({tensor: tensors[tensor] for tensor in tensors if file_of[tensor] == file}, folder / file)
    if index:
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def rename_tensors(folder: Path, rename: Callable[[str], str]) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


def write(folder: Path, **files: str | bytes) -> None:
    """Files by names with "__" for a dot."""
    for name, text in files.items():
        data = text.encode() if isinstance(text, str) else text
        (folder / name.replace("__", ".")).write_bytes(data)


def other_weights(folder: Path, name: str) -> None:
    """A file of weights that are none of this model's."""
    save_file({"model.norm.weight": torch.full((48,), 9.0), "layers.0.wq.weight": torch.ones(4, 4)}, folder / name)


def into_cache(folder: Path) -> None:
    """As in the hub's cache: links into blobs."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / f"{number:040}")
        file.symlink_to(Path("..") / "blobs" / f"{number:040}")


def modelscope(folder: Path) -> None:
    write(folder, configuration__json='{"framework":"Pytorch"}', __msc=b"\x80\x04", __mv="Revision:master")
    (folder / "._____temp").mkdir()
    write(folder / "._____temp", model__safetensors=b"half")


def with_bom(folder: Path) -> None:
    for file in folder.glob("*.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))


def stale_index(folder: Path) -> None:
    write(folder, model__safetensors__index__json=json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))


def extra_in_a_shard(folder: Path) -> None:
    shards(folder)
    file = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(file), "model.norm.weight": torch.zeros(48), "note": torch.zeros(3)}, file)


def wrapped(prefix: str, head: str) -> Change:
    return lambda folder: rename_tensors(
        folder, lambda name: head if name == "lm_head.weight" else prefix + name.removeprefix("model.")
    )


def beside_vision(folder: Path) -> None:
    wrapped("model.language_model.", "lm_head.weight")(folder)
    save_file({**load_file(folder / WEIGHTS), "model.visual.norm.weight": torch.zeros(4)}, folder / WEIGHTS)


SERVED: dict[str, Change] = {
    "one file": lambda folder: None,
    "shards and index": shards,
    "one shard of one": lambda folder: shards(folder, 1),
    "the hub's cache": into_cache,
    "the hub's cache, in shards": lambda folder: (shards(folder), into_cache(folder)),
    "huggingface-cli download --local-dir": lambda folder: (
        (folder / ".cache" / "huggingface" / "download").mkdir(parents=True),
        write(folder / ".cache" / "huggingface" / "download", model__safetensors__lock="", x__incomplete=b"half"),
        write(folder, __gitattributes="*.safetensors filter=lfs", README__md="# a model"),
    ),
    "ModelScope": modelscope,
    "a tool of the author beside": lambda folder: other_weights(folder, "consolidated.safetensors"),
    "the author's shards beside shards": lambda folder: (
        shards(folder),
        other_weights(folder, "consolidated-00001-of-00002.safetensors"),
    ),
    "an adapter beside": lambda folder: (
        other_weights(folder, "adapter_model.safetensors"),
        write(folder, adapter_config__json='{"base_model_name_or_path": "org/base"}'),
    ),
    "pickles beside": lambda folder: write(folder, pytorch_model__bin=b"\x80", training_args__bin=b"\x80"),
    "a variant beside": lambda folder: other_weights(folder, "model.fp16.safetensors"),
    "only a variant": lambda folder: (folder / WEIGHTS).rename(folder / "model.fp16.safetensors"),
    "a variant in shards": lambda folder: shards(
        folder, name="model.fp16-{:05}-of-{:05}.safetensors", index="model.safetensors.index.fp16.json"
    ),
    "a variant in shards, named as before": lambda folder: shards(
        folder, name="model-{:05}-of-{:05}.fp16.safetensors", index="model.fp16.safetensors.index.json"
    ),
    "shards without an index": lambda folder: shards(folder, 3, index=""),
    "shards without an index, counted from 0": lambda folder: (
        shards(folder, index=""),
        (folder / "model-00002-of-00002.safetensors").rename(folder / "model-00000-of-00002.safetensors"),
    ),
    "shards beside another model's": lambda folder: (
        shards(folder, index=""),
        other_weights(folder, "draft-00001-of-00001.safetensors"),
    ),
    "an index left over": stale_index,
    "a shard with extra tensors": extra_in_a_shard,
    "a file with another name": lambda folder: (folder / WEIGHTS).rename(folder / "weights.safetensors"),
    "what a Mac leaves": lambda folder: write(folder, **{"._model__safetensors": b"\0\5\x16\7", "__DS_Store": b"\0"}),
    "BOM and CRLF": with_bom,
    "a wrapper's text model": wrapped("model.language_model.", "lm_head.weight"),
    "a wrapper's text model, of old": wrapped("language_model.model.", "language_model.lm_head.weight"),
    "a text model beside vision": beside_vision,
    "saved while compiled": wrapped("_orig_mod.model.", "_orig_mod.lm_head.weight"),
    "saved without its head's model": wrapped("", "lm_head.weight"),
    "experts apart, as published": lambda folder: None,
}  # fmt: skip


@pytest.mark.parametrize("change", SERVED.values(), ids=SERVED)
def test_served(change: Change, request: pytest.FixtureRequest, save_model: Any, tools: Any) -> None:
    fused = "published" not in request.node.name
    saved = save_model(tools.config("qwen3_moe", num_hidden_layers=2), save_original_format=not fused)
    change(saved.folder)
    token_ids = tools.ids(9)
    error = (tools.run(tools.load(saved.folder), token_ids, [9]) - saved.logits(token_ids)).abs().max()
    assert float(error) < 2e-4


def comma_too_many(folder: Path) -> None:
    write(folder, config__json=(folder / "config.json").read_text().rstrip().removesuffix("}").rstrip() + ",}")


def commented(folder: Path) -> None:
    write(folder, config__json="// mine\n" + (folder / "config.json").read_text())


def twice(folder: Path) -> None:
    shards(folder, index="")
    other_weights(folder, "model-00001-of-00002.safetensors")


def outside(name: str) -> Change:
    def change(folder: Path) -> None:
        shards(folder)
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = name
        write(folder, model__safetensors__index__json=json.dumps(index))

    return change


def of_dtype(dtype: torch.dtype) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors["model.norm.weight"] = torch.ones(48, dtype=dtype)
        save_file(tensors, folder / WEIGHTS)

    return change


def only(folder: Path, *names: str) -> None:
    for file in folder.iterdir():
        if file.name not in names:
            file.unlink()


def moved(old: str, new: str) -> Change:
    return lambda folder: (folder / old).rename(folder / new)


REFUSED: dict[str, tuple[Change, str]] = {
    "LFS weights": (
        lambda folder: write(folder, model__safetensors=POINTER),
        "{0}/model.safetensors: a pointer of Git LFS, not the file: run git lfs pull in {0}",
    ),
    "LFS shard": (
        lambda folder: (shards(folder), (folder / "model-00002-of-00002.safetensors").write_text(POINTER)),
        "{0}/model-00002-of-00002.safetensors: a pointer of Git LFS, not the file: run git lfs pull in {0}",
    ),
    "LFS config": (
        lambda folder: write(folder, config__json=POINTER),
        "{0}/config.json: a pointer of Git LFS, not the file: run git lfs pull in {0}",
    ),
    "an adapter alone": (
        lambda folder: (only(folder), write(folder, adapter_config__json='{"base_model_name_or_path": "org/base"}')),
        "{0}/config.json is missing: merge the adapter into its model (org/base) and give that folder",
    ),
    "an adapter and its model's config": (
        lambda folder: (moved(WEIGHTS, "adapter_model.safetensors")(folder), write(folder, adapter_config__json="{}")),
        "{0}: no .safetensors file, only an adapter: merge the adapter into its model and give that folder",
    ),
    "the author's format alone": (
        moved(WEIGHTS, "consolidated.safetensors"),
        "{0}: no .safetensors file, only weights in their author's own format (consolidated*): download "
        "model*.safetensors of the same model",
    ),
    "the author's format and config": (
        lambda folder: (only(folder), write(folder, params__json="{}", consolidated__00__pth=b"PK")),
        "{0}/config.json is missing: the weights are in their author's own format, download config.json and "
        "model*.safetensors",
    ),
    "pickles": (
        moved(WEIGHTS, "pytorch_model.bin"),
        "{0}: no .safetensors file, only pytorch_model.bin: download the weights as .safetensors, or save them with "
        "transformers' save_pretrained",
    ),
    "no weights": (
        lambda folder: (folder / WEIGHTS).unlink(),
        "{0}: no .safetensors file: give a folder in Hugging Face format",
    ),
    "a download that did not end": (
        moved(WEIGHTS, "model.safetensors.incomplete"),
        "{0}: no .safetensors file: the download did not end, repeat it",
    ),
    "a dangling link into the cache": (
        lambda folder: (into_cache(folder), next((folder.parent / "blobs").glob("*2")).unlink()),
        "{0}/model.safetensors: a link to ../blobs/{2}, which is not there: download it",
    ),
    "a shard missing": (
        lambda folder: (shards(folder), (folder / FIRST).unlink()),
        "{0}: 1 of 2 shards missing, the first is model-00001-of-00002.safetensors: download it",
    ),
    "a shard missing, no index": (
        lambda folder: (shards(folder, index=""), (folder / FIRST).unlink()),
        "{0}: 1 of 2 shards missing, the first is model-00001-of-00002.safetensors: download it",
    ),
    "a shard with other letters": (
        lambda folder: (shards(folder), moved(FIRST, FIRST.upper())(folder)),
        "{0}: 1 of 2 shards missing, the first is model-00001-of-00002.safetensors: rename "
        "MODEL-00001-OF-00002.SAFETENSORS",
    ),
    "a config with other letters": (
        moved("config.json", "Config.json"),
        "{0}/config.json is missing: rename Config.json",
    ),
    "a path out of the folder": (
        outside("../model.safetensors"),
        "model.safetensors.index.json: '../model.safetensors' is not the name of a file in its folder: ",
    ),
    "an absolute path": (
        outside("/models/model.safetensors"),
        "model.safetensors.index.json: '/models/model.safetensors' is not the name of a file in its folder: ",
    ),
    "a tensor in two shards": (
        twice,
        "{0}: tensor model.norm.weight is in model-00001-of-00002.safetensors and in "
        "model-00002-of-00002.safetensors: remove the file of another model, or download the index",
    ),
    "an empty file": (
        lambda folder: write(folder, model__safetensors=b""),
        "model.safetensors: empty: download it again",
    ),
    "no tensor in the file": (
        lambda folder: save_file({}, folder / WEIGHTS),
        "{0}: no tensor is named model.layers.0.*, as those of qwen3_moe are: weights and config.json are of different "
        "models, download both again",
    ),
    "a folder named as the weights": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()),
        "{0}/model.safetensors: a folder, not a file: put the file itself there",
    ),
    "whole numbers": (
        of_dtype(torch.int32),
        "model.safetensors: tensor model.norm.weight has dtype I32: use weights in F64, F32, F16, BF16, F8_E4M3, U8",
    ),
    "float8 of gradients": (
        of_dtype(torch.float8_e5m2),
        "model.safetensors: tensor model.norm.weight has dtype F8_E5M2: use weights in F64, F32, F16, BF16, ",
    ),
    "float8 without a scale": (
        of_dtype(torch.float8_e4m3fn),
        "model.safetensors: tensor model.norm.weight is float8 without model.norm.weight_scale_inv or "
        "model.norm.weight_scale: download the checkpoint again",
    ),
    "a comma too many": (comma_too_many, "{0}/config.json: not valid JSON ("),
    "a comment": (commented, "{0}/config.json: not valid JSON (Expecting value: line 1 column 1 "),
    "a folder above the model": (
        lambda folder: (only(folder), (folder / "model").mkdir(), write(folder / "model", config__json="{}")),
        "{0}/config.json is missing: give {0}/model",
    ),
    "the cache itself": (
        lambda folder: (only(folder), (folder / "models--org--a").mkdir(), (folder / "models--org--b").mkdir()),
        "{0}/config.json is missing: this is a cache of 2 models, give one of them, for example {0}/models--org--a",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(change: Change, message: str, save_model: Any, tools: Any) -> None:
    folder = save_model(tools.config("qwen3_moe", num_hidden_layers=2)).folder
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        tools.load(folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(message.format(folder, "", f"{2:040}"))


def test_what_is_not_used_is_named(save_model: Any, tools: Any) -> None:
    folder = save_model(tools.config("qwen3_moe")).folder
    assert Checkpoint(folder).notes == []
    beside_vision(folder)
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        other_weights(folder, name)
    write(folder, pytorch_model__bin=b"", README__md="")
    assert Checkpoint(folder).notes == [
        f"not used, beside the weights in {folder}: adapter_model.safetensors, consolidated.safetensors, "
        f"pytorch_model.bin",
        "tensors are named model.language_model.*: read as model.*",
    ]


def test_a_model_of_the_hubs_cache(save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved = save_model(tools.config("qwen3_moe"))
    model = tmp_path / "hub" / "models--org--Some-Model"
    (model / "snapshots").mkdir(parents=True)
    assert model_folder(saved.folder) == saved.folder
    with pytest.raises(CheckpointError, match="no snapshot of the model is there: download it again"):
        model_folder(model)
    shutil.move(saved.folder, model / "snapshots" / "abc")
    assert model_folder(model) == model / "snapshots" / "abc"
    shutil.copytree(model / "snapshots" / "abc", model / "snapshots" / "def")
    with pytest.raises(
        CheckpointError, match=f"2 snapshots and no refs/main that names one: give {model}/snapshots/def"
    ):
        model_folder(model)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc\n")
    assert model_folder(model) == model / "snapshots" / "abc"
    assert model_name(model_folder(model)) == "Some-Model"
    assert model_name(tmp_path) == tmp_path.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_dtype_of_the_weights_where_no_key_says_it(dtype: torch.dtype, save_model: Any, tools: Any) -> None:
    folder = save_model(tools.config("qwen3_moe")).folder
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    write(folder, config__json=json.dumps(config))
    expected = "float32" if dtype == torch.float64 else str(dtype).removeprefix("torch.")
    assert load_model_spec(folder).dtype == expected
    write(folder, config__json=json.dumps(config | {"torch_dtype": "float16"}))
    assert load_model_spec(folder).dtype == "float16"
    for short, long in (("half", "float16"), ("torch.float", "float32"), ("float8_e4m3fn", expected)):
        write(folder, config__json=json.dumps(config | {"torch_dtype": short}))
        assert load_model_spec(folder).dtype == long
    (folder / WEIGHTS).unlink()
    write(folder, config__json=json.dumps(config))
    assert load_model_spec(folder).dtype == "float32"


CONFIG, MAP, OWN, ADDED = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json", "added_tokens.json"
END = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": {"content": "<|im_end|>"}, "5": {"content": "</s>"}}}
TOKENIZER = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}], "model": {"vocab": {"</s>": 5, "a": 9}}}
UNIGRAM = {"model": {"vocab": [["a", 0], ["b", 0]]}}


@pytest.mark.parametrize(
    ("config", "generation", "files", "expected"),
    [
        (2, None, {CONFIG: END}, (2, 7)),
        (2, None, {CONFIG: {"eos_token": {"content": "<|im_end|>"}}, OWN: TOKENIZER}, (2, 7)),
        (2, None, {CONFIG: {"eos_token": "</s>"}, OWN: TOKENIZER}, (2, 5)),
        (2, None, {MAP: {"eos_token": "</s>"}, OWN: TOKENIZER}, (2, 5)),
        (2, None, {CONFIG: {"eos_token": "</s>"}, ADDED: {"</s>": 4}}, (2, 4)),
        (2, None, {CONFIG: {"eos_token": "b"}, OWN: UNIGRAM}, (2, 1)),
        (2, [3, 4], {CONFIG: END}, (3, 4, 2, 7)),
        (7, None, {CONFIG: END}, (7,)),
        (None, None, {CONFIG: END}, (7,)),
        (None, None, {}, (2,)),  # Mixtral's own
        (None, 3, {}, (3,)),
        (2, None, {CONFIG: {"eos_token": None}}, (2,)),
        (2, None, {CONFIG: {"eos_token": "nowhere"}, OWN: TOKENIZER}, (2,)),
        (2, None, {CONFIG: {"eos_token": "x", "added_tokens_decoder": {"97": {"content": "x"}}}}, (2,)),
        (2, None, {CONFIG: {"eos_token": "x", "added_tokens_decoder": [1]}, OWN: {"model": 1}}, (2,)),
        (2, None, {CONFIG: {"eos_token": "x", "added_tokens_decoder": {"9" * 5000: {"content": "x"}}}}, (2,)),
        (2, None, {CONFIG: "damaged"}, (2,)),
    ],
)
def test_a_text_ends_at_what_any_file_says(
    config: int | None, generation: Any, files: dict[str, Any], expected: tuple[int, ...], tmp_path: Path, tools: Any
) -> None:
    stated = tools.config("mixtral").to_dict() | {"eos_token_id": config}
    if config is None:
        del stated["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert with_tokenizer_ending(tmp_path, load_model_spec(tmp_path)).eos_token_ids == expected
