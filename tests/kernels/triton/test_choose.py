"""The choice among ways: by time, after they agree. Times are made up here."""

import logging

import pytest
import torch

from antiphon.kernels.api import ExpertShape
from antiphon.kernels.triton import load


def test_the_quickest_that_agrees(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose, right = load("choose"), torch.ones(3)
    times = {"triton": 4e-6, "wrong": 1e-6, "quick": 3e-6, "slow": 9e-6}

    def named(name: str) -> object:
        def way() -> torch.Tensor:
            if name == "broken":
                raise RuntimeError("not on this card\nmore")
            return right * 2 if name == "wrong" else right

        way.called = name  # type: ignore[attr-defined]
        return way

    monkeypatch.setattr(choose, "measure_s", lambda way: times[way.called])
    ways = {name: named(name) for name in (*times, "broken")}
    choice = choose.WayChoice(device)
    with caplog.at_level(logging.INFO, "antiphon"):
        assert choice.choose("experts", "5 experts", [ways, ways]) == "quick"
    assert choice.of("experts", "triton") == "quick"
    assert caplog.messages == [
        "kernels: 5 experts: triton 4.0 us, wrong gives other numbers than triton, quick 3.0 us, slow 9.0 us, "
        "broken cannot (not on this card); quick is taken"
    ]


def test_experts_through_either_way(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that a GPU chooses from give the same numbers; what was chosen is used."""
    backend = load("backend").TritonBackend(device, torch.bfloat16)
    experts = backend.new_experts(ExpertShape(3, 16, 24, "swiglu_oai", has_bias=True))
    for index in range(3):
        experts.set_expert(index, torch.randn(24, 16), torch.randn(24, 16), torch.randn(16, 24))
        experts.set_bias(index, torch.randn(24), torch.randn(24), torch.randn(16))
    asked = []
    monkeypatch.setattr(backend._ways, "is_open", lambda kind: not asked)
    monkeypatch.setattr(load("choose"), "measure_s", lambda way: asked.append(way) or float(len(asked) < 3))
    x, ids = torch.randn(4, 16, device=device).bfloat16(), torch.tensor([[0, 2], [1, -1], [-1, -1], [2, 1]]).int()
    monkeypatch.setattr(load("backend"), "CHOICE_TOKENS", (2, 5))
    found = backend.grouped_ffn(x, ids.to(device), torch.rand(4, 2, device=device), experts)
    assert len(asked) == 4
    assert backend._ways.of(experts.shape, "triton") == "grouped_mm"
    assert not found[2].any()
