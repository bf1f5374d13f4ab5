"""What a run that goes on may change of its configuration.

1. What changes the meaning of the run (seed, lengths, text, losses, optimizer, formats) is refused, unless the user
   allows that key.
2. Everything else (layout, memory, output, number of steps) may change and is logged.
3. The schedule of the rate keeps the length that it began with, so more `steps` do not make the rate jump.

The text is compared by the digest of its ids, so files may move and a folder may be named otherwise.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.specs.checked import describe, did_you_mean
from antiphon.train.checkpoint import config_in, folder_of, readable
from antiphon.train.config import TrainConfig
from antiphon.train.optimizer import rate_at

_log = get_logger("train")

TEXT = "data.files"  # stands for all that decides the ids
_MEANING = (
    "seed",
    "sequence_length",
    "batch",
    "dtype",
    "products",
    "optimizer.",
    "loss.",
    "data.document_masks",
    "data.share",
)
_FORMATS = tuple(f"communication.{key}" for key in ("gradients", "activations", "attention", "gate_weights"))
_IN_THE_TEXT = ("data.",)  # judged by the digest
_SCHEDULE = "optimizer.schedule_steps"
_OF_THE_FILE = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "quantization_config"}


class Former:
    """The run whose checkpoints are in `config.output.folder`, as the newest whose `run.json` can be read has it; of
    none, nothing is compared. `allowed`: keys, or tables, that may change."""

    def __init__(self, config: TrainConfig, allowed: Collection[str] = ()) -> None:
        self._allowed = allowed
        found = readable(folder_of(config))[-1:]
        others = [] if found else sorted(folder_of(config).glob("[!.]*/run.json"))
        if others:
            raise UserError(
                f"{others[0].parent} is a checkpoint under another name, and none is beside it: rename it to its step, "
                "as in step-00000100, or name another output.folder"
            )
        self._facts: dict[str, Any] | None = found[0][1] if found else None
        self._where = str(found[0][0]) if found else ""

    @property
    def step(self) -> int:
        """Steps done."""
        return 0 if self._facts is None else int(self._facts["state"].step)

    def check_model(self, model_config: Mapping[str, Any]) -> None:
        """`UserError` if another model was trained. How weights were stored, and by what, does not matter."""
        before = model_config if self._facts is None else self._facts["model_config"]
        keys = sorted({*before, *model_config} - _OF_THE_FILE)
        if changed := [key for key in keys if before.get(key) != model_config.get(key)]:
            old, new = (describe(each.get(changed[0])) for each in (before, model_config))
            raise UserError(
                f"{self._where} is of another model ({changed[0]} {old}, now {new}): change output.folder, or set it "
                "back"
            )

    @property
    def may_change_optimizer(self) -> bool:
        """Whether moments that the checkpoint does not have may begin anew."""
        return any(each.startswith("optimizer") for each in self._allowed)

    def config(self, config: TrainConfig) -> TrainConfig:
        """`config` with the length of its schedule; `UserError` where it would be another run."""
        if self._facts is None:
            return _with_schedule(config, config.optimizer.schedule_steps or config.steps)
        self._check_allowed(config)
        before = config_in(self._facts, Path(self._where))
        length = before.optimizer.schedule_steps or before.steps
        before = _with_schedule(before, length)
        config = _with_schedule(config, config.optimizer.schedule_steps or length)
        refused = []
        if config.loss.mtp and not before.loss.mtp:
            raise UserError(
                f"loss.mtp is {config.loss.mtp}, and {self._where} has no layer for a further token: set it to 0, or "
                "export the run and begin a new output.folder with it"
            )
        for key, old, new in _changes(before, config):
            if key.startswith((*_MEANING, *_FORMATS)) and not self._is_allowed(key):
                refused.append((key, f"{key} {_shown(old)}, now {_shown(new)}"))
            elif not key.startswith(_IN_THE_TEXT):
                _log.info("%s is %r now, it was %r", key, new, old)
        self._refuse(refused)
        self._tell_of_schedule(config)
        return config

    def _check_allowed(self, config: TrainConfig) -> None:
        """`UserError` for a key that may change and does not exist."""
        tables = asdict(config)
        known = {*tables, "data.share"}
        known |= {f"{name}.{key}" for name, table in tables.items() if isinstance(table, dict) for key in table}
        if unknown := [key for key in self._allowed if key not in known]:
            raise UserError(f"--allow-change {unknown[0]}: there is no such key{did_you_mean(unknown[0], known)}")

    def check_text(self, digest: str) -> None:
        """`UserError` if the ids to train on are others; `digest`: of them."""
        if self._facts is None or self._facts.get("text") == digest or self._is_allowed(TEXT):
            return
        words = f"other text ({TEXT}, data.tokenizer, held_out, pieces, kind or stream_tokens)"
        if self._facts.get("text") is None:
            words = "a text that its run.json does not name, so samples may come in another order now"
        self._refuse([(TEXT, words)])

    def _is_allowed(self, key: str) -> bool:
        return any(key == each or key.startswith(f"{each}.") for each in self._allowed)

    def _refuse(self, changes: list[tuple[str, str]]) -> None:
        if changes:
            switches = " ".join(f"--allow-change {key}" for key, _ in changes)
            raise UserError(
                f"{self._where} was trained with {'; '.join(words for _, words in changes)}: going on would be another "
                f"run: set it back, name another output.folder, or allow it: {switches}"
            )

    def _tell_of_schedule(self, config: TrainConfig) -> None:
        length = config.optimizer.schedule_steps
        if config.steps > length and config.optimizer.schedule != "constant":
            _log.warning(
                "steps is %d, the schedule of the rate ends at step %d and stays at %.3g: %s sets another length "
                "(--allow-change %s)",
                config.steps,
                length,
                rate_at(length, length, config.optimizer),
                _SCHEDULE,
                _SCHEDULE,
            )


def _with_schedule(config: TrainConfig, length: int) -> TrainConfig:
    return replace(config, optimizer=replace(config.optimizer, schedule_steps=length))


def _shown(value: Any) -> str:
    if not isinstance(value, Mapping):
        return describe(value)
    return "{" + ", ".join(f"{name} = {describe(each)}" for name, each in value.items()) + "}"


def _changes(before: TrainConfig, now: TrainConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, old, new), in the order of the file."""
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


def _flat(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    for key, value in config.as_table().items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", entry) for name, entry in value.items())
        else:
            yield key, value
    shares = {each.name: (each.weight, each.epochs) for each in config.data.sources}
    yield "data.share", shares  # weights and epochs of sources
