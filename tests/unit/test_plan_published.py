"""Ratios of plans that others measured and published; nothing is fitted to them.

Llama 3.1 8B in pytorch/torchtitan: benchmarks/llama3_h100_202412_torchtitan.md (tables 1 and 3, tokens a second and GPU) and
benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (commit 2887250); docs/accuracy.md, Published figures of plans. Their H100
is slower than the database's, so ratios alone are held to account. A few layers have the ratios of all: the rest repeats them.
"""

from functools import cache

import perfmodel

TOLERANCE = 0.10  # of a ratio
LAYERS = 8
MODEL = {
    "kind": "transformer", "name": "llama3_8b_part", "architecture": "llama", "batch_size": 2, "precision": "bf16",
    "optimizer": {"name": "adamw", "implementation": "fused", "main_parameters": True}, "vocab_size": 128256,
    "hidden_size": 4096, "layers": LAYERS, "heads": 32, "kv_heads": 8, "ffn_size": 14336, "max_positions": 8192,
    "rope_theta": 500000.0,
}  # fmt: skip
FSDP = "recompute=selective,shard=parameters,fsdp.reduce_dtype=fp32"


@cache
def time_s(plan: str, mode: str, nodes: int, batch: int) -> float:
    return predictor(mode, nodes).predict(plan, batch=batch).iteration_time_s


@cache
def predictor(mode: str, nodes: int) -> perfmodel.Predictor:
    return perfmodel.Predictor(MODEL, "dgx_h100", nodes=nodes, mode=mode, check_memory=False)


def near(found: float, published: float) -> bool:
    return abs(found / published - 1) <= TOLERANCE


def test_compiled_fsdp_over_eager() -> None:
    assert near(time_s(FSDP, "eager", 1, 2) / time_s(FSDP, "compile", 1, 2), 6667 / 5762)


def test_fsdp_on_128_gpus_against_8() -> None:
    assert near(time_s(FSDP, "compile", 1, 2) / time_s(FSDP, "compile", 16, 2), 6514 / 6667)


def test_asynchronous_tensor_parallelism_over_blocking() -> None:
    base = f"tp=8,dp=8,sequence=true,{FSDP}"
    assert near(time_s(base, "compile", 8, 12) / time_s(f"{base},async_tp=true", "compile", 8, 12), 4809.4 / 4378)
