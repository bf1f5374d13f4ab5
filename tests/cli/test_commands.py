"""Groups of options: on the command line they are single options, in the command one object."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.cli.commands import single_command, takes_groups
from antiphon.cli.options import CapacityOptions, WorkerOptions, check_one_of


@dataclass(frozen=True, kw_only=True)
class Size:
    """Two options with defaults, one without."""

    depth: Annotated[int, typer.Option(metavar="N", help="How deep.")]
    width: Annotated[int, typer.Option("--wide", metavar="N", help="How wide.")] = 3
    round: Annotated[bool, typer.Option("--round", help="No corners.")] = False

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise UserError(f"--depth is {self.depth}: it must be at least 0")


def run(*arguments: str) -> tuple[int, str, list[object]]:
    calls: list[object] = []

    @takes_groups
    def dig(
        place: Annotated[str, typer.Argument(metavar="PLACE")],
        size: Size,
        tool: Annotated[str, typer.Option(help="What with.")] = "spade",
    ) -> None:
        """Dig a hole at PLACE."""
        calls.append((place, size, tool))

    result = CliRunner().invoke(single_command(dig), list(arguments))
    if isinstance(result.exception, UserError):
        raise result.exception
    return result.exit_code, result.output, calls


def test_the_command_gets_the_whole() -> None:
    assert run("here", "--depth", "2")[2] == [("here", Size(depth=2), "spade")]
    code, _, calls = run("there", "--wide", "5", "--round", "--tool", "hands", "--depth", "0")
    assert code == 0
    assert calls == [("there", Size(depth=0, width=5, round=True), "hands")]


def test_help_lists_the_options_in_the_groups_place() -> None:
    code, help_text, calls = run("--help")
    assert (code, calls) == (0, [])
    assert "Dig a hole at PLACE." in help_text
    places = [help_text.index(option) for option in ("--depth N", "--wide N", "--round", "--tool")]
    assert places == sorted(places)
    assert "--size" not in help_text


@pytest.mark.parametrize("arguments", [("here",), ("here", "--depth", "x"), ("here", "--size", "1", "--depth", "1")])
def test_wrong_options_are_refused(arguments: tuple[str, ...]) -> None:
    code, _, calls = run(*arguments)
    assert (code, calls) == (2, [])


def test_a_group_checks_itself() -> None:
    with pytest.raises(UserError, match="--depth is -1"):
        run("here", "--depth", "-1")


def test_an_empty_choice_is_seen_in_its_error() -> None:
    with pytest.raises(UserError, match="--transport '' does not exist: use shm, tcp"):
        check_one_of("--transport", "", ("shm", "tcp"))


def test_keys_and_values_in_bf16_are_those_of_the_rows() -> None:
    demo = Path(__file__).parents[2] / "examples" / "demo-moe"
    config = WorkerOptions(kv_dtype="bf16").config(demo, CapacityOptions(), trace=False)
    assert config.kv_dtype == "auto"
    with pytest.raises(UserError, match="--kv-dtype bf16: keys and values are kept as --dtype float32 says"):
        WorkerOptions(kv_dtype="bf16", dtype="float32").config(demo, CapacityOptions(), trace=False)
