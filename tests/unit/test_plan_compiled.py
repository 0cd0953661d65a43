"""Compiled code on tensor-parallel ranks: what a rank has is split first and fused then, as torch.compile does it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import perfmodel
from perfmodel.api import Predictor

MODEL = {
    "kind": "transformer", "name": "tiny", "architecture": "llama", "batch_size": 2, "precision": "bf16", "optimizer": "adamw",
    "vocab_size": 32000, "hidden_size": 1024, "layers": 2, "heads": 16, "kv_heads": 8, "ffn_size": 4096, "max_positions": 1024,
}  # fmt: skip


@pytest.mark.parametrize("plan", ["tp=4", "tp=4,sequence=true", "tp=4,recompute=full"])
def test_tensor_parallel_ranks_run_compiled_code(plan) -> None:
    """The same products and collectives as in eager mode, in fewer kernels and less time."""
    eager, compiled = (perfmodel.predict_run(MODEL, "dgx_h100", plan, mode=mode) for mode in ("eager", "compile"))

    def summary(run) -> tuple[list[tuple[int, ...]], list[tuple[str, int]], int]:
        events = run.placement.classes[0].events
        products = sorted(e.op.outputs[0].shape for e in events if e.op is not None and e.op.name == "aten.mm")
        moved = sorted((e.collective.op, e.collective.bytes) for e in events if e.collective is not None)
        return products, moved, sum(e.op is not None for e in events)

    one, other = summary(eager), summary(compiled)
    assert other[:2] == one[:2]
    assert other[2] < 0.8 * one[2]
    assert any(
        e.op is not None and e.op.name == "perfmodel.fused_pointwise" for e in compiled.placement.classes[0].events
    )
    assert compiled.prediction.iteration_time_s < eager.prediction.iteration_time_s


@pytest.mark.parametrize(
    "plan", ["pp=2,micro_batches=2", "pp=2,tp=2,micro_batches=2", "pp=2,cp=2,micro_batches=2", "pp=2,recompute=full"]
)
def test_no_fused_kernel_goes_over_a_cut(plan) -> None:
    """What a stage reads and has not made is what it is sent, and no more; it makes all that the next one reads."""
    deep = {**MODEL, "layers": 4}
    eager, compiled = (perfmodel.predict_run(deep, "dgx_h100", plan, mode=mode) for mode in ("eager", "compile"))
    for one, other in zip(eager.placement.classes, compiled.placement.classes, strict=True):
        assert _moved(one.events) == _moved(other.events)
        assert _products(one.events) == _products(other.events)
        assert _not_made(one.events) == _not_made(other.events)
        assert any(e.op is not None and e.op.name == "perfmodel.fused_pointwise" for e in other.events)
        # Blocks are of one module each: a chain over the cut would mix those of two stages.
        assert _blocks(one.events) == _blocks(other.events)
        assert sum(e.op is not None for e in other.events) < 0.9 * sum(e.op is not None for e in one.events)


def _moved(events) -> list[tuple[str, int]]:
    return sorted((e.collective.op, e.collective.bytes) for e in events if e.collective is not None)


def _products(events) -> list[tuple[int, ...]]:
    return sorted(e.op.outputs[0].shape for e in events if e.op is not None and e.op.name == "aten.mm")


def _blocks(events) -> set[str]:
    modules = (e.op.module.split(".") for e in events if e.op is not None)
    return {parts[2] for parts in modules if parts[:2] == ["model", "layers"]}


def _not_made(events) -> set[tuple[int, ...]]:
    """Shapes of the activations that passes read and that nothing of this stage has written."""
    ops = [e.op for e in events if e.op is not None and e.op.phase != "optimizer" and e.op.id >= 0]
    made = {spec.storage for op in ops for spec in op.outputs}
    weights = {spec.storage for e in events if e.op is not None and e.op.phase == "optimizer" for spec in e.op.inputs}
    read = {spec.storage: spec for op in ops for spec in op.inputs}
    return {spec.shape for storage, spec in read.items() if storage not in made | weights and spec.n_elems > 4096}


def test_compiled_ranks_of_a_ring_have_their_part_of_the_tokens() -> None:
    """Chains are fused after the split: two ranks each run half of the pointwise work, as in eager mode."""
    eager, compiled = (perfmodel.predict(MODEL, "dgx_h100", "cp=2", mode=mode) for mode in ("eager", "compile"))
    whole = perfmodel.predict(MODEL, "dgx_h100", "dp=8", mode="compile")
    assert compiled.iteration_time_s < eager.iteration_time_s
    assert (
        compiled.breakdown.compute_s < 0.9 * whole.breakdown.compute_s
    )  # 1.2 times as much where chains are not split


ELSEWHERE = """
import json, sys
sys.path.insert(0, {room!r})
from test_plan_compiled import digests
print(json.dumps(digests({model!r}, {plans!r}, -1)))
"""


def digests(model, plans, step: int) -> list[list[str]]:
    """(mode, plan, hash of the prediction), asked in order or, with a step of -1, the other way round."""
    found = []
    for mode, names in plans:
        predictor = Predictor(model, "dgx_a100", mode=mode)
        for plan in names[::step]:
            text = predictor.predict(plan).to_json()
            found.append([mode, plan, hashlib.sha256(text.encode()).hexdigest()])
    return sorted(found)


GRID = (
    "fsdp,accumulate=2", "cp=2,pp=2,micro_batches=2", "tp=2,sequence=true", "pp=2,micro_batches=2,shard=gradients",
    "pp=2,tp=2,recompute=full", "zero1,offload=true",
)  # fmt: skip


@pytest.mark.parametrize(
    "plans",
    [
        pytest.param((("compile", (GRID[0], GRID[4])),), id="some"),
        pytest.param((("compile", GRID), ("eager", GRID)), id="all", marks=pytest.mark.slow),
    ],
)
def test_predictions_are_the_same_bytes_in_every_process_and_order(plans) -> None:
    """This process, and one with a hash seed of its own that asks in the other order."""
    small = {**MODEL, "hidden_size": 256, "heads": 4, "kv_heads": 4, "ffn_size": 512, "vocab_size": 512}
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    script = ELSEWHERE.format(room=str(Path(__file__).parent), model=small, plans=plans)
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    here = digests(small, plans, 1)
    assert len(here) == sum(len(names) for _, names in plans)
    assert json.loads(done.stdout) == here
