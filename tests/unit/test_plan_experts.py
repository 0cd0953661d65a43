"""Expert parallelism: what moves, what is computed and what is held, by closed forms; what cannot be placed is refused.

GShard (arXiv:2006.16668, section 3.3) and Megatron-Core: a layer sends its rows (tokens x experts of each) to the experts and
back in forward, and their gradients both ways in backward: four all-to-alls of tokens x k x width elements.
"""

from functools import cache
from math import ceil

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.config.plan import ExpertParallel
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.kernels import work
from perfmodel.models import build
from perfmodel.plan import Placement, RankDevice, place
from perfmodel.plan.expert_parallel import expert_parallel
from perfmodel.plan.recompute import recomputed

BATCH, TOKENS, WIDTH, FFN, LAYERS, EXPERTS, CHOSEN = 2, 32, 64, 96, 2, 8, 2
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "mixtral", "batch_size": BATCH, "precision": "bf16",
    "vocab_size": 512, "hidden_size": WIDTH, "layers": LAYERS, "heads": 4, "kv_heads": 2, "ffn_size": FFN,
    "max_positions": TOKENS, "experts": EXPERTS, "experts_per_token": CHOSEN, "optimizer": "adamw",
}  # fmt: skip
RANK = RankDevice(device="h100_sxm", memory_bytes=80 * 2**30)
ROWS = BATCH * TOKENS * CHOSEN
ROW_BYTES = ROWS * WIDTH * 2
EXPERT_ELEMS = LAYERS * EXPERTS * 3 * WIDTH * FFN


@cache
def moe(**changes) -> Graph:
    return trace(build(load_model({**MODEL, **changes})))


@cache
def placed(plan: str, n_ranks: int, **changes) -> Placement:
    return place(moe(**changes), load_plan(plan), [RANK] * n_ranks)


def collectives(placement: Placement, cls: int = 0) -> list:
    return [e.collective for e in placement.classes[cls].events if e.collective is not None]


def rows_moved(placement: Placement, cls: int = 0) -> list:
    return [c for c in collectives(placement, cls) if "of each expert" not in c.purpose and "all_to_all" in c.op]


def flops(graph: Graph) -> int:
    return sum(work(op).flops for op in graph.ops if op.name == "aten._grouped_mm")


def dense_bytes() -> int:
    return sum(p.tensor.bytes for p in moe().parameters) - 2 * EXPERT_ELEMS


# What moves.


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_a_layer_sends_its_rows_four_times(ep) -> None:
    moved = rows_moved(placed(f"ep={ep}", ep))
    assert [c.op for c in moved] == ["all_to_all"] * 4 * LAYERS
    assert {c.bytes for c in moved} == {ROW_BYTES}
    assert {c.ranks for c in moved} == {tuple(range(ep))}


def test_ranks_tell_each_other_their_counts_and_the_host_waits() -> None:
    """The sizes of an uneven exchange are known to the host only after one of eight numbers; in backward they are known."""
    told = [e for e in placed("ep=4", 4).classes[0].events if e.collective and "of each expert" in e.collective.purpose]
    assert [(e.collective.bytes, e.phase, e.host_waits) for e in told] == [(8 * EXPERTS, "forward", True)] * LAYERS


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_a_capacity_fixes_the_rows_of_every_expert(factor) -> None:
    capacity = ceil(factor * ROWS / EXPERTS)
    placement = placed(f"ep=4,capacity_factor={factor}", 4)
    assert {c.bytes for c in rows_moved(placement)} == {EXPERTS * capacity * WIDTH * 2}
    assert len(collectives(placement)) == 4 * LAYERS + 1  # no counts; one bucket of dense gradients
    local = expert_parallel(moe(), ExpertParallel(capacity_factor=factor), 4)
    assert flops(local) == 3 * 2 * LAYERS * EXPERTS * capacity * 3 * WIDTH * FFN


def test_the_busiest_rank_sets_the_pace() -> None:
    """1.5 times the mean: its work, and 3/8 of what every rank sends; the others share the rest."""
    even, uneven = (expert_parallel(moe(), ExpertParallel(imbalance=i), 4) for i in (1.0, 1.5))
    assert flops(uneven) == 3 * flops(even) / 2
    to, back = rows_moved(placed("ep=4,imbalance=1.5", 4))[:2]
    assert to.send_bytes[0][0] == ROW_BYTES * 3 // 8
    assert abs(sum(to.send_bytes[0]) - ROW_BYTES) < 4
    assert back.send_bytes == tuple(zip(*to.send_bytes, strict=True))


# What is computed and held.


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_even_routing_keeps_the_work_and_divides_the_experts(ep) -> None:
    """Each rank's rows go to all ranks and as many come: 6 products' FLOPs of 2 x rows x 3 x width x ffn a layer."""
    local = expert_parallel(moe(), ExpertParallel(), ep)
    assert flops(local) == flops(moe()) == 3 * 2 * LAYERS * ROWS * 3 * WIDTH * FFN
    memory = placed(f"ep={ep}", ep).classes[0].memory
    assert memory.parameters_bytes == dense_bytes() + 2 * EXPERT_ELEMS // ep
    assert memory.optimizer_bytes - 2 * memory.parameters_bytes < 4 * len(moe().parameters) + 1


def test_dense_gradients_are_reduced_over_all_replicas_those_of_experts_over_their_copies() -> None:
    reduced = [c for c in collectives(placed("ep=4,bucket_cap=1GiB,first_bucket=1GiB", 8)) if c.op == "all_reduce"]
    found = {c.ranks: c.bytes for c in reduced}
    assert found == {tuple(range(8)): dense_bytes(), (0, 4): 2 * EXPERT_ELEMS // 4}


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_states_of_experts_are_divided_between_their_copies(shard) -> None:
    memory = placed(f"ep=4,shard={shard}", 8).classes[0].memory
    mean = dense_bytes() / 8 + 2 * EXPERT_ELEMS / 4 / 2
    assert memory.optimizer_bytes == pytest.approx(2 * mean, rel=0.01)
    gathers = [c for c in collectives(placed(f"ep=4,shard={shard}", 8)) if c.op == "all_gather"]
    assert sum(c.bytes for c in gathers if c.ranks == (0, 4)) == (2 if shard == "parameters" else 1) * EXPERT_ELEMS // 2


def test_tensor_parallel_experts_gather_after_dispatch_and_scatter_before_combine() -> None:
    """Megatron-Core with sequence parallelism: a rank sends the rows of its tokens, its tensor group gathers what came."""
    events = [c for c in collectives(placed("ep=2,tp=2,sequence=true", 4)) if c.bytes in (ROW_BYTES, ROW_BYTES // 2)]
    kinds = [(c.op, c.bytes, c.ranks) for c in events if c.op != "all_reduce"]
    ways = [
        ("all_to_all", ROW_BYTES // 2, (0, 2)), ("all_gather", ROW_BYTES, (0, 1)),
        ("reduce_scatter", ROW_BYTES, (0, 1)), ("all_to_all", ROW_BYTES // 2, (0, 2)),
    ]  # fmt: skip
    moved = [kind for kind in kinds if kind[0] == "all_to_all" or kind[1] == ROW_BYTES]
    assert moved == ways * 2 * LAYERS


@pytest.mark.parametrize("plan", ["ep=2,tp=2", "ep=2,tp=2,sequence=true", "ep=2,cp=2", "ep=2,pp=2,micro_batches=2"])
def test_experts_go_with_every_other_dimension(plan) -> None:
    """Each rank has half of the experts (of half a layer's width, or of half the layers), or half the tokens."""
    placement = placed(plan, 4)
    held = sum(c.memory.parameters_bytes for c in placement.classes) / len(placement.classes)
    experts = 2 * EXPERT_ELEMS / 2 / (1 if "cp" in plan else 2)
    assert held - experts <= dense_bytes()
    moved = sum(c.bytes for cls in range(len(placement.classes)) for c in rows_moved(placement, cls))
    whole = 4 * LAYERS * ROW_BYTES * load_plan(plan).n_micro  # each as large as the graph's batch
    assert moved == whole / (2 if "cp" in plan or "sequence" in plan else 1)


def test_recomputed_layers_dispatch_again() -> None:
    """Forward twice: six all-to-alls of rows a layer, and the counts twice."""
    placement = place(recomputed(moe(), "full"), load_plan("ep=4,recompute=full"), [RANK] * 4)
    assert len([c for c in rows_moved(placement) if c.bytes == ROW_BYTES]) == 6 * LAYERS


# Ranks and refusals.


def test_expert_groups_are_neighbours_inside_the_replicas() -> None:
    placement = placed("ep=2", 8)
    assert placement.n_replicas == 8
    moved = rows_moved(placement)[0]
    assert moved.ranks == (0, 1)
    assert moved.siblings == ((2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("plan", "n_ranks", "words"),
    [
        ("ep=16", 16, "has 8 experts, allowed a multiple of mesh.ep 16"),
        ("ep=2,imbalance=3.0", 2, "imbalance: found 3.0, allowed at most mesh.ep 2"),
        ("ep=2,shard=parameters,fsdp.ranks=2", 4, "fsdp.ranks: found 2 with mesh.ep 2"),
    ],
)
def test_what_does_not_divide_is_refused(plan, n_ranks, words) -> None:
    with pytest.raises(InfeasiblePlanError, match=words):
        placed(plan, n_ranks)


def test_a_model_without_experts_is_told_what_it_has() -> None:
    dense = trace(
        build(
            load_model(
                {
                    "kind": "transformer", "name": "dense", "architecture": "llama", "batch_size": 2, "vocab_size": 64,
                    "hidden_size": 32, "layers": 1, "heads": 4, "max_positions": 16,
                }
            )
        )
    )  # fmt: skip
    with pytest.raises(InfeasiblePlanError, match=r"expert_parallel.experts \(experts\); the modules of dense end in"):
        place(dense, load_plan("ep=2"), [RANK] * 2)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("imbalance=1.5", "imbalance: found 1.5 without mesh.ep"),
        ("ep=2,imbalance=1.5,capacity_factor=1.25", "imbalance: found 1.5 with capacity_factor 1.25"),
        ("ep=2,imbalance=0.5", "imbalance: found 0.5"),
    ],
)
def test_a_plan_that_says_nothing_sensible_is_refused(plan, words) -> None:
    with pytest.raises(ConfigError, match=words):
        load_plan(plan)
