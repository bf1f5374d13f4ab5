"""Which models run: writes the tables of docs/models.md from comparisons with transformers.

    python -m benchmarks.models_table                            # everything, minutes
    python -m benchmarks.models_table --families dots1,mixtral   # these; the other rows stay as the page has them

1. Every family: a small random float32 model of odd sizes, the one the tests use. The logits of a prompt of 37 tokens,
   whole, in chunks and token by token, against transformers' eager model; then 12 prompts of 1 and 40 tokens continued
   greedily by 64 tokens through whole engines in both layouts, against transformers' `generate`.
2. Every float8 format: a model with weights in it, against transformers on what the weights multiply out to.
A difference beyond the tests' bound ends the command with exit code 1, and nothing is written. The text around the
tables is the page's own.
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
from tests.serve.engine_harness import (
    TinyModel,
    complete,
    config,
    random_prompts,
    running,
    save_tiny_model,
)

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TOLERANCE = 2e-4
CUTS = ([37], [16, 16, 5], [1] * 37)
FORMATS_HEAD = "## Formats of weights"
RESULT_ROW = re.compile(r"\| `?([^|`]+?)`? \| [^|]+ \| ([\d.e-]+) \| (\d+) of (\d+) \| (\d+) of \4 \|")
RESULT_HEADS = ("largest error", "texts, colocated", "texts, disaggregated")
MADE_WITH = re.compile(r"transformers [\d.]+ and torch [\d.]+")
OLD_ROWS = re.compile(r"\A(\|.*\n)*")
LAYOUTS = {"colocated": "1", "disaggregated": "1+2/m2"}
QUANTIZED_FAMILY = "glm4_moe"
PEOPLE_KNOW = {
    "dbrx": "DBRX",
    "deepseek": "DeepSeekMoE-16B",
    "deepseek_v2": "DeepSeek-V2, -V2-Lite, -V2.5, DeepSeek-Coder-V2",
    "deepseek_v3": "DeepSeek-V3, -V3.1, -R1, Moonlight",
    "dots1": "dots.llm1",
    "ernie4_5_moe": "ERNIE-4.5-21B-A3B, -300B-A47B",
    "glm4_moe": "GLM-4.5, -4.5-Air, -4.6, -4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt_oss": "gpt-oss-20b, -120b",
    "granitemoe": "Granite-3.0 and -3.1 MoE (1B-A400M, 3B-A800M)",
    "granitemoeshared": "Granite MoE with a shared expert",
    "kimi_k2": "Kimi-K2-Base, -Instruct",
    "minimax_m2": "MiniMax-M2",
    "mixtral": "Mixtral-8x7B, -8x22B",
    "olmoe": "OLMoE-1B-7B",
    "phimoe": "Phi-3.5-MoE",
    "qwen2_moe": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "qwen3_moe": "Qwen3-30B-A3B, -235B-A22B, Qwen3-Coder",
    "solar_open": "Solar-Open-100B",
}
PUBLISHED_IN = {
    "fp8, blocks of 128 x 128": "DeepSeek-V3 and -R1, Kimi-K2, MiniMax-M2, Qwen3 `-FP8`",
    "fp8, one scale a tensor": "transformers without `weight_block_size`",
    "fp8, one scale a tensor, static activations": "AutoFP8 (Mixtral `-FP8`)",
    "compressed-tensors, one scale a row": "GLM-4.5 `-FP8`, llm-compressor `-FP8-dynamic`",
    "compressed-tensors, one scale a tensor": "llm-compressor `-FP8`",
    "compressed-tensors, blocks of 128 x 128": "llm-compressor `-FP8-block`",
}


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


def page(text: str, families: dict[str, ModelComparison], formats: dict[str, ModelComparison], made_with: str) -> str:
    """`text`, a former page, with these results in its tables."""
    families_rows = ([f"`{name}`", PEOPLE_KNOW[name], *cells(families.get(name))] for name in PEOPLE_KNOW)
    formats_rows = ([name, PUBLISHED_IN[name], *cells(formats.get(name))] for name in PUBLISHED_IN)
    text = MADE_WITH.sub(made_with, text, count=1)
    text = with_table(text, ["`model_type`", "models", *RESULT_HEADS], families_rows)
    text = with_table(text, ["float8", "found in", *RESULT_HEADS], formats_rows)
    return with_table(text, ["`model_type`", "what it has that we lack", "use"], not_running())


def with_table(text: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`text` with these rows in the place of those below `heads`."""
    head, *rest = (f"| {' | '.join(row)} |\n" for row in (heads, ["---"] * len(heads), *rows))
    before, found, after = text.partition(head)
    assert found, f"{PAGE} has no table of {', '.join(heads)}"
    return "".join([before, head, *rest, OLD_ROWS.sub("", after, count=1)])


def results(text: str) -> tuple[dict[str, ModelComparison], dict[str, ModelComparison]]:
    """What a page says of families and of formats."""
    families, formats = (
        {
            name: ModelComparison(
                float(error), dict(zip(LAYOUTS, (int(first), int(second)), strict=True)), int(num_texts)
            )
            for name, error, first, num_texts, second in RESULT_ROW.findall(section)
        }
        for section in text.split(FORMATS_HEAD)
    )
    return families, formats


def cells(found: ModelComparison | None) -> list[str]:
    if found is None:
        return ["see below", "–", "–"]
    return [f"{found.largest_error:.1e}", *(f"{found.equal[name]} of {found.num_texts}" for name in LAYOUTS)]


def not_running() -> Iterable[list[str]]:
    rows = {name: [what, instead] for name, (what, instead) in LACKING.items()}
    rows |= {name: ["it is a text model with more around it", instead] for name, instead in TEXT_MODELS.items()}
    return ([f"`{name}`", *rows[name]] for name in sorted(rows))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare every family with transformers and write the tables of docs/models.md."
    )
    parser.add_argument(
        "--families", help="only these, by model_type; the page's other rows stay (default: everything)"
    )
    options = parser.parse_args(arguments)
    chosen, forms = options.families.split(",") if options.families else FAMILIES, [] if options.families else FORMATS
    if unknown := set(chosen) - set(FAMILIES):
        parser.error(f"--families {', '.join(sorted(unknown))}: use some of {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    text = PAGE.read_text(encoding="utf-8")
    families, formats = results(text) if options.families else ({}, {})
    with tempfile.TemporaryDirectory() as name, progress("comparing models") as report:
        for done, family in enumerate(chosen, start=1):
            families[family] = compare_family(family, Path(name))
            report(done, len(chosen) + len(forms))
        for done, form in enumerate(forms, start=len(chosen) + 1):
            formats[form] = compare_format(form, Path(name))
            report(done, len(chosen) + len(forms))
    if wrong := [name for name, found in (families | formats).items() if not found.holds]:
        print(f"differ from transformers: {', '.join(wrong)}", file=sys.stderr)
        return 1
    made_with = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
    PAGE.write_text(page(text, families, formats, made_with), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
