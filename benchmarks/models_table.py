"""Which models run: writes docs/models.md from comparisons with transformers.

    python -m benchmarks.models_table                            # everything, minutes; writes docs/models.md
    python -m benchmarks.models_table --families dots1,mixtral   # these; the other rows stay as the page has them

1. Every family: a small random float32 model of odd sizes, the one the tests use. The logits of a prompt of 37 tokens,
   whole, in chunks and token by token, against transformers' eager model; then 12 prompts of 1 and 40 tokens continued
   greedily by 64 tokens through whole engines in both layouts, against transformers' `generate`.
2. Every float8 format: a model with weights in it, against transformers on what the weights multiply out to.
A difference beyond the tests' bound ends the command with exit code 1, and no page is written.
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
    NUM_TOKENS,
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
FEW_BITS = """\
Weights in 4 to 8 bits stay as they are stored, in memory and in every worker. `tests/models/test_packed.py` and
`test_gguf.py` compare their logits with those of what they multiply out to.

| format | what is read | what is refused |
| --- | --- | --- |
| compressed-tensors | 4 and 8 bits (`pack-quantized`, `int-quantized`), MXFP4 | NVFP4, sparse, transforms |
| GPTQ | 4 and 8 bits, versions 1 and 2 | 2 and 3 bits, Marlin's layout |
| AWQ | the GEMM layout | GEMV |
| MXFP4 | gpt-oss as published | |
| GGUF | Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, F16, BF16, F32 | Q2_K, Q3_K, IQ*, TQ*, NVFP4 |

Scales may be of groups or rows, with and without zero points, and one file may mix types. Groups need not be of
neighbouring columns (GPTQ's `desc_act`, act-order): their codes are laid group by group at load, and products read rows
in that order, on CPUs. Multiplied out to the dtype of the rest are: norms, embedding and router; the up projection of
latent attention; projections that are stacked here and stored in different formats or orders (q, k and v of some GGUF
mixes); on GPUs, matrices with an order of columns. A line of the log counts the matrices by format.

bitsandbytes, NVFP4 and whatever else is quantised is refused by name.

## GGUF

`antiphon serve model.gguf` needs no other file: sizes, tokenizer and chat template come from the file. Of a split file
any part will do, or the folder; a folder with a `config.json` and tokenizer beside the file uses those.

| llama.cpp's architecture | models |
| --- | --- |
| `qwen3moe`, `qwen2moe` | Qwen3, Qwen2 and Qwen1.5 MoE |
| `olmoe` | OLMoE |
| `gpt-oss` | gpt-oss |
| `llama` with experts | Mixtral |
| `deepseek2`, `deepseek` | DeepSeek-V2 and -V3, Kimi-K2; DeepSeekMoE |
| `glm4moe` | GLM-4.5, -4.6, -4.7 |
| `dots1`, `ernie4_5-moe`, `minimax-m2`, `granitemoe` | dots.llm1, ERNIE-4.5, MiniMax-M2, Granite MoE |

A byte-level tokenizer whose pattern (`tokenizer.ggml.pre`) is not known here is refused: put the model's tokenizer
files and `config.json` beside it and give the folder.

## Rounding a model

```
antiphon quantize MODEL OUT --experts int4 --dense int8 --group 32 --text held_out.txt
antiphon serve MODEL --weights int4
```

The first writes a folder in the form of compressed-tensors (`pack-quantized`, `mxfp4-pack-quantized`). transformers
loads it, with `CompressedTensorsConfig(dequantize=True)` or without; then it multiplies out in its first pass. Tests
compare its logits with ours, and the weights with compressed-tensors' own decompression. MXFP4 experts it loads in
bfloat16 only. vLLM has not loaded one here. It rounds to the nearest code with the best clip of every group, shard by
shard, prints the error of every layer and the change of the loss, and goes on where it was stopped. Router,
embedding, head and norms stay as they are. The second rounds at load and writes nothing: experts in the format named,
other matrices in int8, the head as stored, with a 16-bit scale for 32 columns. `antiphon plan --precision
weights=int8,experts=int4` counts these bytes: tests hold packed weights to within 5% of them. A process that holds
914.9 M parameters so has 682 MB resident, of 633 MB counted (`tests/models/measure_loading.py`). What is in few
bits already stays so."""
FORMATS_HEAD = "## Formats of weights"
RESULT_ROW = re.compile(r"\| `?([^|`]+?)`? \| [^|]+ \| ([\d.e-]+) \| (\d+) of (\d+) \| (\d+) of \4 \|")
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

FILES_OF_A_CHECKPOINT = """\
## Files of a checkpoint

MODEL is a checkpoint folder, a GGUF file, or a model's folder in the hub's cache (`models--org--name`). Of weights the
first that is there counts:

1. the shards of `model.safetensors.index.json`
2. `model.safetensors`
3. all numbered shards, without an index
4. a variant (`model.fp16.safetensors`)
5. a lone file of another name

Adapters, `consolidated.safetensors` and pickles beside them are not used, and the log names them. Alone they are
refused with what to do. So are pointers of Git LFS and downloads that did not end.

| where files differ or are silent | what counts |
| --- | --- |
| a key of `config.json` is missing | the default of the family's class in transformers; the log names sizes |
| neither `dtype` nor `torch_dtype` | the dtype of most bytes of the weights |
| tokens that end a text | those of `config.json`, `generation_config.json`, and the tokenizer's `eos_token` |
| `rope_scaling` beside `rope_parameters` | `rope_scaling`; the base stays where it has none |
| two spellings of a key with two values | refused |

## Longer contexts

YaRN that was added to `config.json` by hand stretches the context to `factor` times `original_max_position_embeddings`,
also where `max_position_embeddings` was left as it is. `--max-model-len` may be above the context: the log warns, since
no model was trained for those positions. `--rope-scaling` (serve, generate) takes the place of the file's own scaling:

```
antiphon serve MODEL --rope-scaling \\
  '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'
```

It takes what `rope_scaling` or `rope_parameters` may hold: yarn, linear, dynamic, llama3, longrope, default. A key that
the scaling does not use is refused. `antiphon plan` takes `--model-set rope_scaling=JSON`. Dynamic scaling follows the
longest sequence that is served, since one table serves all requests.

## Experts that stay in the file

`antiphon serve MODEL --expert-memory 8GiB` keeps the experts in the checkpoint's file and those in use in a pool of
that size, in each replica (`--layout colocated`, CPUs) or expert worker (`--layout disaggregated`; of a worker of
several ranks, in each). Layers share the pool. The next layer's router, applied to the rows that enter a layer's
experts, says which experts to read while that layer computes; what it did not foresee is read when rows need it. The
pages of the file are given back, so resident memory is the pool, one expert, and everything but the experts. The pool
must hold the experts that a process has of two layers. An expert worker knows no router: it reads ahead what the next
layer's last batch chose. Its experts do not move, so `--balance` and `--expert-slots` are refused beside it. Text is
the same as without. `/metrics` counts experts read ahead (`antiphon:experts_prefetched_total`) and late
(`antiphon:experts_prefetched_late_total`). `antiphon bench serve MODEL --expert-memory SIZE` times it beside the
model in memory: with half of the demo model's experts in the pool 0.12 to 0.34 of its speed in three runs on a loaded
machine, because eight requests choose nearly all experts of a layer in every step.

## Decisions, and why

- **Routers take the float32 path of `transformers`**, and where `transformers` 5 differs from a published model's own
  code (Phi-3.5-MoE beyond 4,096 tokens keeps the short rotary factors) we follow `transformers`, our reference.
- **Latent attention (MLA)** runs absorbed in decode and for prompt chunks with cached context, expanded for whole
  prompts. On the CPU it uses the reference kernels.
- **Granite's multipliers apply at run time.** Folding them into the weights would round every bfloat16 weight again.
- **Multimodal wrappers of a text model are refused.** Running only the text part would ignore pictures silently.
"""


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


def page(families: dict[str, ModelComparison], formats: dict[str, ModelComparison], made_with: str) -> str:
    return "\n".join(
        [
            "# Models that run",
            "",
            "For people who ask whether their model runs. Written by `python -m benchmarks.models_table` with "
            f"{made_with}; do not edit.",
            "",
            "Each family was compared with transformers' eager model in float32, by a small random checkpoint of odd "
            "sizes. Error: the largest difference of any logit, the prompt given whole, in chunks and token by token. "
            f"Texts: greedy continuations by {NUM_TOKENS} tokens that are the same tokens, of prompts with 1 and 40 "
            "tokens, in both layouts (disaggregated: one attention worker, two expert workers, two micro-batches).",
            "",
            *table(
                ["`model_type`", "models", "largest error", "texts, colocated", "texts, disaggregated"],
                ([f"`{name}`", PEOPLE_KNOW[name], *cells(families.get(name))] for name in PEOPLE_KNOW),
            ),
            "",
            "transformers has neither `deepseek` nor `kimi_k2`. The tests compare `deepseek` with a Qwen2-MoE whose "
            "shared gate is held open, and `kimi_k2` with DeepSeek-V3, whose layers it has.",
            "",
            FORMATS_HEAD,
            "",
            "`.safetensors` in float32, bfloat16 or float16, named as published or as transformers 5 writes them, and "
            "in float8 (E4M3), which stays float8. Activations, keys and values are not rounded, "
            f"and a line of the log says so. Compared as above, by a `{QUANTIZED_FAMILY}`, with transformers on the "
            "multiplied-out weights.",
            "",
            *table(
                ["float8", "found in", "largest error", "texts, colocated", "texts, disaggregated"],
                ([name, PUBLISHED_IN[name], *cells(formats.get(name))] for name in PUBLISHED_IN),
            ),
            "",
            *FEW_BITS.splitlines(),
            "",
            *FILES_OF_A_CHECKPOINT.splitlines(),
            "",
            "## Models that do not run",
            "",
            "They are refused with this line; so is every wrapper of a text model with vision or audio around it.",
            "",
            *table(["`model_type`", "what it has that we lack", "use"], not_running()),
            "",
        ]
    )


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


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare every family with transformers and write docs/models.md.")
    parser.add_argument(
        "--families", help="only these, by model_type; the page's other rows stay (default: everything)"
    )
    options = parser.parse_args(arguments)
    chosen, forms = options.families.split(",") if options.families else FAMILIES, [] if options.families else FORMATS
    if unknown := set(chosen) - set(FAMILIES):
        parser.error(f"--families {', '.join(sorted(unknown))}: use some of {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    families, formats = results(PAGE.read_text(encoding="utf-8")) if options.families else ({}, {})
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
    PAGE.write_text(page(families, formats, made_with), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
