"""`antiphon plan` run in the tests' own process, and a cluster and a model of odd sizes for it."""

import re
import sys

import pytest

from antiphon.cli import main as cli

ODD_CLUSTER = """
name = "odd"
[[groups]]
device = "H20"
num_nodes = 3
devices_per_node = 7
[[groups]]
device = "L40S"
num_nodes = 1
devices_per_node = 5
"""
FIVE_EXPERTS = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 7,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


class PlanCommand:
    """Runs the command in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """(exit code, standard output, standard error) of ``antiphon plan ...``"""
        self._monkeypatch.setattr(sys, "argv", ["antiphon", "plan", *map(str, arguments)])
        self._monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as caught:
            cli.main()
        printed = self._capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, printed.out, printed.err

    def plans(self, *arguments: object) -> str:
        code, out, err = self.run(*arguments)
        assert code == 0, err
        return out

    def refuses(self, code: int, message: str, *arguments: object) -> None:
        """It must fail with `code` and one line that `message`, a pattern, describes whole."""
        found, out, err = self.run(*arguments)
        (line,) = [text for text in err.splitlines() if not text.startswith("planning: ")]
        assert re.fullmatch(f"error: {message}", line), line
        assert found == code
        assert out == ""
