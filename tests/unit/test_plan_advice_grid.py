"""Advice on plans that do not fit against brute force, which places every combination and asks what it needs."""

from functools import cache

import pytest

from perfmodel.config import PlanSpec, load_model, load_plan
from perfmodel.errors import InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.models import build
from perfmodel.plan import RankDevice, place
from perfmodel.plan.advice import N_CHANGES
from perfmodel.plan.changes import Changed, changed_plans
from perfmodel.plan.facts import facts_of
from perfmodel.plan.least import least_of
from perfmodel.plan.recompute import recomputed

N_RANKS, BATCH = 4, 2
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "llama", "precision": "bf16", "optimizer": "adamw",
    "vocab_size": 96, "hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_size": 64, "max_positions": 64,
    "attention": "sdpa",
}  # fmt: skip
PLANS = ("ddp", "zero1", "fsdp", "tp=2", "pp=2,micro_batches=1", "ddp,recompute=selective")
UNLIMITED_BYTES = 2**50


@cache
def graph(batch: int) -> Graph:
    return trace(build(load_model({**MODEL, "batch_size": batch})))


def executed(plan: PlanSpec, parts: int) -> Graph:
    return recomputed(graph(BATCH // parts), plan.recompute)


def source(plan: PlanSpec) -> Graph:
    """The graph that a plan spreads, with what a predictor tells of it."""
    found = executed(plan, 1)
    facts_of(found).executed, facts_of(found).smaller = executed, lambda parts: graph(BATCH // parts)
    return found


KNOWN: dict[tuple[str, int, int], int | None] = {}


def needed(plan: PlanSpec, parts: int, n_ranks: int) -> int | None:
    """What the fullest rank of a plan needs (bytes); None if the model does not divide so."""
    key = (plan.model_dump_json(exclude={"name"}), parts, n_ranks)
    if key not in KNOWN:
        rank = RankDevice(device="h100_sxm", memory_bytes=UNLIMITED_BYTES)
        try:
            placement = place(executed(plan, parts), plan, [rank] * n_ranks)
            KNOWN[key] = max(rank_class.memory.total_bytes for rank_class in placement.classes)
        except InfeasiblePlanError:
            KNOWN[key] = None
    return KNOWN[key]


def need(changed: Changed, plan: PlanSpec) -> int | None:
    return needed(changed.plan, changed.plan.n_micro // plan.n_micro, changed.n_ranks)


def brute_force(plan: PlanSpec, room_bytes: int) -> list[Changed]:
    found: list[Changed] = []
    for changed in changed_plans(plan, N_RANKS, BATCH):
        if len(found) < N_CHANGES and not any(changed.holds(other.levels) for other in found):
            size = need(changed, plan)
            if size is not None and size <= room_bytes:
                found.append(changed)
    return found


@pytest.mark.parametrize("share", [0.97, 0.8, 0.62, 0.5])
@pytest.mark.parametrize("name", PLANS)
def test_what_is_named_is_what_brute_force_finds(name, share) -> None:
    plan = load_plan(name)
    whole = needed(plan, 1, N_RANKS)
    room_bytes = int(share * whole)
    expected = [changed.words for changed in brute_force(plan, room_bytes)]
    tight = RankDevice(device="h100_sxm", memory_bytes=room_bytes)
    with pytest.raises(InfeasiblePlanError, match="short by") as refused:
        place(source(plan), plan, [tight] * N_RANKS)
    assert expected
    named = str(refused.value).partition("it would fit with ")[2].partition(";")[0].split(", or ")
    assert named == expected
    assert ("no other does" in str(refused.value)) == (len(expected) < N_CHANGES)


@pytest.mark.parametrize("name", PLANS)
def test_nothing_that_fits_is_ruled_out_without_a_try(name) -> None:
    """What a plan needs at least is never more than what it needs."""
    plan = load_plan(name)
    least = least_of(source(plan), lambda changed: executed(changed, 1))
    compared = 0
    for changed in changed_plans(plan, N_RANKS, BATCH):
        size = need(changed, plan) if changed.n_ranks == N_RANKS and len(changed.levels) < 3 else None
        if size is not None:
            compared += 1
            assert least.bytes(changed.plan, N_RANKS, changed.plan.n_micro // plan.n_micro) <= size, changed.words
    assert compared > 20
