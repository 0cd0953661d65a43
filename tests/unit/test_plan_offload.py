"""States in host memory: copies and host work by closed forms (FSDP2's CPUOffloadPolicy, ZeRO-Offload); what is refused.

torch.distributed.fsdp of torch 2.13: a rank's shard goes to the device before each all-gather (forward, and again in backward
for all but the root), the shard of its gradient to the host after its reduce-scatter, and the host waits before the optimizer.
"""

from functools import cache
from math import ceil

import pytest

from perfmodel.config import load_model, load_plan
from perfmodel.db import load_device
from perfmodel.errors import ConfigError
from perfmodel.extract import trace
from perfmodel.graph import Graph
from perfmodel.kernels import host_cost_s
from perfmodel.models import build
from perfmodel.plan import RankClass, RankDevice, place
from perfmodel.sim.program import COPY, COPY_BACK

RANK = RankDevice(device="a100_sxm_40gb", memory_bytes=40 * 2**30)
N = 4
MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "gpt2", "batch_size": 2, "precision": "bf16",
    "optimizer": "adamw", "vocab_size": 512, "hidden_size": 64, "layers": 2, "heads": 4, "max_positions": 32,
}  # fmt: skip


@cache
def gpt(fused: bool = False) -> Graph:
    optimizer = {"name": "adamw", "implementation": "fused"} if fused else "adamw"
    return trace(build(load_model({**MODEL, "optimizer": optimizer})))


@cache
def placed(plan: str, fused: bool = False) -> RankClass:
    return place(gpt(fused), load_plan(plan), [RANK] * N).classes[0]


def bytes_of(graph: Graph, path: str = "") -> int:
    return sum(p.tensor.bytes for p in graph.parameters if p.name.startswith(path))


def copies(rank: RankClass, way: str, phase: str) -> list[int]:
    found = [e for e in rank.events if e.op is not None and e.op.name == f"perfmodel.{way}_copy" and e.phase == phase]
    assert {e.stream for e in found} <= {"copy" if way == "host_to_device" else "copy_back"}
    return [e.op.outputs[0].bytes for e in found if e.op.attrs.get("pinned") and e.op.outputs[0].n_elems]


def host_seconds(rank: RankClass) -> float:
    updates = [e.op for e in rank.events if e.op is not None and e.op.name == "perfmodel.host_update"]
    return sum(op.attrs["host_bytes"] / op.attrs["host_bytes_per_s"] for op in updates)


def test_fsdp_fetches_a_shard_for_every_gather_and_returns_one_for_every_scatter() -> None:
    rank = placed("fsdp,offload=true")
    whole, blocks = bytes_of(gpt()), bytes_of(gpt(), "transformer.h.")
    assert sum(copies(rank, "host_to_device", "forward")) == pytest.approx(whole / N, rel=1e-3)
    assert sum(copies(rank, "host_to_device", "backward")) == pytest.approx(blocks / N, rel=1e-3)
    assert sum(copies(rank, "device_to_host", "backward")) == pytest.approx(whole / N, rel=1e-3)


def test_a_gather_waits_for_its_copy_and_a_copy_back_for_its_scatter() -> None:
    events = placed("fsdp,offload=true").events
    for number, event in enumerate(events):
        if event.collective is not None and event.collective.op == "all_gather":
            assert events[number - 1].label == "perfmodel.host_to_device_copy"
            assert number - 1 in event.after
        if event.collective is not None and event.collective.op == "reduce_scatter":
            assert events[number + 1].label == "perfmodel.device_to_host_copy"
            assert number in events[number + 1].after


@pytest.mark.parametrize("plan", ["fsdp,offload=true", "zero1,offload=true", "zero2,offload=true"])
def test_the_host_waits_for_all_gradients_and_then_does_the_optimizer_alone(plan) -> None:
    events = placed(plan).events
    waits = [i for i, e in enumerate(events) if e.op is not None and e.op.host_sync]
    optimizer = [i for i, e in enumerate(events) if e.label == "perfmodel.host_update"]
    assert waits
    assert max(waits) < min(optimizer)
    assert not [e for e in events if e.op is not None and e.phase == "optimizer" and e.op.name.startswith("aten._f")]


@pytest.mark.parametrize("fused", [True, False])
def test_the_optimizer_is_the_measured_host_time_of_its_shard(fused) -> None:
    """torch 2.13 on one core of an EPYC Zen 4, 33 M fp32 parameters: 2.60 ns a parameter fused, 23.8 ns foreach."""
    parameters = bytes_of(gpt(fused)) / 2
    bf16 = parameters * (2.6e-9 if fused else 23.8e-9) / 2  # half the bytes of fp32
    assert host_seconds(placed("fsdp,offload=true", fused)) == pytest.approx(bf16 / N, rel=0.08)


def test_host_work_is_time_of_the_host_alone() -> None:
    device = load_device("a100_sxm_40gb")
    update = next(e.op for e in placed("fsdp,offload=true").events if e.label == "perfmodel.host_update")
    plain = host_cost_s(next(op for op in gpt().ops if op.phase == "optimizer"), 0, device)
    assert host_cost_s(update, 0, device) > update.attrs["host_bytes"] / update.attrs["host_bytes_per_s"]
    assert host_cost_s(update, 0, device) < update.attrs["host_bytes"] / update.attrs["host_bytes_per_s"] + plain


def test_zero_offload_moves_a_shard_each_way() -> None:
    for plan in ("zero1,offload=true", "zero2,offload=true"):
        rank = placed(plan)
        assert sum(copies(rank, "device_to_host", "backward")) == ceil(bytes_of(gpt()) / N)
        assert sum(copies(rank, "host_to_device", "optimizer")) == ceil(bytes_of(gpt()) / N)
        gathers = [e for e in rank.events if e.collective is not None and e.collective.op == "all_gather"]
        assert sum(e.collective.bytes for e in gathers) == bytes_of(gpt())


def test_a_later_micro_batch_is_added_on_the_host_while_it_waits() -> None:
    """FSDP2 copies with `non_blocking` only where nothing is accumulated."""
    events = placed("fsdp,offload=true,accumulate=3").events
    backward = [e for e in events if e.op is not None and e.phase == "backward"]
    added = [e for e in backward if e.label == "perfmodel.host_update"]
    assert len(added) == 2 * 3  # two later micro-batches of two blocks and the rest
    assert sum(e.op.attrs["host_bytes"] for e in added) == pytest.approx(2 * 3 * bytes_of(gpt()) / N, rel=1e-3)
    waited = [e for e in backward if e.op.host_sync and e.op.outputs[0].n_elems]
    assert len(waited) == len(added)


def test_the_device_keeps_gathered_units_and_activations() -> None:
    on, off = placed("fsdp,offload=true").memory, placed("fsdp").memory
    rest = bytes_of(gpt()) - bytes_of(gpt(), "transformer.h.")
    assert on.parameters_bytes == rest
    assert (on.gradients_bytes, on.optimizer_bytes) == (0, 0)
    assert on.activations_bytes == off.activations_bytes
    assert on.host_bytes == pytest.approx(4 * bytes_of(gpt()) / N, rel=0.01)  # weights, gradients, two moments
    zero = placed("zero1,offload=true").memory
    assert zero.parameters_bytes == bytes_of(gpt())
    assert zero.optimizer_bytes == 0
    assert zero.host_bytes == pytest.approx(3 * bytes_of(gpt()) / N, rel=0.01)


def test_states_that_every_rank_has_whole_stay() -> None:
    with pytest.raises(ConfigError, match="offload: found true with shard nothing, allowed with optimizer"):
        load_plan("ddp,offload=true")


@pytest.mark.parametrize("plan", ["zero1,offload=true", "tp=2,shard=parameters,offload=true"])
def test_one_replica_has_nothing_to_put_on_the_host(plan) -> None:
    from perfmodel.errors import InfeasiblePlanError

    model = {
        "kind": "transformer", "name": "tiny", "architecture": "gpt2", "batch_size": 1, "precision": "bf16",
        "optimizer": "adamw", "vocab_size": 64, "hidden_size": 32, "layers": 2, "heads": 2, "max_positions": 16,
    }  # fmt: skip
    graph = trace(build(load_model(model)))
    rank = RankDevice(device="a100_sxm_40gb", memory_bytes=40 * 2**30)
    spec = load_plan(plan)
    with pytest.raises(InfeasiblePlanError, match=r"data_parallel\.offload: found true with one replica"):
        place(graph, spec, [rank] * spec.size("tp"))


def test_copies_to_the_host_run_beside_copies_to_the_device() -> None:
    """A GPU has a copy engine for each direction: in backward shards come while gradients go."""
    from perfmodel.api import predict_run

    wide = {**MODEL, "name": "wide", "hidden_size": 2048, "heads": 16, "layers": 6, "batch_size": 1}
    run = predict_run(wide, "dgx_a100", "fsdp,offload=true", bounds=False, check=True)
    timeline = run.steady.timeline
    spans = {
        stream: [
            (start, end)
            for start, end, of in zip(
                timeline.start_ps.tolist(), timeline.end_ps.tolist(), timeline.compiled.stream.tolist(), strict=True
            )
            if of == stream and end > start
        ]
        for stream in (COPY, COPY_BACK)
    }
    assert spans[COPY]
    assert spans[COPY_BACK]
    assert any(a < d and c < b for a, b in spans[COPY] for c, d in spans[COPY_BACK])
    assert run.prediction.breakdown.exposed_copy_s > 0
    sent = sum(end - start for start, end in spans[COPY_BACK])
    device = load_device("a100_sxm_40gb")
    graph_bytes = sum(p.tensor.bytes for p in run.graph.parameters)
    assert sent == pytest.approx(graph_bytes / 8 / device.host_link_bytes_per_s * 1e12, rel=0.5)
