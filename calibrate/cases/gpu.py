"""What a plan becomes on a GPU: half of its cases in bf16, and the flash attention that CUDA has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from calibrate.cases.case import Case, TensorArg

BOTH_TYPES = frozenset({"gemm", "elementwise", "norm", "softmax", "conv"})
_CPU_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


def on_gpu(case: Case) -> Case | None:
    """The case as a GPU runs it; None for an operator that only a CPU has."""
    if case.op == _CPU_FLASH:
        query, key, value, dropout, causal = (_half(part) for part in case.args)
        op = "aten._scaled_dot_product_flash_attention"
        return replace(case, op=op, args=(query, key, value, dropout, causal, False))
    if case.op.startswith(_CPU_FLASH):
        return None
    if case.family in BOTH_TYPES and int(case.key[0], 16) % 2:
        return replace(case, args=tuple(_half(part) for part in case.args))
    return case


def _half(value: Any) -> Any:
    """The argument with 32-bit numbers in bf16."""
    if isinstance(value, TensorArg):
        return replace(value, dtype="bfloat16") if value.dtype == "float32" else value
    if isinstance(value, tuple | list):
        return type(value)(_half(part) for part in value)
    return "bfloat16" if value == "float32" else value
