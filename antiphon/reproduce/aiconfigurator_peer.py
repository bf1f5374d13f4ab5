"""Prices measured servers with NVIDIA's aiconfigurator. Its own interpreter runs this file, so it imports nothing of
this project; one JSON object a point goes to standard output, with its line in the file.

    PYTHON aiconfigurator_peer.py measured_servers.csv 7      # every seventh server without pools

Measured data where the tool has them, else its hybrid mode. Rejected: installing it beside this project; it needs
another numpy and brings 80 MB of tables.
"""

import csv
import json
import logging
import sys
import warnings

MODELS = {
    "minimax-m2.5": "MiniMaxAI/MiniMax-M2.5",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
    "kimi-k2.5": "moonshotai/Kimi-K2.5",
    "glm-5": "zai-org/GLM-5",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm", "B300": "b300_sxm", "GB200": "gb200"}
FORMATS = {"fp8": "fp8_block", "nvfp4": "nvfp4"}


def priced(row: dict[str, str]) -> dict[str, object]:
    """`tpot_ms` and `ttft_ms` of one row of the file, or an `error`."""
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]  # of the other interpreter

    quantized = FORMATS.get(row["weights"])
    error = ""
    for mode in ("SILICON", "HYBRID"):
        try:
            found = cli_estimate(
                MODELS[row["model"]],
                SYSTEMS[row["device"]],
                mode="agg",
                database_mode=mode,
                backend_name=row["engine"],
                isl=int(row["prompt"]),
                osl=int(row["output"]),
                batch_size=max(1, int(row["in_flight"]) // int(row["attention_dp"])),
                tp_size=int(row["attention_tp"]),
                attention_dp_size=int(row["attention_dp"]),
                moe_tp_size=int(row["expert_tp"]),
                moe_ep_size=int(row["expert_ep"]),
                gemm_quant_mode=quantized,
                moe_quant_mode=quantized,
            )
        except Exception as refusal:  # whatever the tool says no with
            error = str(refusal)
        else:
            return {"tpot_ms": float(found.tpot), "ttft_ms": float(found.ttft)}
    return {"error": error[:200]}


def main(path: str, step: int) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    chosen = [index for index, row in enumerate(rows) if not row["workers"]][::step]
    # a database is loaded for each device and engine
    for index in sorted(chosen, key=lambda index: (rows[index]["device"], rows[index]["engine"])):
        print(json.dumps({"index": index, "of": len(chosen), **priced(rows[index])}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
