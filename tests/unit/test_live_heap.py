"""Live processes keep their pages unless told otherwise, and transformers start as their authors start them."""

import os
import subprocess
import sys

import pytest

from perfmodel.kernels.cpu_heap import NO_MAPS, TRIM_FROM, keeps_pages
from perfmodel.validate.live import heap_env, live_settings, live_topology, told
from perfmodel.validate.train import INITIALIZER_RANGE, real_model

GPT2 = {"kind": "transformer", "architecture": "gpt2", "name": "g", "batch_size": 2, "vocab_size": 3000, "hidden_size": 32,
        "layers": 2, "heads": 2, "max_positions": 16}  # fmt: skip


def test_one_process_keeps_its_pages_and_so_says_the_prediction(monkeypatch):
    for name in (NO_MAPS, TRIM_FROM):
        monkeypatch.delenv(name, raising=False)
    assert keeps_pages(live_settings(2, 1).env)
    assert keeps_pages(live_topology(1).env)
    assert not keeps_pages(live_topology(2).env)


def test_what_the_user_set_stands(monkeypatch):
    monkeypatch.delenv(NO_MAPS, raising=False)
    monkeypatch.setenv(TRIM_FROM, "131072")
    assert heap_env(1) == {TRIM_FROM: "131072"}
    assert not keeps_pages(live_topology(1).env)


def test_processes_are_told_and_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv(TRIM_FROM, "131072")
    monkeypatch.delenv(NO_MAPS, raising=False)
    asked = f"import os; print(os.environ['{NO_MAPS}'], os.environ['{TRIM_FROM}'])"
    with told({NO_MAPS: "0", TRIM_FROM: "7"}):
        found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "7"]
    assert os.environ[TRIM_FROM] == "131072"
    assert NO_MAPS not in os.environ


def test_first_loss_is_near_that_of_guessing_and_ranks_start_alike():
    """With weights of 0.02 all of 3,000 words are about equally likely: the loss is near ln 3000 = 8.0."""
    import torch

    first, second = real_model(GPT2), real_model(GPT2)
    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True))
    loss = float(first.loss(first.module(*first.args, **first.kwargs)).detach())
    assert loss == pytest.approx(8.006, abs=0.2)
    weights = torch.cat([p.flatten() for p in first.module.parameters() if p.dim() > 1])
    assert float(weights.detach().std()) == pytest.approx(INITIALIZER_RANGE, rel=0.02)
