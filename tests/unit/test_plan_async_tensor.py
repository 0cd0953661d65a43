"""Asynchronous tensor parallelism: the work and the bytes of collectives that block, each step beside a product."""

from functools import cache

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.config.plan import TensorParallel
from perfmodel.errors import ConfigError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.kernels import work
from perfmodel.models import build
from perfmodel.plan import RankDevice, place
from perfmodel.plan.tensor_parallel import tensor_parallel

BATCH, TOKENS, WIDTH, LAYERS = 2, 32, 64, 2
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "gpt2", "batch_size": BATCH, "precision": "bf16",
    "optimizer": "adamw", "vocab_size": 512, "hidden_size": WIDTH, "layers": LAYERS, "heads": 4,
    "max_positions": TOKENS,
}  # fmt: skip
RANK = RankDevice(device="h100_sxm", memory_bytes=80 * 2**30)
HIDDEN_BYTES = BATCH * TOKENS * WIDTH * 2


@cache
def gpt() -> Graph:
    return trace(build(load_model(MODEL)))


@cache
def local(n: int, async_tp: bool) -> Graph:
    return tensor_parallel(gpt(), TensorParallel(sequence=True, async_tp=async_tp), n)


def moved(graph: Graph, n: int) -> float:
    """Bytes that a rank sends: (n - 1) / n of a gather or scatter, twice that of an all-reduce, a whole step of a ring."""
    share = {"all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n, "send_recv": 1.0}
    return sum(op.attrs["bytes"] * share[op.name.removeprefix("perfmodel.")] for op in graph.ops if "group" in op.attrs)


@pytest.mark.parametrize("n", [2, 4])
def test_the_same_work_and_the_same_bytes(n) -> None:
    blocking, apart = local(n, False), local(n, True)
    products = [sum(work(op).flops for op in g.ops if op.name in ("aten.mm", "aten.addmm")) for g in (blocking, apart)]
    assert products[0] == products[1]
    assert moved(apart, n) == moved(blocking, n)


@pytest.mark.parametrize("n", [2, 4])
def test_what_megatron_moves_beside_products_moves_in_steps(n) -> None:
    """Of a layer 4 of forward's (2 gathers, 2 scatters), and in backward 2 gathers and 2 scatters; the gathers for weight
    gradients have their tokens on the summed side and stay whole."""
    steps = [op for op in local(n, True).ops if op.name == "perfmodel.send_recv" and ".h." in op.module]
    assert len(steps) == 8 * LAYERS * (n - 1)
    assert {op.attrs["bytes"] for op in steps} == {HIDDEN_BYTES // n}
    whole = [op for op in local(n, True).ops if op.name == "perfmodel.all_gather" and ".h." in op.module]
    assert len(whole) == 2 * LAYERS


def test_a_step_travels_while_the_piece_before_is_computed() -> None:
    events = place(gpt(), load_plan("tp=4,sequence=true,async_tp=true"), [RANK] * 4).classes[0].events
    steps = [i for i, e in enumerate(events) if e.collective is not None and e.collective.op == "send_recv"]
    first = steps[1]  # in the first gather; the piece before it is computed while it travels
    assert events[first + 1].label == "aten.addmm"
    assert first not in events[first + 1].after
    assert steps[0] in events[first + 1].after
    assert events[first].stream == "tensor"


def test_gradients_are_complete_where_they_were() -> None:
    blocking, apart = local(4, False), local(4, True)
    for one, other in zip(blocking.parameters, apart.parameters, strict=True):
        assert blocking.ops[one.grad_op].outputs == apart.ops[other.grad_op].outputs


def test_all_reduces_are_not_cut() -> None:
    with pytest.raises(ConfigError, match="async_tp: found true without sequence"):
        load_plan("tp=4,async_tp=true")
