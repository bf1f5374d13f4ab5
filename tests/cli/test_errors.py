"""What a user reads who asked wrongly, or whose checkpoint is broken: one line, the right exit code, no traceback.

Through `main` itself, in this process: what can be refused is refused before any worker is started.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from antiphon.cli import main as cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


class Cli:
    """Runs the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)"""
        self._monkeypatch.setattr(sys, "argv", ["antiphon", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        printed = self._capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, printed.out, printed.err

    def refuses(self, code: int, message: str, *arguments: object) -> None:
        """It must fail with `code` and one line that `message`, a pattern, describes whole."""
        found, out, err = self.run(*arguments)
        lines = [text for text in err.splitlines() if " INFO " not in text and not text.startswith("loading weights")]
        assert len(lines) == 1, lines
        assert re.fullmatch(f"error: {message}", lines[0]), lines[0]
        assert found == code
        assert out == ""


@pytest.fixture
def antiphon(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capfd)


# Arguments after `antiphon generate MODEL`, the exit code, and the line.
WRONG_OPTIONS: list[tuple[str, int, str]] = [
    ("", 2, "give one of TEXT, --prompt TEXT and --token-ids 1,2,3"),
    ("--prompt x --token-ids 1", 2, "give one of TEXT, --prompt TEXT and --token-ids 1,2,3"),
    ("--token-ids 1,a", 2, "--token-ids '1,a' is not a list of numbers: write for example 1,2,3"),
    ("--token-ids 1,512", 2, "--token-ids names token 512: this model's are 0 to 511"),
    ("--token-ids 1 --max-tokens 0", 2, "--max-tokens is 0: it must be at least 1"),
    (
        "--token-ids 1 --max-tokens x",
        2,
        "--max-tokens is 'x': it must be a valid integer; see 'antiphon generate --help'",
    ),
    ("--token-ids 1 --temperature -1", 2, "--temperature is -1.0: it must be between 0 and 100"),
    ("--token-ids 1 --logprobs 50", 2, "--logprobs is 50: it must be between 0 and 20"),
    ("--token-ids 1 --layout apart", 2, "--layout is apart: it must be one of auto, colocated, disaggregated, hybrid"),
    (
        "--token-ids 1 --layout colocated --experts 2",
        2,
        "--experts 2 does not apply to --layout colocated: leave it out or use disaggregated",
    ),
    (
        "--token-ids 1 --layout colocated --transport tcp",
        2,
        "--transport tcp does not apply to --layout colocated: leave it out or use disaggregated",
    ),
    ("--token-ids 1 --transport rope", 2, "--transport is rope: it must be auto, shm, tcp, libfabric"),
    ("--token-ids 1 --experts -1", 2, "--experts is -1: it must be at least 1"),
    ("--token-ids 1 --experts 0", 2, "--experts is 0: it must be at least 1"),
    ("--token-ids 1 --layout disaggregated --experts 0", 2, "--experts is 0: it must be at least 1"),
    (
        "--token-ids 1 --layout colocated --experts 0",
        2,
        "--experts 0 does not apply to --layout colocated: leave it out or use disaggregated",
    ),
    ("--token-ids 1 --experts 9", 2, "--experts is 9: the model has 8 experts a layer, so it must be at most that"),
    ("--token-ids 1 --experts 100000", 2, "--experts is 100000: the model has 8 experts .*"),
    ("--token-ids 1 --attention 0", 2, "--attention is 0: it must be at least 1"),
    ("--token-ids 1 --attention 65", 2, "--attention is 65: it must be at most 64"),
    ("--token-ids 1 --micro-batches 0", 2, "--micro-batches is 0: it must be at least 1"),
    ("--token-ids 1 --micro-batches -1", 2, "--micro-batches is -1: it must be at least 1"),
    ("--token-ids 1 --micro-batches 65", 2, "--micro-batches is 65: it must be at most 64"),
    ("--token-ids 1 --dtype int3", 2, "--dtype int3 is not supported: use one of auto, bfloat16, float16, float32"),
    ("--token-ids 1 --device tpu", 2, "--device tpu is not supported: use cpu or cuda"),
    ("--token-ids 1 --kernels fast", 2, "--kernels fast do not exist: use auto, cpu, triton or reference"),
    ("--token-ids 1 --kernels cpu --dtype float16", 2, "--kernels cpu: the native kernels .* use --kernels reference"),
    ("--token-ids 1 --threads -1", 2, "--threads is -1: it must be at least 1"),
    ("--token-ids 1 --threads 0", 2, "--threads is 0: it must be at least 1"),
    ("--token-ids 1 --threads 99999999999999999999", 2, "--threads is 9*: it must be at most 256"),
    ("--token-ids 1 --timeout 0", 2, "--timeout is 0.0: it must be above 0"),
    ("--token-ids 1 --timeout inf", 2, "--timeout is inf: it must be a finite number"),
    ("--token-ids 1 --seed 99999999999999999999", 2, r"--seed is 9*: it must be between -2\*\*63 and 2\*\*63 - 1"),
    ("--token-ids 1 --max-model-len 0", 2, "--max-model-len is 0: it must be at least 1"),
    ("--token-ids 1 --kv-bytes 0", 2, "--kv-bytes is 0: it must be at least 1"),
    ("--token-ids 1 --max-model-len 2000000000", 2, "--max-model-len is 2000000000: it must be at most 1073741824"),
    ("--token-ids 1 --rope-scaling {}", 2, "--rope-scaling: rope_type = null: use one of default, dynamic, .*yarn"),
    ("--token-ids 1 --kv-bytes much", 2, "--kv-bytes 'much' is not a size in bytes: write for example 4GiB.*"),
    (
        "--token-ids 1 --kv-bytes 1KiB",
        1,
        "--kv-bytes 1.0 KiB is too small: one sequence of 8192 tokens on each of 1 workers needs 2.0 MiB; "
        "raise it or lower --max-model-len",
    ),
    (
        "--token-ids 1 --kv-bytes 1KiB --kv-dtype int8",
        1,
        "--kv-bytes 1.0 KiB is too small: one sequence of 8192 tokens on each of 1 workers needs 1.2 MiB; .*",
    ),
    ("--token-ids 1 --kv-dtype int3", 2, "--kv-dtype is int3: it must be one of auto, bf16, int8, fp8"),
    ("--token-ids 1 --kv-bytes 900TiB", 1, "--kv-bytes 900.0 TiB is more than the .* of memory free: lower it"),
    ("--token-ids 1 --timeline none/t.json", 2, "--timeline none/t.json: the folder .*none does not exist; create it"),
    (
        "--token-ids 1 --layout disaggregated --expert-slots 99999999999999999999",
        2,
        "--expert-slots is 9*: it must be at most 65536",
    ),
    ("--frobnicate", 2, "No such option: --frobnicate.*; see 'antiphon generate --help'"),
    ("--token-ids", 2, "Option '--token-ids' requires an argument; see 'antiphon.* --help'"),
]


@pytest.mark.parametrize(("options", "code", "message"), WRONG_OPTIONS)
def test_wrong_options(antiphon: Cli, checkpoint: Path, options: str, code: int, message: str) -> None:
    antiphon.refuses(code, message, "generate", checkpoint, *options.split())


WRONG_SERVER_OPTIONS: list[tuple[str, str]] = [
    ("--port 99999", "--port is 99999: use 1 to 65535, or 0 for any free port"),
    ("--host 192.0.2.1", "--host 192.0.2.1 is not an address of this machine: use 127.0.0.1, or 0.0.0.0 for all of .*"),
    (
        "--api-key-file none",
        r"--api-key-file none: cannot be read \(No such file or directory\): give another file with one.*",
    ),
    ("--api-key-file /dev/zero", "--api-key-file /dev/zero: a device, which may have no end: give a file with one.*"),
    ("--max-body-bytes 0", "--max-body-bytes is 0: it must be at least 1"),
    ("--max-answer-bytes 0", "--max-answer-bytes is 0: it must be at least 1"),
    ("--max-body-bytes big", "--max-body-bytes 'big' is not a size in bytes: .*"),
    ("--max-streams 0", "--max-streams is 0: it must be at least 1"),
    ("--max-waiting 0", "--max-waiting is 0: it must be at least 1"),
    ("--max-prompt-tokens -4", "--max-prompt-tokens is -4: it must be at least 1"),
    ("--max-prompt-tokens 0", "--max-prompt-tokens is 0: it must be at least 1"),
    ("--max-batch-tokens 99999999999999999999", "--max-batch-tokens is 9*: it must be at most 1048576"),
    ("--host=", "--host is empty: give a value, or leave the option out"),
    ("--served-model-name=", "--served-model-name is empty: give a value, or leave the option out"),
    ("--join-address=", "--join-address is empty: give a value, or leave the option out"),
    ("--ray-address=", "--ray-address is empty: give a value, or leave the option out"),
    ("--max-running 4000", "--max-batch-tokens is 2048: it must be at least --max-running, which is 4000"),
    ("--secret-file none", "--secret-file none: no worker joins without --join-address .*, or leave it out"),
    (
        "--prefill 999 --decode 1",
        "--prefill 999: number of attention workers or replicas is 999: it must be at most 64",
    ),
    ("--prefill 1 --decode 99x1", "--decode 99x1: number of instances is 99: it must be at most 64"),
    ("--prefill 1 --decode 1+9", r"--decode 1\+9: number of expert workers is 9: the model has 8 experts .*"),
    ("--prefill 1 --decode 1+1/m99", r"--decode 1\+1/m99: number of micro-batches is 99: it must be at most 64"),
    ("--prefill 1t0 --decode 1", "--prefill 1t0: number of ranks of an attention worker is 0: it must be at least 1"),
    ("--prefill 1p99 --decode 1", "--prefill 1p99: number of stages is 99: the model has 2 layers, so it must .*"),
    ("--prefill 1 --decode 1p2+1", r"2 stages in --decode 1p2\+1: apart from experts, .*"),
    ("--prefill 1 --decode 2t2*3", r"2 ranks of an attention worker and 3 ranks of an expert in --decode 2t2\*3 on .*"),
    ("--prefill 1 --decode 2x1", "2 instances in --decode 2x1: a colocated layout has replicas in their place .*"),
    ("--prefill 1 --decode 1 --balance window", r"--balance window needs expert workers .* in --decode 1: .*"),
    ("--prefill 1 --decode 1 --expert-device cpu", r"--expert-device cpu needs expert workers .* in --decode 1: .*"),
    (
        f"--prefill {'1' * 5000} --decode 1",
        "--prefill 1*… 4,920 more characters …1*: number of .* it must be at most 64",
    ),
    ("--drain-timeout -1", "--drain-timeout is -1 s: it must be 0 to 1000000"),
    ("--host a..b", "--host 'a..b' is no name of a machine: between dots it must have 1 to 63 characters"),
]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_workers_do_not_join_where_clients_connect(antiphon: Cli, checkpoint: Path, tmp_path: Path, host: str) -> None:
    """Both could be reserved, and the second to listen would find out when the model is loaded."""
    secret, port = tmp_path / "secret", 7700
    secret.write_text("correct horse battery staple")
    joining = f"--layout disaggregated --join-address 127.0.0.1:{port} --join-workers 0+1 --secret-file {secret}"
    message = f"--join-address 127.0.0.1:{port} and --port {port} are one address: choose another port for one of them"
    antiphon.refuses(2, message, "serve", checkpoint, *joining.split(), "--host", host, "--port", port)


@pytest.mark.parametrize(("options", "message"), WRONG_SERVER_OPTIONS)
def test_wrong_server_options(antiphon: Cli, checkpoint: Path, options: str, message: str) -> None:
    antiphon.refuses(2, message, "serve", checkpoint, *options.split())


def test_key_files_that_hold_no_key(antiphon: Cli, checkpoint: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# nothing yet\n")
    message = f"the API key file {keys} holds no key: write one key a line"
    antiphon.refuses(2, message, "serve", checkpoint, "--api-key-file", keys)


def test_a_port_in_use_is_found_before_the_model_is_loaded(antiphon: Cli, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"port {port} on 127.0.0.1 is in use: choose another with --port \(0 takes any free one\)"
        antiphon.refuses(2, message, "serve", checkpoint, "--port", port)


@pytest.mark.parametrize("command", [("generate", "--token-ids", "1"), ("generate", "--prompt", "x"), ("serve",)])
def test_no_such_folder(antiphon: Cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    missing = tmp_path / "none"
    message = f"{missing} is missing: give a checkpoint folder in Hugging Face format"
    antiphon.refuses(1, message, command[0], missing, *command[1:])


def test_a_name_of_the_hub_is_no_folder(
    antiphon: Cli, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    general, name = "give a checkpoint folder in Hugging Face format", "Qwen/Qwen3-30B-A3B"
    hint = f"; if {name} is its name on the Hugging Face Hub: hf download {name} --local-dir Qwen3-30B-A3B"
    antiphon.refuses(1, f"{name} is missing: {general}{hint}", "serve", name)
    (tmp_path / "Qwen").mkdir()  # then it is a path with a mistake
    antiphon.refuses(1, f"{name} is missing: {general}", "serve", name)


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("serve",), ("quantize", "out")])
def test_one_file_of_a_folder(antiphon: Cli, checkpoint: Path, command: tuple[str, ...]) -> None:
    file = checkpoint / "config.json"
    message = f"{file} is one file of a checkpoint: give the folder {checkpoint}"
    antiphon.refuses(1, message, command[0], file, *command[1:])


def test_a_prompt_that_is_too_long_is_found_before_weights_are_loaded(
    antiphon: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.cli.generate.start_with_progress", lambda run: pytest.fail("it was started"))
    message = r"prompt \(3\) plus max_tokens \(9000\) is 9003 tokens, above the context length of 8192: .*"
    antiphon.refuses(2, message, "generate", checkpoint, "--token-ids", "1,2,3", "--max-tokens", 9000)


def test_an_address_in_brackets(antiphon: Cli, checkpoint: Path) -> None:
    message = r"--host \[::1\] is not an address of this machine \(.*\): write ::1, without brackets"
    antiphon.refuses(2, message, "serve", checkpoint, "--host", "[::1]")


def test_no_config(antiphon: Cli, folder: Path) -> None:
    (folder / "config.json").unlink()
    message = f"{folder}/config.json is missing: give a checkpoint folder in Hugging Face format"
    antiphon.refuses(1, message, "serve", folder)


def test_an_unknown_architecture(antiphon: Cli, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    antiphon.refuses(1, "config.json: model_type = 'llama' is not supported: use one of dbrx, .*", "serve", folder)


def test_no_tokenizer(antiphon: Cli, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    message = f"{folder} has no tokenizer: expected tokenizer.json there; copy it from the model's source"
    antiphon.refuses(1, message, "serve", folder)
    antiphon.refuses(1, message, "generate", folder, "--prompt", "x")


def test_a_missing_shard(antiphon: Cli, folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = f"{folder}: 1 of 3 shards missing, the first is model-00002-of-00003.safetensors: download it"
    antiphon.refuses(1, message, "serve", folder, "--port", 0)


@pytest.mark.parametrize("layout", ["colocated", "disaggregated"])
def test_a_truncated_shard(antiphon: Cli, folder: Path, layout: str) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 100)
    message = f"{shard.name}: truncated: {size - 100:,} bytes, its header promises {size:,}: download it again"
    antiphon.refuses(1, message, "generate", folder, "--token-ids", "1", "--layout", layout)


def test_a_tensor_of_the_wrong_shape(antiphon: Cli, folder: Path) -> None:
    shard = folder / "model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()
    save_file(tensors, shard, metadata={"format": "pt"})
    message = (
        rf"{shard.name}: tensor lm_head.weight has shape \[511, 64\], config.json asks for \[512, 64\]: "
        r"weights and config.json are of different models, download both again"
    )
    antiphon.refuses(1, message, "serve", folder, "--port", 0)


def test_cuda_without_a_device(antiphon: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    message = r"--device cuda: this PyTorch \(.*\) is a build without CUDA: install one with it .*, or use --device cpu"
    antiphon.refuses(2, message, "serve", checkpoint, "--device", "cuda", "--port", 0)


MODEL = ROOT / "examples" / "demo-moe"
DEMO = MODEL / "train.toml"
WORKER = ("--role", "experts", "--join", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("frobnicate",), "No such command 'frobnicate'; see 'antiphon --help'"),
        (("serve",), "Missing argument 'MODEL'; see 'antiphon serve --help'"),
        (("bench", "nothing"), "No such command 'nothing'; see 'antiphon bench --help'"),
        (("bench", "serve", "x", "--concurrency", "a"), "--concurrency 'a' is not a list of numbers: .*"),
        (("profile", "--phase", "both", "x"), "--phase is both: it must be one of serve, train"),
        (
            ("placement", "x", "--workers", 1, "--slots", 1, "--path-length", 2),
            "--path-length: it is of --profile-paths FILE: add that, or leave it out",
        ),
        (("placement", "x", "--knee", "0"), "--knee is 0: it must be at least 1"),
        (("placement", "x", "--knee", "2", "--knee", "0"), "--knee is 0: it must be at least 1"),
        (
            ("export", "x", "y", "--dtype", "int4"),
            "--dtype is int4: it must be one of bfloat16, float16, float32, float64, fp8",
        ),
        (("train", "none.toml", "--tokenize", "--print-config"), "--tokenize and --print-config: .* leave one .* out"),
        (("train", DEMO, "--tokenize", "--nproc", 2), "--nproc: --tokenize stops before that .*, leave one of .* out"),
        (("train", DEMO, "--print-config", "--json", "x.json"), "--json: --print-config stops before that .*"),
        (("quantize", MODEL, "x", "--experts", "mxfp4", "--group", 64), "--group: mxfp4 has blocks of 32 columns, .*"),
        (("plan", MODEL, "--explain", "--json", "-"), "--explain with --json -: no text is printed, .*"),
        (("bench", "step", MODEL, "--layout", "1+1/m99"), r"layout 1\+1/m99: number of micro-batches is 99: .*"),
        (("bench", "apart", MODEL, "--together", ""), "--together is '': write colocated, .*"),
        (("bench", "m2n", "--bytes", "1KiB,2KiB,1KiB"), "--bytes has 1KiB twice: write it once"),
        (("reproduce", "--markdown", DEMO / "x"), "--markdown .*: the folder .*train.toml is a file; name another"),
        (("quantize", MODEL, "x", "--experts", ""), "--experts is '': it must be one of int8, int4, mxfp4"),
        (("worker", *WORKER, "--threads", 0), "--threads is 0: it must be at least 1"),
        (("worker", *WORKER, "--patience", 0), "--patience is 0: it must be above 0 s and at most 1000000"),
        (("worker", *WORKER, "--host", ""), "--host is empty: give a value, or leave the option out"),
    ],
)
def test_wrong_commands(antiphon: Cli, arguments: tuple[object, ...], message: str) -> None:
    antiphon.refuses(2, message, *arguments)


WRONG_BENCHMARKS: list[tuple[str, str]] = [
    ("--layouts 1+", r"--layouts is '1\+': write colocated, .*"),
    ("--layouts 1+0/m2", r"--layouts is '1\+0/m2': write colocated, .*"),
    ("--layouts colocated*0", r"--layouts is 'colocated\*0': write colocated, .*"),
    ("--peers y", "--peers has 'y': use transformers, vllm or llama.cpp, or --against-url"),
    ("--layouts colocated,1+1,colocated", "--layouts has colocated twice: write it once"),
    ("--concurrency 1,2,01", "--concurrency has 1 twice: write it once"),
    ("--prefill 1x8,1x8", "--prefill has 1x8 twice: write it once"),
    ("--concurrency 1,0", "--concurrency '1,0': a number is 0: it must be 1 to 65536"),
    ("--prefill 0x5", "--prefill '0x5': a number of prompts is 0: it must be 1 to 65536"),
    ("--prefill 1x-1", "--prefill '1x-1': a prompt's length is -1: it must be 1 to 10000000"),
    ("--input-tokens 0", "--input-tokens is 0: it must be 1 to 10000000"),
    ("--output-tokens -1", "--output-tokens is -1: it must be 1 to 10000000"),
    ("--input-tokens 9000", "9000 input and 64 output tokens are more than the model's context of 8192: lower .*"),
    ("--rounds 0", "--rounds is 0: it must be 1 to 1000"),
    ("--threads 0", "--threads is 0: it must be 1 to 256"),
]


def test_a_text_in_the_place_of_a_model(antiphon: Cli) -> None:
    path = MODEL / "README.md"
    antiphon.refuses(1, f"{path} is no model: give a checkpoint folder, .* or a GGUF file", "serve", path)


@pytest.mark.parametrize(("options", "message"), WRONG_BENCHMARKS)
def test_wrong_benchmarks(antiphon: Cli, checkpoint: Path, options: str, message: str) -> None:
    antiphon.refuses(2, message, "bench", "serve", checkpoint, *options.split())


@pytest.mark.parametrize("arguments", [("--debug", "serve", "none"), ("serve", "none", "--debug")])
def test_debug_shows_where_it_happened(antiphon: Cli, arguments: tuple[str, ...]) -> None:
    code, _, err = antiphon.run(*arguments)
    assert code == 1
    assert "Traceback" in err
    assert err.endswith("error: none is missing: give a checkpoint folder in Hugging Face format\n")


def test_the_installed_command_does_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "antiphon.cli.main", "serve", str(tmp_path / "none")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr == f"error: {tmp_path / 'none'} is missing: give a checkpoint folder in Hugging Face format\n"


@pytest.mark.parametrize("columns", ["0", "x", ""])
def test_a_width_that_is_none(columns: str, antiphon: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = antiphon.run("plan", "--list")
    assert (code, "mixtral-8x22b" in out) == (0, True)
