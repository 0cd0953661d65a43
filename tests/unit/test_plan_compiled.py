"""Compiled code on tensor-parallel ranks: what a rank has is split first and fused then, as torch.compile does it."""

import pytest

import perfmodel

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
