"""What a device runs in place of what a model asks for: notes of a prediction, one line each."""

from __future__ import annotations

from collections.abc import Iterable

from perfmodel.db.device import Device
from perfmodel.graph import Op
from perfmodel.kernels.attention import EFFICIENT
from perfmodel.kernels.attention_law import FLASH_CAPABILITY, runs_efficient
from perfmodel.kernels.pricing import calls_of
from perfmodel.kernels.registry import KernelCall
from perfmodel.kernels.roofline import PIPE_FALLBACK

# Types a GPU may lack units for: PyTorch then converts to FP32, computes, and converts back, in the same kernels.
_NARROW_PIPES = {"bf16": "bf16", "bf16_tensor": "bf16", "fp16": "fp16", "fp16_tensor": "fp16"}


def substitutes(ops: Iterable[Op], device: Device) -> list[str]:
    """Sorted notes on kernels of `ops` that `device` replaces; none on a CPU, which has laws of its own."""
    if device.kind != "cuda" or _has_all(device):
        return []
    found = {
        note
        for calls in {id(c): c for c in map(calls_of, ops)}.values()
        for call in calls
        for note in _notes(call, device)
    }
    return sorted(found)


def _has_all(device: Device) -> bool:
    modern = float(device.compute_capability or 0) >= FLASH_CAPABILITY
    return modern and all(_arithmetic(pipe, device) != "fp32" for pipe in _NARROW_PIPES)


def _notes(call: KernelCall, device: Device) -> Iterable[str]:
    if (
        call.family == "attention"
        and call.pipe.endswith("_tensor")
        and call.features["variant"] != EFFICIENT
        and runs_efficient(call, device)
    ):
        yield (
            f"{device.name}: flash attention needs compute capability {FLASH_CAPABILITY:.1f}, this is "
            f"{device.compute_capability}: priced as the memory-efficient kernel"
        )
    kind = _NARROW_PIPES.get(call.pipe)
    if kind is not None and call.work.flops and _arithmetic(call.pipe, device) == "fp32" != call.pipe:
        yield f"{device.name} has no {kind} arithmetic: {kind} products are priced at the FP32 rate (emulated)"


def _arithmetic(pipe: str, device: Device) -> str:
    """The pipe that runs the arithmetic of `pipe` on `device`."""
    while pipe not in device.peak_flops_per_s:
        pipe = PIPE_FALLBACK[pipe]
    return pipe
