"""What a run is trained on and how it learns, as frozen data: files and chats, optimizer, losses, what is watched.

Without `sources`, the keys of `[data]` are one source. With them, each source has keys of its own, and says how often
it is seen: `weight`, its share of the tokens, or `epochs` in one pass over the data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from antiphon.base.errors import UserError
from antiphon.specs.checked import Count, CountFromZero, Flag, NotNegative, Positive, Text, checked

BelowOne = Annotated[NotNegative, Field(lt=1)]
Kind = Literal["text", "chat", "answers"]


@checked("")
@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source. `files`: patterns of text, `.jsonl`, `.parquet` and `.arrow` files, or folders that `datasets` wrote,
    less those that `exclude` matches; text and JSON lines may end in `.gz` or `.zst`.

    `kind` "text": a text file is one document, a record's is under `text_key`. "chat": a record has `messages`, maybe
    `tools`, and goes through the model's chat template. "answers": it has `prompt` and `answer`. Of the last two, only
    what the assistant says is learned. `control_tokens`: whether "<|im_end|>" in a text is the token of that name
    (true) or ten characters (false)."""

    name: Text
    files: Annotated[tuple[Text, ...], Field(min_length=1)]
    exclude: tuple[str, ...] = ()
    kind: Kind = "text"
    text_key: Text = "text"
    control_tokens: Flag = False
    weight: Positive | None = None
    epochs: Positive | None = None

    @property
    def is_chat(self) -> bool:
        """Whether only answers are learned, and documents are packed whole."""
        return self.kind != "text"


@checked("")
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`files`, `exclude`, `kind`, `text_key`, `control_tokens`: as of `SourceConfig`; or `sources`, with keys of their
    own. `evaluation`: sets that are never trained on, with the keys of a source; each has a loss of its own beside that
    of what is held out. `made_by`: the command that makes files that are missing, for the message.

    `stream_tokens`: text is tokenized beside the steps, in blocks of about this many tokens; windows are shuffled
    within a block (0: all before the first step, and shuffled over all).

    `tokenizer`: a folder or a `tokenizer.json` (empty: the model's folder). `held_out`: part of the documents that is
    never trained on, chosen by their content. `cache`: folder of the token ids (empty: `tokens` in the output folder).
    `document_masks`: documents packed into one sequence do not see each other. `pieces`: training documents are encoded
    in pieces of this many characters on average (0: whole), so that the model has seen what follows when a prompt ends
    inside a token."""

    files: tuple[Text, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: Kind = "text"
    text_key: Text = "text"
    control_tokens: Flag = False
    sources: tuple[SourceConfig, ...] = ()
    evaluation: tuple[SourceConfig, ...] = ()
    made_by: str = ""
    tokenizer: str = ""
    held_out: BelowOne = 0.01
    cache: str = ""
    document_masks: Flag = True
    pieces: CountFromZero = 0
    stream_tokens: CountFromZero = 0

    def __post_init__(self) -> None:
        if bool(self.files) == bool(self.sources):
            both = "files and sources are both given" if self.files else "neither files nor sources is given"
            raise UserError(f"{both}: name files, or a [[data.sources]] for each source")
        _check_sources(self.sources)
        _check_evaluation(self.evaluation, [each.name for each in self.all_sources()])
        if self.stream_tokens and (counted := [each.name for each in self.sources if each.epochs is not None]):
            raise UserError(
                f"stream_tokens is {self.stream_tokens} and source {counted[0]!r} has epochs: how long a source is "
                "shows only in the end, so give it a weight, or set stream_tokens to 0"
            )

    def tokenized(self) -> tuple[SourceConfig, ...]:
        """The sources, then the evaluation sets."""
        return (*self.all_sources(), *self.evaluation)

    def all_sources(self) -> tuple[SourceConfig, ...]:
        """What is trained on."""
        if self.sources:
            return self.sources
        keys: dict[str, Any] = {"kind": self.kind, "text_key": self.text_key, "control_tokens": self.control_tokens}
        return (SourceConfig(name="files", files=self.files, exclude=self.exclude, **keys),)


def _check_evaluation(sets: Sequence[SourceConfig], sources: Sequence[str]) -> None:
    names = [*sources, *(each.name for each in sets)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"evaluation: {twice[0]!r} is the name of another source or set: give each its own")
    if weighed := [each.name for each in sets if each.weight is not None or each.epochs is not None]:
        raise UserError(f"evaluation: {weighed[0]!r} has a weight or epochs, but is not trained on: leave them out")


def _check_sources(sources: Sequence[SourceConfig]) -> None:
    names = [each.name for each in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"sources: {twice[0]!r} is the name of {names.count(twice[0])}: give each its own")
    weighed = [each.name for each in sources if each.weight is not None]
    if weighed and len(weighed) < len(sources):
        without = next(each.name for each in sources if each.weight is None)
        raise UserError(f"sources: {weighed[0]!r} has a weight and {without!r} has none: give all one, or epochs")
    if both := [each.name for each in sources if each.weight is not None and each.epochs is not None]:
        raise UserError(f"sources: {both[0]!r} has weight and epochs: each decides how often it is seen, give one")


@checked("")
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`name` "muon": Muon for matrices, at `muon_scale` times the rate, and AdamW for the rest. The rate rises over
    `warmup_steps`, then follows `schedule`: "cosine" down to `final_rate` of its peak, "wsd" stays and falls linearly
    over the last `decay_part` of the steps, "constant". `clip`: largest norm of the gradient (0: no limit). Norms,
    biases and the router's are not decayed.

    `schedule_steps`: the schedule's own length; behind it the rate stays (0: `steps` of the run's first start).
    `frozen`: patterns of parameters that keep their bits; one that begins with "!" takes out again what those before it
    took. `rates`: factors of the rate by pattern, the last that matches."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    muon_scale: Positive = 1.0
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip: NotNegative = 1.0
    warmup_steps: CountFromZero = 20
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    final_rate: NotNegative = 0.1
    decay_part: NotNegative = 0.2
    schedule_steps: CountFromZero = 0
    frozen: tuple[Text, ...] = ()
    rates: dict[str, NotNegative] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of what is added to the cross-entropy: `balance` of the experts' use, over each "layer" (Switch
    Transformer, eq. 4) or over the whole "model" (as transformers has it); `device_balance` of `device_groups` groups
    of experts (MegaScale-MoE, section 3.2); `z` of the router's squared log-sum-exp (ST-MoE, eq. 5). `bias_rate`: step
    of a score bias towards even use, for routers that have one (DeepSeek-V3, section 2.1.2).

    `capacity`: rows that an expert takes, over the mean; `device_capacity`: that a group takes, over the mean of groups
    (MegaScale-MoE, section 3.2). The choices of largest weight stay, the others are dropped; 0: none are.

    `mtp`: weight of the loss of the layer that predicts a token further (`train.further_token`; 0: it is not
    trained)."""

    balance: NotNegative = 0.01
    balance_over: Literal["layer", "model"] = "layer"
    device_balance: NotNegative = 0.0
    device_groups: Count = 1
    z: NotNegative = 0.0
    bias_rate: NotNegative = 1e-3
    capacity: NotNegative = 0.0
    device_capacity: NotNegative = 0.0
    mtp: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.device_capacity and self.device_groups == 1:
            raise UserError(
                f"device_capacity is {self.device_capacity}, device_groups is 1, so nothing would be dropped: say how "
                "many groups the experts make"
            )

    @property
    def drops(self) -> bool:
        """Whether there is a limit to the rows that experts take."""
        return self.capacity > 0 or self.device_capacity > 0


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Spikes (`train.watch`): a gradient norm of `norm_ratio` times the last steps', a loss `loss_rise` nats above
    theirs (0: not looked at). `on_spike`: "warn"; "skip" leaves the step's update out; "rollback" goes back to the
    newest checkpoint and leaves out all samples since."""

    on_spike: Literal["warn", "skip", "rollback"] = "warn"
    norm_ratio: NotNegative = 10.0
    loss_rise: NotNegative = 1.0
