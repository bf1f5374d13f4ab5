"""Every kind of file in the place of every other: the error says what it is, what was wanted, and who takes it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.base.errors import UserError
from antiphon.cost.profile import read_profile
from antiphon.models.checkpoint_folder import weights_folder
from antiphon.models.planned import load_planned_model
from antiphon.placement.routing_trace import read_routing_trace
from antiphon.placement.sample_paths import read_path_profile
from antiphon.serve.batch_file import check_requests
from antiphon.specs.cluster import load_cluster, load_device
from antiphon.specs.placement import read_placement
from antiphon.specs.plan import read_plan
from antiphon.specs.training_plan import read_training_plan
from antiphon.specs.workload import load_workload
from antiphon.train.config import read_config

FILES = {
    "plan": ("plan.json", b'{"version": 1, "phases": {}}'),
    "training plan": ("train.json", b'{"version": 1, "phase": "train", "layout": {}}'),
    "profile": ("profile.json", b'{"version": 1, "machine": {}, "attention": []}'),
    "cluster": ("cluster.toml", b"groups = []"),
    "device": ("device.toml", b'kind = "gpu"\nmemory_bytes = 1'),
    "workload": ("workload.toml", b"input_tokens = {}\noutput_tokens = {}"),
    "placement": ("placement.json", b'{"num_workers": 0, "owners": 1}'),
    "model": ("config.json", b'{"num_hidden_layers": 0}'),
    "run": ("run.toml", b'data = {}\nmodel = "none"'),
    "requests": ("requests.jsonl", b'{"custom_id": 1, "body": {}}\n{"custom_id": 2, "body": {}}\n'),
    "recording": ("routing", b"\x40\0\0\0\x85\xa6format\xb8antiphon routing trace 0"),
    "paths": ("paths.npz", b"PK\x03\x04"),
    "result": ("rows.json", b'{"bench": "m2n", "rows": []}'),
    "timeline": ("timeline.json", b'{"traceEvents": []}'),
    "tokenizer": ("tokenizer.json", b'{"version": "1.0", "added_tokens": [], "model": {}}'),
}
READERS: dict[str, Callable[[Path], object]] = {
    "plan": read_plan,
    "training plan": read_training_plan,
    "profile": read_profile,
    "cluster": load_cluster,
    "device": load_device,
    "workload": load_workload,
    "placement": read_placement,
    "model": load_planned_model,
    "run": read_config,
    "requests": check_requests,
    "recording": read_routing_trace,
    "paths": read_path_profile,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_in_the_place_of_another_is_named(reader: str, kind: str, tmp_path: Path) -> None:
    name, content = FILES[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        READERS[reader](tmp_path / name)
    message = str(caught.value)
    if kind.removeprefix("training ") == reader.removeprefix("training "):
        assert ", not a" not in message  # what is wrong with it
    else:
        assert message.startswith(f"{tmp_path / name} is ")
        assert ", not " in message


def test_a_plan_as_a_model_names_the_commands_that_take_it(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"version": 1, "phases": {"decode": {}}}))
    for read in (load_planned_model, weights_folder):
        with pytest.raises(UserError) as caught:
            read(file)
        assert str(caught.value) == (
            f"{file} is a plan, not a model's config.json: antiphon serve MODEL --plan and antiphon simulate take it"
        )


@pytest.mark.parametrize("read", [read_plan, read_profile, read_placement, read_routing_trace])
def test_a_device_without_an_end_is_not_read(read: Callable[[Path], object]) -> None:
    with pytest.raises(UserError, match="/dev/zero: a device, which may have no end: give a file"):
        read(Path("/dev/zero"))
