"""Zero-bubble schedules by the paper's formulas, and pipelines with fully sharded stages, uneven ones and tied embeddings.

Qi et al. 2024 (arXiv:2401.10241), table 1: a stage idles (p - 1)(T_F + T_B - T_W) with ZB-H1, (p - 1)(T_F + T_B - 2 T_W) with
ZB-H2, and keeps p and 2 p - 1 micro-batches.
"""

from collections import Counter
from functools import cache

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.models import build
from perfmodel.plan import RankDevice, place
from perfmodel.plan.schedule import most_in_flight, schedule

RANK = RankDevice(device="a100_sxm_40gb", memory_bytes=40 * 2**30)
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "gpt2", "batch_size": 2, "precision": "bf16",
    "optimizer": "adamw", "vocab_size": 512, "hidden_size": 64, "layers": 4, "heads": 4, "max_positions": 32,
}  # fmt: skip


@cache
def gpt() -> Graph:
    return trace(build(load_model(MODEL)))


@cache
def placed(plan: str, n_ranks: int):
    return place(gpt(), load_plan(plan), [RANK] * n_ranks)


def idle(kind: str, p: int, m: int, times: tuple[int, int, int]) -> list[int]:
    """What each stage idles from its first pass to its last; `times` are of a forward and the two parts of a backward.

    A pass starts when its stage is free and what it needs from a neighbour is there; transfers take no time.
    """
    cost = dict(zip(("forward", "backward", "weight"), times, strict=True))
    steps = [list(schedule(kind, s, p, m)) for s in range(p)]
    done: dict[tuple[str, int, int], int] = {}
    clock, first, busy = [0] * p, [-1] * p, [0] * p
    while any(steps):
        for s in range(p):
            while steps[s]:
                step = steps[s][0]
                needs = {"forward": ("forward", s - 1), "backward": ("backward", s + 1)}.get(step.kind)
                key = None if needs is None or not 0 <= needs[1] < p else (*needs, step.micro)
                if key is not None and key not in done:
                    break
                start = max(clock[s], done.get(key, 0) if key else 0)
                first[s] = start if first[s] < 0 else first[s]
                clock[s] = done[step.kind, s, step.micro] = start + cost[step.kind]
                busy[s] += cost[step.kind]
                steps[s].pop(0)
    return [clock[s] - first[s] - busy[s] for s in range(p)]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 16)])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 3, 2)])
def test_the_bubbles_of_the_paper(p, m, times) -> None:
    forward, backward, weight = times
    assert max(idle("zero_bubble", p, m, times)) == (p - 1) * (forward + backward - weight)
    one_f_one_b = max(idle("1f1b", p, m, (forward, backward + weight, 0)))
    assert one_f_one_b == (p - 1) * (forward + backward + weight)
    assert max(idle("zero_bubble_h2", p, m, times)) <= (p - 1) * (forward + backward - weight)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_h2_has_no_bubble_where_all_parts_take_as_long(p, m) -> None:
    """From 2 p - 1 micro-batches on (section 2.3)."""
    assert idle("zero_bubble_h2", p, m, (1, 1, 1)) == [0] * p


@pytest.mark.parametrize("p", [2, 4, 8])
def test_micro_batches_in_flight(p) -> None:
    for stage in range(p):
        assert most_in_flight(schedule("zero_bubble", stage, p, 3 * p)) == p
        assert most_in_flight(schedule("zero_bubble_h2", stage, p, 3 * p)) == 2 * p - 1


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zero_bubble", "zero_bubble_h2"])
@pytest.mark.parametrize("m", [1, 2, 3, 9])
def test_every_pass_runs_once_and_parts_in_order(kind, m) -> None:
    for stage in range(4):
        steps = schedule(kind, stage, 4, m)
        kinds = ("forward", "backward", "weight") if "zero" in kind else ("forward", "backward")
        assert Counter((s.kind, s.micro) for s in steps) == Counter((k, i) for k in kinds for i in range(m))
        for i in range(m):
            places = [next(n for n, s in enumerate(steps) if (s.kind, s.micro) == (k, i)) for k in kinds]
            assert places == sorted(places)


def test_h2_runs_what_1f1b_does() -> None:
    def summary(kind: str, stage: int) -> tuple[Counter, Counter]:
        events = placed(f"pp=2,micro_batches=4,schedule={kind}", 4).classes[stage].events
        ops = Counter((e.op.name, e.op.module) for e in events if e.op is not None)
        return ops, Counter((e.collective.op, e.collective.bytes) for e in events if e.collective is not None)

    for stage in (0, 1):
        assert summary("zero_bubble_h2", stage) == summary("1f1b", stage)


def gathers(plan: str, n_ranks: int) -> list[int]:
    """All-gathers of parameters by stage."""
    return [
        sum(e.collective is not None and e.collective.op == "all_gather" for e in c.events)
        for c in placed(plan, n_ranks).classes
    ]


def test_stages_that_are_not_freed_gather_once_a_step() -> None:
    """Llama 3 (arXiv:2407.21783, section 3.3.2): with a pipeline parameters stay after forward, gradients are sharded."""
    base = "pp=2,micro_batches=4,shard=parameters"
    units = 3  # two blocks and the rest on each stage
    assert gathers(f"{base},reshard_after_forward=false", 4) == [units] * 2
    assert gathers(base, 4) == [4 * (units + units - 1)] * 2  # each micro-batch: forward all, backward the blocks
    scatters = [
        sum(e.collective.bytes for e in c.events if e.collective is not None and e.collective.op == "reduce_scatter")
        for c in placed(f"{base},reshard_after_forward=false", 4).classes
    ]
    held = [
        sum(p.tensor.bytes for p in gpt().parameters if f".h.{b}." in p.name or f".h.{b + 1}." in p.name)
        for b in (0, 2)
    ]
    assert all(s >= h for s, h in zip(scatters, held, strict=True))


def test_uneven_stages_hold_what_they_are_given_and_tied_weights_are_summed_between_their_stages() -> None:
    plan = {"mesh": {"pp": 2}, "micro_batches": 4, "pipeline": {"blocks": [3, 1], "schedule": "zero_bubble"}}
    placement = place(gpt(), load_plan(plan), [RANK] * 2)
    blocks = [
        {e.op.module.split(".")[2] for e in c.events if e.op is not None and e.op.module.startswith("transformer.h.")}
        for c in placement.classes
    ]
    assert blocks == [{"0", "1", "2"}, {"3"}]
    tied = [
        e.collective
        for c in placement.classes
        for e in c.events
        if e.collective is not None and "tied" in e.collective.purpose
    ]
    assert {(c.op, c.ranks, c.bytes) for c in tied} == {("all_reduce", (0, 1), 512 * 64 * 2)}
    assert len(tied) == 2
