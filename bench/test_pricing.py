"""How fast ops are priced. The goal: 10,000 ops in less than 20 ms once their rules are known (`make bench`)."""

from dataclasses import replace

import pytest

from perfmodel.config import load_model
from perfmodel.db import load_device
from perfmodel.extract import trace
from perfmodel.kernels import price, pricing
from perfmodel.models import build

pytestmark = pytest.mark.bench

N_OPS = 10_000


@pytest.fixture(scope="module")
def ops():
    """10,000 ops of a real model, each an object of its own."""
    graph = trace(build(load_model("llama3_8b")))
    return [replace(op) for op in graph.ops[:N_OPS]]


def report(benchmark, what, n_ops):
    seconds = benchmark.stats.stats.median
    print(f"\n{what}: {n_ops} ops in {1e3 * seconds:.1f} ms, {n_ops / seconds:,.0f} ops/s")


def test_warm(benchmark, ops):
    device = load_device("a100_sxm_80gb")
    price(ops, device)
    benchmark(price, ops, device)
    report(benchmark, "warm", len(ops))


def test_another_device(benchmark, ops):
    """Rules are known, the device is new: what each device of a sweep pays."""
    device = load_device("a100_sxm_80gb")
    price(ops, device)
    benchmark(lambda: price(ops, replace(device)))
    report(benchmark, "another device", len(ops))


def test_cold(benchmark, ops):
    """A graph never seen: every rule runs once for each distinct op."""
    device = load_device("a100_sxm_80gb")

    def forget():
        pricing._MEMORY.by_identity.clear()
        pricing._MEMORY.by_signature.clear()
        pricing._ANSWERS.by_device.clear()

    benchmark.pedantic(price, (ops, device), setup=forget, rounds=5)
    report(benchmark, "cold", len(ops))
