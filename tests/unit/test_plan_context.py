"""Context parallelism of a small llama: ring volumes by their closed form, work by the causal triangle, groups by the mesh."""

from functools import cache

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.errors import InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.kernels import work
from perfmodel.models import build
from perfmodel.plan import RankDevice, place
from perfmodel.plan.context_parallel import context_parallel
from perfmodel.plan.facts import facts_of
from perfmodel.plan.memory import dense_memory
from perfmodel.plan.tensor_parallel import tensor_parallel

BATCH, TOKENS, WIDTH, LAYERS, HEADS, KV_HEADS = 2, 64, 64, 3, 4, 2
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "llama", "batch_size": BATCH, "precision": "bf16",
    "optimizer": "adamw", "vocab_size": 512, "hidden_size": WIDTH, "layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS,
    "max_positions": TOKENS, "attention": "sdpa",
}  # fmt: skip
RANK = RankDevice(device="h100_sxm", memory_bytes=80 * 2**30)
# Keys and values of the whole sequence, 2 bytes an element.
KV_BYTES = 2 * BATCH * TOKENS * KV_HEADS * (WIDTH // HEADS) * 2


@cache
def llama(**changes) -> Graph:
    return trace(build(load_model({**MODEL, **changes})))


def sent(graph: Graph, phase: str) -> int:
    return sum(op.attrs["bytes"] for op in graph.ops if op.name == "perfmodel.send_recv" and op.phase == phase)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_ring_sends_keys_and_values_to_all_others(n) -> None:
    # arXiv:2310.01889: each of n - 1 steps sends one rank's share of keys and values; backward sends them again, and their
    # gradients n times, the last time home.
    graph = context_parallel(llama(), n)
    assert sent(graph, "forward") == LAYERS * (n - 1) * KV_BYTES // n
    assert sent(graph, "backward") == LAYERS * (2 * n - 1) * KV_BYTES // n


@pytest.mark.parametrize("n", [2, 4])
def test_every_rank_does_its_share_of_the_triangle(n) -> None:
    def flops(graph: Graph, *words: str) -> int:
        return sum(work(op).flops for op in graph.ops if any(word in op.name for word in words))

    graph = context_parallel(llama(), n)
    assert flops(graph, "attention") * n == flops(llama(), "attention")
    assert flops(graph, "aten.mm", "aten.addmm") * n == flops(llama(), "aten.mm", "aten.addmm")


def test_parameters_are_whole_and_activations_a_share() -> None:
    graph = context_parallel(llama(), 4)
    assert [p.tensor.shape for p in graph.parameters] == [p.tensor.shape for p in llama().parameters]
    whole, part = (dense_memory(facts_of(g), frozenset()).activations_bytes for g in (llama(), graph))
    assert part < 0.4 * whole


def test_every_op_reads_what_was_made_before() -> None:
    graph = context_parallel(llama(), 4)
    known = {s.id for s in graph.storages if s.kind in ("parameter", "buffer", "input", "optimizer_state")}
    for number, op in enumerate(graph.ops):
        assert op.id == number
        if op.phase != "optimizer":
            assert {spec.storage for spec in op.inputs} <= known, (op.name, op.module)
        known |= {spec.storage for spec in op.outputs}


def test_gradients_are_reduced_over_replicas_and_rings_together() -> None:
    placement = place(llama(), load_plan("dp=2,cp=2,tp=2"), [RANK] * 8)
    assert placement.n_replicas == 2
    found = [e.collective for e in placement.classes[0].events if e.collective is not None]
    assert {c.ranks for c in found if "bucket" in c.purpose} == {(0, 2, 4, 6)}
    assert {c.ranks for c in found if c.op == "send_recv"} == {(0, 2)}
    assert {c.ranks for c in found if c.op == "all_reduce" and "bucket" not in c.purpose} == {(0, 1)}
    local = tensor_parallel(context_parallel(llama(), 2), load_plan("tp=2").tensor_parallel, 2)
    assert sum(c.bytes for c in found if "bucket" in c.purpose) == sum(p.tensor.bytes for p in local.parameters)
    # Heads are split too, so half of the keys and values go round.
    assert sent(local, "forward") * 2 == sent(context_parallel(llama(), 2), "forward")


def test_the_next_keys_travel_beside_attention() -> None:
    events = place(llama(), load_plan("cp=4"), [RANK] * 4).classes[0].events
    sends = [i for i, e in enumerate(events) if e.collective is not None and e.collective.op == "send_recv"]
    first = sends[0]
    assert events[first].stream == "context"
    attend = [i for i in range(first, len(events)) if events[i].op is not None and "attention" in events[i].op.name]
    assert attend[0] > first  # issued after the send
    assert first not in events[attend[0]].after  # and does not wait for it
    assert first in events[attend[1]].after  # the next one does


def test_fsdp_divides_states_over_rings_too() -> None:
    events = place(llama(), load_plan("fsdp,cp=2"), [RANK] * 4).classes[0].events
    gathered = {e.collective.ranks for e in events if e.collective is not None and e.collective.op == "all_gather"}
    assert gathered == {(0, 1, 2, 3)}


def test_what_cannot_go_round_a_ring_is_refused_with_the_reason() -> None:
    with pytest.raises(InfeasiblePlanError, match="allowed attention: sdpa in the model file"):
        context_parallel(llama(attention="eager"), 2)
    with pytest.raises(InfeasiblePlanError, match="tokens a multiple of 128, two chunks a rank"):
        context_parallel(llama(), 64)
