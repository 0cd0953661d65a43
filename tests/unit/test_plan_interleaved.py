"""Interleaved 1F1B with groups of a size of its own, and ZB-V: the orders that torch runs, the papers' bubbles and memory.

Dubey et al. 2024 (arXiv:2407.21783, section 3.3.2), Narayanan et al. 2021 (arXiv:2104.04473), Qi et al. 2024
(arXiv:2401.10241, section 6).
"""

from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.models import build
from perfmodel.plan import RankDevice, place
from perfmodel.plan.holding import Holding
from perfmodel.plan.schedule import Step, most_in_flight, schedule
from perfmodel.plan.v_schedule import rank_of, virtual_of

RANK = RankDevice(device="a100_sxm_40gb", memory_bytes=40 * 2**30)
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "llama", "batch_size": 8, "precision": "bf16",
    "optimizer": "adamw", "vocab_size": 512, "hidden_size": 64, "layers": 8, "heads": 4, "max_positions": 32,
}  # fmt: skip
# Ops of which every pass has as many on whatever stage it runs; positions are computed where they are read.
ONCE = ("aten.mm", "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_backward",
        "aten.embedding", "aten.embedding_dense_backward", "aten._log_softmax", "aten.silu", "aten.silu_backward")  # fmt: skip
KINDS = {"FORWARD": "forward", "BACKWARD_INPUT": "backward", "FULL_BACKWARD": "backward", "BACKWARD_WEIGHT": "weight"}


def torch_order(name: str, rank: int, p: int, m: int, v: int) -> list[tuple[str, int, int]]:
    """(kind, micro-batch, virtual stage) of a rank in torch.distributed.pipelining."""
    from torch.distributed.pipelining import schedules

    rounds = max(1, m // p)
    state = SimpleNamespace(
        pp_group_size=p, _n_microbatches=m, num_stages=p * v, n_local_stages=v, rank=rank, number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
    )  # fmt: skip
    actions = getattr(schedules, name)._calculate_single_rank_operations(state, rank)
    return [(KINDS[a.computation_type.name], a.microbatch_index, a.stage_index) for a in actions if a is not None]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 7, 8, 16, 20])
def test_zb_v_runs_in_the_order_of_torch(p, m) -> None:
    for rank in range(p):
        steps = schedule("zero_bubble_v", rank, p, m)
        mine = [(step.kind, step.micro, virtual_of(rank, step.chunk, p)) for step in steps]
        assert mine == torch_order("ScheduleZBVZeroBubble", rank, p, m, 2)


@pytest.mark.parametrize(("p", "m"), [(4, 2), (4, 4), (4, 10), (4, 20), (2, 6), (3, 8), (8, 16)])
@pytest.mark.parametrize("v", [2, 3])
def test_groups_run_in_the_order_of_torch(p, m, v) -> None:
    """Torch derives the size: as many micro-batches as fit a whole number of rounds of at least the stages."""
    group = m // max(1, m // p)
    for rank in range(p):
        steps = schedule("interleaved", rank, p, m, v, group)
        mine = [(step.kind, step.micro, rank + step.chunk * p) for step in steps]
        assert mine == torch_order("ScheduleInterleaved1F1B", rank, p, m, v)


def idle(steps: list[list[Step]], where, n_virtual: int, cost: dict[str, int]) -> list[int]:
    """What each rank idles from its first pass to its last; `where(rank, chunk)` gives a virtual stage. Transfers are free."""
    left = [list(own) for own in steps]
    done: dict[tuple[str, int, int], int] = {}
    clock, first, busy = ([0] * len(left), [-1] * len(left), [0] * len(left))
    while any(left):
        moved = False
        for r, own in enumerate(left):
            while own:
                step = own[0]
                virtual = where(r, step.chunk)
                needs = {
                    "forward": [("forward", virtual - 1)] if virtual else [],
                    "backward": [("backward", virtual + 1)] if virtual + 1 < n_virtual else [("forward", virtual)],
                    "weight": [("backward", virtual)],
                }[step.kind]
                if any((kind, at, step.micro) not in done for kind, at in needs):
                    break
                start = max([clock[r], *(done[kind, at, step.micro] for kind, at in needs)])
                first[r] = start if first[r] < 0 else first[r]
                clock[r] = done[step.kind, virtual, step.micro] = start + cost[step.kind]
                busy[r] += cost[step.kind]
                own.pop(0)
                moved = True
        assert moved, "ranks wait for each other"
    return [clock[r] - first[r] - busy[r] for r in range(len(left))]


def idle_v(p: int, m: int, cost: dict[str, int]) -> list[int]:
    return idle(
        [list(schedule("zero_bubble_v", r, p, m)) for r in range(p)], lambda r, c: virtual_of(r, c, p), 2 * p, cost
    )


@pytest.mark.parametrize(("p", "m"), [(2, 3), (2, 8), (4, 7), (4, 12), (8, 15), (8, 32)])
def test_zb_v_has_no_bubble_where_all_parts_take_as_long(p, m) -> None:
    """From 2 p - 1 micro-batches on (section 6: zero bubble with T_F = T_B = T_W)."""
    assert idle_v(p, m, {"forward": 1, "backward": 1, "weight": 1}) == [0] * p


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zb_v_has_a_bubble_where_they_do_not_and_few_micro_batches_leave_one(p) -> None:
    assert max(idle_v(p, 4 * p, {"forward": 3, "backward": 5, "weight": 2})) > 0
    assert max(idle_v(p, p, {"forward": 1, "backward": 1, "weight": 1})) > 0


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zb_v_holds_what_1f1b_does_on_its_first_stage_on_every_rank(p) -> None:
    """p micro-batches of a stage, each half a stage here: 2 p chunks (section 6)."""
    for rank in range(p):
        steps = schedule("zero_bubble_v", rank, p, 4 * p)
        assert Holding(steps=steps, kept_bytes=(1, 1), above_bytes=(0, 0)).peak_bytes() == 2 * p
    assert most_in_flight(schedule("1f1b", 0, p, 4 * p)) == p


def test_the_v_has_the_first_and_the_last_part_on_the_first_rank() -> None:
    assert [rank_of(virtual, 4) for virtual in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert all(rank_of(virtual_of(r, c, 4), 4) == r for r in range(4) for c in range(2))


@pytest.mark.parametrize(
    ("p", "m", "v", "group"), [(4, 8, 2, 4), (4, 8, 2, 8), (4, 12, 3, 6), (4, 9, 2, 5), (2, 6, 4, 3)]
)
def test_the_bubble_is_that_of_interleaving_whatever_the_group(p, m, v, group) -> None:
    """(p - 1) / (m v) of the work (arXiv:2104.04473, section 2.2.2); a bubble of (p - 1) forwards and backwards of a chunk."""
    steps = [list(schedule("interleaved", r, p, m, v, group)) for r in range(p)]
    found = idle(steps, lambda r, c: r + c * p, p * v, {"forward": 1, "backward": 2})
    assert found[0] == 3 * (p - 1)  # the first rank begins first and ends last
    assert found[-1] <= found[0]


@pytest.mark.parametrize(("p", "m", "v", "group"), [(4, 16, 2, 4), (4, 16, 2, 8), (4, 15, 3, 5), (8, 32, 2, 8)])
def test_micro_batches_in_flight_grow_with_the_group(p, m, v, group) -> None:
    """(v - 1) N + 2 (p - r - 1) forwards before the first backward and one more."""
    for rank in range(p):
        steps = schedule("interleaved", rank, p, m, v, group)
        held = Holding(steps=steps, kept_bytes=(1,) * v, above_bytes=(0,) * v).peak_bytes()
        assert held == min((v - 1) * group + 2 * (p - rank - 1) + 1, m * v)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (3, r"pipeline.group_size: found 3 with 4 stages and 8 micro-batches, allowed 4 to 8"),
        (9, r"pipeline.group_size: found 9 .* allowed 4 to 8"),
        (6, r"last group of none or of 4 or more, not of 2"),
    ],
)
def test_groups_that_would_stop_are_refused(group, says) -> None:
    with pytest.raises(InfeasiblePlanError, match=says):
        schedule("interleaved", 0, 4, 8, 2, group)


def test_a_group_smaller_than_the_stages_would_stop() -> None:
    """What is refused above, tried: with three chunks ranks wait for each other."""
    refused = [list(_ungrouped(r, 6, 12, 3, 3)) for r in range(6)]
    with pytest.raises(AssertionError, match="wait for each other"):
        idle(refused, lambda r, c: r + c * 6, 18, {"forward": 1, "backward": 2})


def _ungrouped(rank: int, p: int, m: int, v: int, group: int) -> list[Step]:
    order = [(i, c) for first in range(0, m, group) for c in range(v) for i in range(first, first + group)]
    warm = min((v - 1) * group + 2 * (p - rank - 1), m * v)
    forwards = [Step("forward", i, c) for i, c in order]
    backwards = [Step("backward", i, v - 1 - c) for i, c in order]
    steady = [step for pair in zip(forwards[warm:], backwards, strict=False) for step in pair]
    return [*forwards[:warm], *steady, *backwards[m * v - warm :]]


# Placed.


@cache
def llama() -> Graph:
    return trace(build(load_model(MODEL)))


def work(plan: str, n_ranks: int) -> tuple[Counter, Counter]:
    """Ops, and bytes moved by collective, of all rank classes together."""
    ops: Counter = Counter()
    moved: Counter = Counter()
    for rank_class in place(llama(), load_plan(plan), [RANK] * n_ranks).classes:
        for event in rank_class.events:
            if event.op is not None and event.op.name in ONCE:
                ops[event.op.name, event.op.module] += 1
            elif event.collective is not None:
                moved[event.collective.op] += event.collective.bytes
    return ops, moved


@pytest.mark.parametrize("shard", ["nothing", "optimizer", "parameters"])
def test_zb_v_runs_every_op_that_1f1b_does(shard) -> None:
    one = work(f"pp=4,dp=2,micro_batches=8,shard={shard}", 8)
    v = work(f"pp=4,dp=2,micro_batches=8,shard={shard},schedule=zero_bubble_v", 8)
    assert v[0] == one[0]
    # Seven cuts instead of three, of which the one at the turn is on one rank; both sides count what is sent.
    assert v[1]["send_recv"] == one[1]["send_recv"] * 6 // 3


def test_both_ends_of_a_transfer_in_a_v_have_it_in_the_same_order() -> None:
    placement = place(llama(), load_plan("pp=4,micro_batches=8,schedule=zero_bubble_v"), [RANK] * 4)
    orders: dict[tuple[int, str], list[int]] = {}
    for number, rank_class in enumerate(placement.classes):
        for event in rank_class.events:
            if event.collective is not None:
                orders.setdefault((number, event.stream), []).append(event.collective.instance)
    for rank in range(3):
        assert orders[rank, "send_next"] == orders[rank + 1, "recv_prev"]
        assert orders[rank + 1, "send_prev"] == orders[rank, "recv_next"]


def test_a_tied_head_in_a_v_is_refused() -> None:
    tied = trace(build(load_model({**MODEL, "architecture": "gpt2"})))
    with pytest.raises(
        InfeasiblePlanError, match=r"found zero_bubble_v with .*wte.weight .* allowed with a head of its own"
    ):
        place(tied, load_plan("pp=2,micro_batches=4,schedule=zero_bubble_v"), [RANK] * 2)


def test_the_first_and_the_last_run_may_have_no_block() -> None:
    """The embedding alone, the head and the loss alone, as Llama 3 405B was cut: nothing is lost or run twice."""
    blocks = {"blocks": [0, 1, 1, 2, 2, 1, 1, 0], "schedule": "interleaved", "chunks": 2}
    plan = load_plan({"mesh": {"pp": 4}, "micro_batches": 8, "pipeline": blocks})
    ops = Counter()
    for rank_class in place(llama(), plan, [RANK] * 4).classes:
        ops += Counter((e.op.name, e.op.module) for e in rank_class.events if e.op is not None and e.op.name in ONCE)
    assert ops == work("pp=4,micro_batches=8", 4)[0]
    first = place(llama(), plan, [RANK] * 4).classes[0].events
    mm = [e.op.module for e in first if e.op is not None and e.op.name == "aten.mm"]
    assert {module.split(".")[2] for module in mm} == {"4", "5"}


def test_an_empty_run_inside_is_refused() -> None:
    with pytest.raises(ConfigError, match="blocks: found 0 between the first and the last"):
        load_plan({"mesh": {"pp": 4}, "pipeline": {"blocks": [4, 0, 2, 2]}})


# What stages keep.


def memory(plan: str, n_ranks: int = 4):
    return [c.memory for c in place(llama(), load_plan(plan), [RANK] * n_ranks).classes]


def test_torch_receives_into_buffers_of_all_micro_batches_and_keeps_what_it_returns() -> None:
    """What crosses a cut is (samples, tokens, width) in bf16, 8 x 32 x 64 x 2 bytes: input and gradient of each of 8."""
    plan = load_plan("pp=4,micro_batches=8,pipeline.deallocate_outputs=false")
    holdings = [c.holding for c in place(llama(), plan, [RANK] * 4).classes]
    crossing = 8 * 32 * 64 * 2
    assert [h.always_bytes for h in holdings] == [8 * n * crossing for n in (1, 2, 2, 1)]
    logits = holdings[3].outputs_bytes[0]
    assert [h.outputs_bytes[0] for h in holdings] == [0, 0, 0, logits]
    assert logits >= 8 * 32 * MODEL["vocab_size"] * 2
    assert holdings[3].joined_bytes == 8 * logits
    freed = memory("pp=4,micro_batches=8")
    assert all(more.total_bytes > less.total_bytes for more, less in zip(memory_of(plan), freed, strict=True))


def memory_of(plan):
    return [c.memory for c in place(llama(), plan, [RANK] * 4).classes]


def test_what_is_always_held_and_what_stays_is_in_the_peak_and_in_the_curve() -> None:
    steps = schedule("1f1b", 1, 2, 3)  # the last of two stages: forward and backward in turns
    above = tuple(5 if step.kind == "forward" else 9 for step in steps)
    holding = Holding(
        steps=steps, kept_bytes=(100,), above_bytes=(0,), above_by_step=above, always_bytes=1000, outputs_bytes=(10,)
    )
    assert holding.peak() == (1000 + 3 * 10 + 100 + 9, 0)  # in the last backward
    by_step = [sum(size for size, begin, end in holding.lifetimes() if begin <= n <= end) for n in range(len(steps))]
    assert by_step == [1115, 1119, 1125, 1129, 1135, 1139]
    joined = Holding(**{name: getattr(holding, name) for name in holding.__slots__} | {"joined_bytes": 200})
    assert joined.peak() == (1000 + 3 * 10 + 200, 0)  # after the last step


def test_gradients_of_fully_sharded_chunks_are_whole_only_while_they_are_summed() -> None:
    steps = schedule("interleaved", 0, 2, 2, 2)  # all forwards, then a chunk's backwards after the other's
    holding = Holding(steps=steps, kept_bytes=(10, 10), above_bytes=(1, 1), summed_bytes=(7, 5))
    assert holding.peak() == (4 * 10 + 1, 5)
    assert sorted(x for x in holding.lifetimes() if x[0] in (5, 7)) == [(5, 4, 5), (7, 6, 7)]
    late = Holding(steps=steps, kept_bytes=(1, 1), above_bytes=(1, 1), summed_bytes=(100, 5))
    assert late.peak() == (3, 100)


def test_sums_in_fp32_take_twice_the_memory_and_move_twice_the_bytes() -> None:
    base = "pp=2,dp=4,micro_batches=4,shard=parameters,reshard_after_forward=false"
    own, wide = (
        place(llama(), load_plan(f"{base},fsdp.reduce_dtype={dtype}"), [RANK] * 8).classes[0]
        for dtype in ("own", "fp32")
    )

    def scattered(events) -> int:
        return sum(
            e.collective.bytes for e in events if e.collective is not None and e.collective.op == "reduce_scatter"
        )

    def sums(events) -> Counter:
        found = [e.op for e in events if e.op is not None and e.op.name in ("aten.add_", "aten._to_copy")]
        return Counter(
            (op.name, op.outputs[0].dtype) for op in found if op.phase == "backward" and op.outputs[0].n_elems > 1
        )

    assert scattered(wide.events) == 2 * scattered(own.events)
    n = len([p for p in llama().parameters if p.name.split(".")[1:3] in (["layers", str(b)] for b in range(4))]) + 1
    narrow, broad = sums(own.events), sums(wide.events)
    assert broad["aten.add_", "float32"] - narrow["aten.add_", "float32"] == 3 * n
    assert narrow["aten.add_", "bfloat16"] - broad["aten.add_", "bfloat16"] == 3 * n
    assert broad["aten._to_copy", "float32"] - narrow["aten._to_copy", "float32"] == n
    assert wide.memory.gradients_bytes > own.memory.gradients_bytes
