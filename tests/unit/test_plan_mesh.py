"""Meshes, tensor parallelism and pipelines of a small GPT: volumes by the papers' closed forms, bubbles by theirs."""

import re
from collections import Counter
from fractions import Fraction
from functools import cache

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.config.plan import TensorParallel
from perfmodel.errors import ConfigError, InfeasiblePlanError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.kernels import work
from perfmodel.models import build
from perfmodel.plan import RankDevice, place
from perfmodel.plan.mesh import mesh_of
from perfmodel.plan.schedule import most_in_flight, schedule
from perfmodel.plan.stages import cut
from perfmodel.plan.tensor_parallel import tensor_parallel
from perfmodel.sim import COMPUTE, Program, Task
from perfmodel.sim.engine import simulate

BATCH, TOKENS, WIDTH, LAYERS, VOCABULARY = 2, 32, 64, 4, 512
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "gpt2", "batch_size": BATCH, "precision": "bf16",
    "optimizer": "adamw", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "layers": LAYERS, "heads": 4,
    "max_positions": TOKENS, "attention": "eager",
}  # fmt: skip
RANK = RankDevice(device="a100_sxm_40gb", memory_bytes=40 * 2**30)
HIDDEN_BYTES = BATCH * TOKENS * WIDTH * 2


@cache
def gpt(**changes) -> Graph:
    return trace(build(load_model({**MODEL, **changes})))


@cache
def local(tp: int, sequence: bool = False, **changes) -> Graph:
    return tensor_parallel(gpt(**changes), TensorParallel(sequence=sequence), tp)


def communication(graph: Graph, phase: str, module: str = "transformer.h.") -> list:
    return [op for op in graph.ops if "group" in op.attrs and op.phase == phase and op.module.startswith(module)]


# Ranks of a mesh.


def test_the_last_dimension_varies_fastest() -> None:
    mesh = mesh_of({"pp": 2, "tp": 4}, 16)
    assert dict(mesh.sizes) == {"pp": 2, "dp": 2, "tp": 4}
    assert mesh.group(5, "tp") == (4, 5, 6, 7)
    assert mesh.group(5, "dp") == (1, 5)
    assert mesh.group(5, "pp") == (5, 13)
    assert mesh.members("pp", 1) == tuple(range(8, 16))


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"dp": 2, "tp": 2}])
def test_a_mesh_must_fill_the_machine(sizes) -> None:
    with pytest.raises(InfeasiblePlanError, match="ranks, the machine 8"):
        mesh_of(sizes, 8)


# Tensor parallelism. Megatron-LM (arXiv:1909.08053, section 3): per layer two all-reduces of the hidden states in forward
# and two in backward; with sequence parallelism (arXiv:2205.05198, section 4.2.2) each is an all-gather and a reduce-scatter.


def test_megatron_reduces_the_hidden_states_twice_a_layer_each_way() -> None:
    for phase in ("forward", "backward"):
        ops = [op for op in communication(local(4), phase) if op.module != "transformer.h"]
        assert [op.name for op in ops] == ["perfmodel.all_reduce"] * 2 * LAYERS
        assert {op.attrs["bytes"] for op in ops} == {HIDDEN_BYTES}


def test_full_recomputation_adds_the_two_of_forward() -> None:
    ops = communication(local(4, gradient_checkpointing=True, hidden_dropout=0.1), "backward")
    assert len(ops) == 4 * LAYERS
    assert sum(op.recompute for op in ops) == 2 * LAYERS


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    forward = Counter(op.name for op in communication(local(4, sequence=True), "forward"))
    assert forward == {"perfmodel.all_gather": 2 * LAYERS, "perfmodel.reduce_scatter": 2 * LAYERS}
    # In backward the inputs of both column-parallel layers are gathered once more for their weights' gradients.
    backward = Counter(op.name for op in communication(local(4, sequence=True), "backward"))
    assert backward == {"perfmodel.all_gather": 4 * LAYERS, "perfmodel.reduce_scatter": 2 * LAYERS}
    assert {op.attrs["bytes"] for op in communication(local(4, sequence=True), "forward")} == {HIDDEN_BYTES}


def test_the_vocabulary_parallel_loss_reduces_three_numbers_a_token() -> None:
    ops = [op for op in local(4).ops if "group" in op.attrs and op.phase == "loss"]
    assert [op.attrs["bytes"] for op in ops] == [BATCH * TOKENS * 4] * 3


def test_split_parameters_are_a_quarter_and_norms_are_whole() -> None:
    whole = {p.name: p.tensor.n_elems for p in gpt().parameters}
    for parameter in local(4).parameters:
        kept = ".ln" in parameter.name or "wpe" in parameter.name or parameter.name.endswith("c_proj.bias")
        assert parameter.tensor.n_elems * (1 if kept else 4) == whole[parameter.name], parameter.name


def test_matrix_products_do_a_quarter_of_the_work() -> None:
    def flops(graph: Graph) -> int:
        return sum(work(op).flops for op in graph.ops if op.name in ("aten.mm", "aten.addmm", "aten.bmm"))

    assert flops(local(4)) * 4 == pytest.approx(flops(gpt()), rel=0.01)  # biases of row-parallel layers are added apart


def test_optimizer_states_are_split_as_their_parameters() -> None:
    def states(graph: Graph) -> int:
        return sum(s.bytes for s in graph.storages if s.kind == "optimizer_state" and s.bytes > 4)

    assert states(local(4)) == 2 * sum(p.tensor.bytes for p in local(4).parameters)
    assert states(gpt()) == 2 * sum(p.tensor.bytes for p in gpt().parameters)


def test_a_vocabulary_that_does_not_divide_is_padded_as_megatron_pads_it() -> None:
    # 510 words on 4 ranks: --make-vocab-size-divisible-by 128 x 4 gives 512, so 128 a rank.
    graph = local(4, vocab_size=510)
    assert next(p.tensor.shape for p in graph.parameters if "wte" in p.name) == (128, WIDTH)


def test_what_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"transformer.h.0.attn \(forward\): a view .* does not divide"):
        tensor_parallel(gpt(), TensorParallel(), 64)
    with pytest.raises(InfeasiblePlanError, match=r"no module with a weight matches tensor_parallel.row \(nothing\)"):
        tensor_parallel(gpt(), TensorParallel(row=("nothing",)), 2)
    with pytest.raises(InfeasiblePlanError, match=r"aten.addmm in transformer.h.0.mlp.c_proj"):
        tensor_parallel(gpt(), TensorParallel(row=("attn.c_proj",)), 2)


# Pipelines.


def test_stages_have_every_op_once_and_send_hidden_states() -> None:
    stages = cut(gpt(tied_embeddings=False), 4)
    n_products = [sum(op.name in ("aten.mm", "aten.addmm") for op in s.graph.ops) for s in stages]
    assert sum(n_products) == sum(op.name in ("aten.mm", "aten.addmm") for op in gpt(tied_embeddings=False).ops)
    assert [s.forward_bytes for s in stages] == [HIDDEN_BYTES] * 3 + [0]
    assert [s.backward_bytes for s in stages] == [0] + [HIDDEN_BYTES] * 3
    names = [p.name for s in stages for p in s.graph.parameters]
    assert sorted(names) == sorted(p.name for p in gpt(tied_embeddings=False).parameters)


def test_optimizers_update_their_stage_alone() -> None:
    stages = cut(gpt(tied_embeddings=False), 4)
    for stage in stages:
        update = next(op for op in stage.graph.ops if op.name == "aten._foreach_addcdiv_")
        assert {s.storage for s in update.outputs} == {p.tensor.storage for p in stage.graph.parameters}


def test_tied_embeddings_live_on_both_ends_and_their_gradients_are_summed() -> None:
    placement = place(gpt(), load_plan("pp=4,micro_batches=2"), [RANK] * 4)
    tied = [
        [e.collective for e in c.events if e.collective is not None and "tied" in e.collective.purpose]
        for c in placement.classes
    ]
    assert [len(found) for found in tied] == [1, 0, 0, 1]
    assert tied[0][0].bytes == VOCABULARY * WIDTH * 2
    assert tied[0][0].ranks == (0, 3)
    assert tied[0][0].instance == tied[3][0].instance


def test_uneven_stages() -> None:
    stages = cut(gpt(), 2, (1, 3))
    blocks = [{op.module.split(".")[2] for op in s.graph.ops if op.module.startswith("transformer.h.")} for s in stages]
    assert blocks == [{"0"}, {"1", "2", "3"}]
    with pytest.raises(InfeasiblePlanError, match=r"allowed 2 stages with the 4 blocks of transformer\.h"):
        cut(gpt(), 2, (1, 2))
    with pytest.raises(InfeasiblePlanError, match=r"8 stages, but transformer\.h has 4 blocks"):
        cut(gpt(), 8)


def bubble(kind: str, p: int, m: int, chunks: int = 1) -> Fraction:
    """Idle share of a rank's busy time, simulated: a forward takes 1/chunks, a backward 2/chunks, transfers nothing."""
    unit, weight = 12, 12 if kind == "zero_bubble" else 0
    programs = []
    for stage in range(p):
        tasks: list[Task] = []
        for step in schedule(kind, stage, p, m, chunks):
            if step.kind == "weight":
                tasks.append(Task(stream=COMPUTE, duration_ps=weight))
                continue
            virtual, forward = stage + step.chunk * p, step.kind == "forward"
            n = p * chunks

            def group(boundary: int, forward: bool = forward, micro: int = step.micro) -> int:
                return (micro * p * chunks + boundary) * 2 + forward

            deps: tuple[tuple[int, int], ...] = ()
            came = virtual - 1 if forward else virtual
            if 0 <= came < n - 1:
                tasks.append(Task(stream=6 if forward else 8, duration_ps=0, group=group(came)))
                deps = ((len(tasks) - 1, 0),)
            tasks.append(
                Task(stream=COMPUTE, duration_ps=(unit if forward else 2 * unit - weight) // chunks, deps=deps)
            )
            goes = virtual if forward else virtual - 1
            if 0 <= goes < n - 1:
                last = len(tasks) - 1
                tasks.append(Task(stream=5 if forward else 7, duration_ps=0, group=group(goes), deps=((last, 0),)))
        programs.append(Program(tasks=tasks))
    return Fraction(simulate(programs).makespan_ps, 3 * unit * m) - 1


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8), (3, 7), (4, 1)])
def test_bubbles_are_p_less_one_over_m(kind, p, m) -> None:
    assert bubble(kind, p, m) == Fraction(p - 1, m)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (2, 2, 2)])
def test_interleaving_divides_the_bubble_by_the_chunks(p, m, v) -> None:
    # arXiv:2104.04473, section 2.2.2.
    assert bubble("interleaved", p, m, v) == Fraction(p - 1, m * v)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 8), (3, 7), (8, 16)])
def test_zero_bubble_leaves_a_third_of_the_bubble(p, m) -> None:
    # arXiv:2401.10241, table 1: ZB-H1 idles (p - 1)(T_F + T_B - T_W), 1F1B (p - 1)(T_F + T_B + T_W); all alike here.
    assert bubble("zero_bubble", p, m) == Fraction(p - 1, 3 * m)
    assert max(most_in_flight(schedule("zero_bubble", s, p, m)) for s in range(p)) <= p


def test_1f1b_keeps_as_many_micro_batches_as_stages_behind() -> None:
    assert [most_in_flight(schedule("1f1b", s, 4, 8)) for s in range(4)] == [4, 3, 2, 1]
    assert [most_in_flight(schedule("gpipe", s, 4, 8)) for s in range(4)] == [8] * 4


def test_interleaving_needs_whole_groups_of_micro_batches() -> None:
    with pytest.raises(InfeasiblePlanError, match="allowed a multiple of its 4 stages"):
        schedule("interleaved", 0, 4, 6, 2)


# All together.


def test_every_rank_of_a_group_knows_its_collectives() -> None:
    placement = place(gpt(), load_plan("pp=2,tp=2,micro_batches=2"), [RANK] * 8)
    assert [c.ranks for c in placement.classes] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    by_group: dict = {}
    for c in placement.classes:
        for event in c.events:
            if event.collective is not None:
                by_group.setdefault(event.collective.instance, []).append(event.collective)
    for members in by_group.values():
        assert len({m.ranks for m in members}) == 1
        assert len(members) == len({r // 4 for r in members[0].ranks})
    buckets = [m[0] for m in by_group.values() if "bucket" in m[0].purpose]
    assert {b.ranks for b in buckets} == {(0, 2), (4, 6)}


def test_gradients_of_data_parallel_ranks_move_once_in_all() -> None:
    for reduce in ("buckets", "after_backward"):
        plan = load_plan(f"pp=2,tp=2,micro_batches=2,reduce={reduce}")
        placement = place(gpt(), plan, [RANK] * 8)
        for c, stage in zip(placement.classes, cut(local(2), 2), strict=True):
            moved = sum(
                e.collective.bytes
                for e in c.events
                if e.collective is not None and e.collective.purpose.startswith("gradient") and len(e.collective.ranks) == 2
                and "tied" not in e.collective.purpose and "activations" not in e.collective.purpose
            )  # fmt: skip
            assert moved == sum(p.tensor.bytes for p in stage.graph.parameters)


def test_pipelines_hold_less_than_the_whole_model() -> None:
    whole = place(gpt(), load_plan("ddp"), [RANK]).classes[0].memory
    parts = place(gpt(), load_plan("pp=4,micro_batches=4"), [RANK] * 4).classes
    shared = VOCABULARY * WIDTH * 2
    assert sum(c.memory.parameters_bytes for c in parts) == whole.parameters_bytes + shared
    assert sum(c.memory.optimizer_bytes for c in parts) == pytest.approx(whole.optimizer_bytes + 2 * shared, rel=0.01)
    # 1F1B: the first stage keeps four micro-batches, the last one.
    one = place(gpt(), load_plan("pp=4,micro_batches=1"), [RANK] * 4).classes
    assert parts[1].memory.activations_bytes > 2 * one[1].memory.activations_bytes


def test_what_does_not_fit_is_refused_with_the_shortfall() -> None:
    with pytest.raises(InfeasiblePlanError, match="short by"):
        place(gpt(), load_plan("tp=2"), [RankDevice(device="a100_sxm_40gb", memory_bytes=10**5)] * 2)


def test_a_refusal_names_changes_that_fit() -> None:
    needed = {
        plan: place(gpt(), load_plan(plan), [RANK] * 4).classes[0].memory.total_bytes
        for plan in ("ddp", "zero1", "fsdp")
    }
    assert needed["fsdp"] < needed["zero1"] < needed["ddp"]
    tight = RankDevice(device="a100_sxm_40gb", memory_bytes=(needed["zero1"] + needed["ddp"]) // 2)
    with pytest.raises(InfeasiblePlanError, match=r"it would fit with (recompute=\w+, or )?shard=optimizer, or"):
        place(gpt(), load_plan("ddp"), [tight] * 4)
    tighter = RankDevice(device="a100_sxm_40gb", memory_bytes=needed["zero1"] - 1)
    with pytest.raises(InfeasiblePlanError, match="it would fit with") as refused:
        place(gpt(), load_plan("ddp"), [tighter] * 4)
    assert not re.search(r"(with|or) shard=optimizer(,|$)", str(refused.value))  # not alone


# Divided model states. ZeRO (arXiv:1910.02054, section 7): 2 psi for stages 1 and 2, 3 psi for stage 3; FSDP2 keeps what
# is outside the blocks, so it is gathered once.


def moved(plan: str, n: int = 4) -> Counter:
    total: Counter = Counter()
    for event in place(gpt(), load_plan(plan), [RANK] * n).classes[0].events:
        if event.collective is not None and len(event.collective.ranks) == n:
            total[event.collective.op] += event.collective.bytes
    return total


PSI = sum(p.tensor.bytes for p in gpt().parameters)
BLOCKS = sum(p.tensor.bytes for p in gpt().parameters if p.name.startswith("transformer.h."))


@pytest.mark.parametrize("plan", ["zero1", "zero2"])
def test_zero_1_and_2_move_the_parameters_twice(plan) -> None:
    assert moved(plan) == {"reduce_scatter": PSI, "all_gather": PSI}


def test_fsdp_gathers_blocks_twice_and_scatters_gradients_once() -> None:
    assert moved("fsdp") == {"reduce_scatter": PSI, "all_gather": PSI + BLOCKS}


def test_micro_batches_repeat_what_their_stage_needs_for_each() -> None:
    assert moved("zero1,micro_batches=2") == {"reduce_scatter": PSI, "all_gather": PSI}
    assert moved("zero2,micro_batches=2") == {"reduce_scatter": 2 * PSI, "all_gather": PSI}
    assert moved("fsdp,micro_batches=2") == {"reduce_scatter": 2 * PSI, "all_gather": 2 * (PSI + BLOCKS)}


def test_each_stage_of_zero_holds_less() -> None:
    memory = {
        name: place(gpt(), load_plan(name), [RANK] * 4).classes[0].memory for name in ("ddp", "zero1", "zero2", "fsdp")
    }
    assert memory["zero1"].optimizer_bytes == -(-memory["ddp"].optimizer_bytes // 4)
    assert memory["zero1"].gradients_bytes == memory["ddp"].gradients_bytes
    assert memory["zero2"].gradients_bytes == -(-memory["ddp"].gradients_bytes // 4)
    assert memory["zero2"].parameters_bytes == PSI
    assert memory["fsdp"].parameters_bytes == PSI // 4 + PSI - BLOCKS


def test_the_sharded_optimizer_works_on_a_quarter() -> None:
    def elements(plan: str) -> int:
        events = place(gpt(), load_plan(plan), [RANK] * 4).classes[0].events
        ops = [e.op for e in events if e.op is not None and e.op.name == "aten._foreach_addcdiv_"]
        return sum(s.n_elems for op in ops for s in op.outputs)

    assert elements("fsdp") * 4 == elements("ddp")


def test_a_block_is_gathered_before_it_runs_and_while_another_runs_backward() -> None:
    events = place(gpt(), load_plan("fsdp"), [RANK] * 4).classes[0].events
    at = {
        (e.phase, e.collective.purpose): i
        for i, e in enumerate(events)
        if e.collective is not None and e.collective.op == "all_gather"
    }
    first = {
        (e.op.phase, e.op.module.split(".")[2]): i
        for i, e in reversed(list(enumerate(events)))
        if e.op is not None and e.op.module.startswith("transformer.h.")
    }
    for block in range(LAYERS):
        assert at["forward", f"parameters of block {block}"] < first["forward", str(block)]
        assert at["backward", f"parameters of block {block}"] < first["backward", str(min(block + 1, LAYERS - 1))]


def test_pipelines_take_zero_2_where_megatron_core_runs_it() -> None:
    for kind in ("gpipe", "zero_bubble"):
        with pytest.raises(ConfigError, match=f"found gradients with 2 stages and schedule {kind}, allowed with 1f1b"):
            load_plan(f"pp=2,shard=gradients,schedule={kind}")
    with pytest.raises(ConfigError, match="offload: found true with shard gradients and 2 stages"):
        load_plan("pp=2,shard=gradients,offload=true")
    assert place(gpt(), load_plan("pp=2,micro_batches=2,shard=optimizer"), [RANK] * 4).n_replicas == 2


def test_stages_with_divided_parameters_scatter_the_sum_of_micro_batches() -> None:
    placement = place(gpt(), load_plan("pp=2,micro_batches=2,shard=parameters"), [RANK] * 4)
    for c, stage in zip(placement.classes, cut(gpt(), 2), strict=True):
        psi = sum(p.tensor.bytes for p in stage.graph.parameters)
        total: Counter = Counter()
        for event in c.events:
            if event.collective is not None and event.collective.purpose.partition(" of ")[0] in (
                "gradients",
                "parameters",
            ):
                total[event.collective.op] += event.collective.bytes
        blocks = sum(p.tensor.bytes for p in stage.graph.parameters if p.name.startswith("transformer.h."))
        assert total["reduce_scatter"] == psi
        assert total["all_gather"] == 2 * (psi + blocks)


def test_a_pattern_of_the_plans_own_that_finds_nothing_is_refused_with_the_nearest_name() -> None:
    plan = TensorParallel(column=("attn.c_attn", "mlp.c_fd"))
    with pytest.raises(InfeasiblePlanError, match=r"tensor_parallel.column \(mlp.c_fd\).*did you mean"):
        tensor_parallel(gpt(), plan, 2)
