"""Which models run: writes the tables of docs/models.md from comparisons with transformers.

    python -m benchmarks.models_table                            # everything, minutes
    python -m benchmarks.models_table --families dots1,mixtral   # these; the other rows stay as the page has them

1. Every family: a small random float32 model of odd sizes, the one the tests use. The logits of a prompt of 37 tokens,
   whole, in chunks and token by token, against transformers' eager model; then 12 prompts of 1 and 40 tokens continued
   greedily by 64 tokens through whole engines in both layouts, against transformers' `generate`.
2. Every float8 format: a model with weights in it, against transformers on what the weights multiply out to.
A difference beyond the tests' bound ends the command with exit code 1, and nothing is written. The text around the
tables, and what each row is of, is the page's own.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from antiphon.base.progress import progress
from antiphon.kernels.cpu import CpuBackend
from antiphon.models.config import LACKING, TEXT_MODELS
from tests.models.conftest import FAMILIES, SavedModel, load_decoder, logits_by_chunks, random_ids
from tests.models.float8_specimens import FORMATS, quantize_checkpoint
from tests.serve.engine_harness import TinyModel, complete, config, random_prompts, running, save_tiny_model

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TOLERANCE = 2e-4
CUTS = ([37], [16, 16, 5], [1] * 37)
RESULT_ROW = re.compile(
    r"^(?P<before>\| `?(?P<name>[^|`]+?)`? \| [^|]+ \| )(?P<error>[\d.e-]+|see below) \| (?P<texts>[\d –of|]+) \|$",
    re.MULTILINE,
)
"""A row of the page: what it is of and what people call it, which are the page's own, then what was found."""
MADE_WITH = re.compile(r"transformers [\d.]+ and torch [\d.]+")
OLD_ROWS = re.compile(r"\A(\|.*\n)*")
LAYOUTS = {"colocated": "1", "disaggregated": "1+2/m2"}
QUANTIZED_FAMILY = "glm4_moe"


@dataclass(frozen=True)
class ModelComparison:
    """`equal[layout]` of `num_texts` greedy texts are the same tokens."""

    largest_error: float
    equal: dict[str, int]
    num_texts: int

    @property
    def holds(self) -> bool:
        return self.largest_error < TOLERANCE and set(self.equal.values()) == {self.num_texts}


def compare(model: TinyModel) -> ModelComparison:
    """Logits and greedy texts of the checkpoint in `model.folder` against `model.model`; starts two engines."""
    token_ids = random_ids(37)
    expected = SavedModel(model.folder, model.model).logits(token_ids)
    decoder = load_decoder(model.folder, CpuBackend(torch.float32))
    found = (logits_by_chunks(decoder, token_ids, cut, block_size=16) for cut in CUTS)
    error = max(float((logits - expected).abs().max()) for logits in found)
    prompts = random_prompts([1, 40] * 6, seed=5)
    texts, equal = model.greedy(prompts), {}
    for name, layout in LAYOUTS.items():
        with running(config(model, layout)) as engine:
            equal[name] = sum(a == b for a, b in zip(complete(engine, prompts), texts, strict=True))
    return ModelComparison(error, equal, len(prompts))


def compare_family(family: str, folder: Path) -> ModelComparison:
    return compare(save_tiny_model(folder / family, family))


def compare_format(form: str, folder: Path) -> ModelComparison:
    """Against transformers on the multiplied-out weights."""
    narrow = save_tiny_model(folder / f"float8-{list(FORMATS).index(form)}", QUANTIZED_FAMILY).folder
    wide = quantize_checkpoint(narrow, FORMATS[form])
    return compare(TinyModel(narrow, AutoModelForCausalLM.from_pretrained(wide, attn_implementation="eager").eval()))


def page(text: str, found: dict[str, ModelComparison], made_with: str) -> str:
    """`text`, a former page, with these results in its rows."""

    def row(former: re.Match[str]) -> str:
        new = found.get(former["name"])
        return former[0] if new is None else f"{former['before']}{' | '.join(cells(new))} |"

    text = RESULT_ROW.sub(row, MADE_WITH.sub(made_with, text, count=1))
    return with_table(text, ["`model_type`", "what it has that we lack", "use"], not_running())


def with_table(text: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`text` with these rows in the place of those below `heads`."""
    head, *rest = (f"| {' | '.join(row)} |\n" for row in (heads, ["---"] * len(heads), *rows))
    before, found, after = text.partition(head)
    assert found, f"{PAGE} has no table of {', '.join(heads)}"
    return "".join([before, head, *rest, OLD_ROWS.sub("", after, count=1)])


def cells(found: ModelComparison) -> list[str]:
    return [f"{found.largest_error:.1e}", *(f"{found.equal[name]} of {found.num_texts}" for name in LAYOUTS)]


def not_running() -> Iterable[list[str]]:
    rows = {name: [what, instead] for name, (what, instead) in LACKING.items()}
    rows |= {name: ["it is a text model with more around it", instead] for name, instead in TEXT_MODELS.items()}
    return ([f"`{name}`", *rows[name]] for name in sorted(rows))


def main(arguments: list[str] | None = None) -> int:
    what = "Compare every family with transformers and write the tables of docs/models.md."
    parser = argparse.ArgumentParser(description=what)
    only = "only these, by model_type; the page's other rows stay (default: everything)"
    parser.add_argument("--families", help=only)
    options = parser.parse_args(arguments)
    chosen, forms = options.families.split(",") if options.families else FAMILIES, [] if options.families else FORMATS
    if unknown := set(chosen) - set(FAMILIES):
        parser.error(f"--families {', '.join(sorted(unknown))}: use some of {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    text = PAGE.read_text(encoding="utf-8")
    if missing := {*chosen, *forms} - {row["name"] for row in RESULT_ROW.finditer(text)}:
        parser.error(f"{PAGE} has no row of {', '.join(sorted(missing))}: write one, with `see below | – | –`")
    found: dict[str, ModelComparison] = {}
    with tempfile.TemporaryDirectory() as name, progress("comparing models") as report:
        for compare_one, names in ((compare_family, chosen), (compare_format, forms)):
            for each in names:
                found[each] = compare_one(each, Path(name))
                report(len(found), len(chosen) + len(forms))
    if wrong := [name for name, comparison in found.items() if not comparison.holds]:
        print(f"differ from transformers: {', '.join(wrong)}", file=sys.stderr)
        return 1
    made_with = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
    PAGE.write_text(page(text, found, made_with), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
