"""How long fused attention takes: query tiles over the SMs, causal imbalance, exponentials, L2 and device memory.

A kernel gives each SM tiles of tq queries of one head, which walk over their keys in blocks of 64. With span(i) the keys
that tile i sees, padded to a block:

    tile_s(i) = tq span(i) (2 (d + v) / (peak/SMs eff d/(d + half_dim)) + exp_share / (16 exponentials/clock))
    compute   = ceil(tiles/SMs) tile_s           without a causal mask (all tiles alike)
                max(longest, mean load + tail longest)   with one (long and short tiles are mixed)
    L2        = tiles span (d + v) itemsize / (l2_eff 64 bytes/clock SMs)
    memory    = compulsory bytes / (bandwidth bw_eff)
    time      = floor + wave prologue + (compute^p + L2^p + memory^p)^(1/p) (1 + throttle body / (body + 3 ms))

for the better of tq = 64 and 128. FlashAttention-2 (Dao 2023, section 3.2 and 3.3) is the algorithm and work split.
Backward has no public measurements: five products instead of two at BACKWARD_RATIO of the forward efficiency, the output
gradient's row sums and the float32 query gradient go through memory once more, and it runs as three kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate
from perfmodel.kernels.attention import BACKWARD_PRODUCTS, CUDNN, EFFICIENT, FORWARD_PRODUCTS, IMPLEMENTATIONS
from perfmodel.kernels.correction import Floats, LawResult, Segment, price_by_segments
from perfmodel.kernels.registry import KernelCall, kernel_family
from perfmodel.kernels.roofline import peak_flops_per_s

LAW = "attention/1"

QUERY_TILES = np.array([64.0, 128.0])  # FlashAttention-2 and -3 kernel instantiations for head dimensions up to 128
KEY_BLOCK = 64.0  # keys per main-loop step
EXP_PER_CLOCK = 16.0  # special-function results per SM and clock (CUDA C++ Programming Guide, throughput table)
L2_PORT_BYTES = 64.0  # bytes an SM receives from L2 per clock, as in gemm_law
SUSTAINED_S = 3e-3  # as in gemm_law
# FlashAttention-2 (Dao 2023, section 1): forward up to 73 % of peak, backward up to 63 %, both on A100.
BACKWARD_RATIO = 63.0 / 73.0
BACKWARD_KERNELS = 3  # row sums of dO * O, the main kernel, conversion of the float32 dQ
# FlashAttention-3 (Shah et al. 2024, abstract): 1.5-2.0 times FlashAttention-2 on H100. Its middle, for kernels of the older
# generation on Hopper.
HOPPER_SPEEDUP = 1.75
HOPPER = 9.0  # compute capability
# FlashAttention-2 needs compute capability 8.0; below it PyTorch's fused attention is the memory-efficient kernel of
# CUTLASS (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: sm80 for the one, sm50 for the other).
FLASH_CAPABILITY = 8.0
# FlashAttention-2 is "around 2 times faster than FlashAttention and its equivalent in xFormers", which is that kernel
# (Dao 2023, section 4.1, A100, forward and backward).
EFFICIENT_SLOWDOWN = 2.0

FEATURES = (
    "log_law", "log_compute", "log_memory", "log_l2", "log_batch", "log_heads", "log_kv_heads", "log_q_len", "log_kv_len",
    "head_dim", "causal", "log_tiles", "fill_64", "fill_128", "log_group", "q_mod_128", "kv_mod_128", "log_bytes_per_l2",
    "log_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Columns of n attention calls."""

    batch: Floats
    heads: Floats
    kv_heads: Floats
    q_len: Floats
    kv_len: Floats
    head_dim: Floats
    v_dim: Floats
    causal: Floats
    masked: Floats
    backward: Floats
    itemsize_bytes: Floats
    bytes: Floats
    peak_flops_per_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The law's inside for the chosen query tile: seconds and tiles."""

    time_s: Floats
    compute_s: Floats
    memory_s: Floats
    l2_s: Floats
    tiles: Floats


def heads_of(calls: Sequence[KernelCall], device: Device) -> Heads:
    """Columns of the calls."""
    names = (
        "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_dim", "causal", "masked", "backward",
        "itemsize_bytes",
    )  # fmt: skip
    table = np.array([[call.features[name] for name in names] for call in calls]).T
    return Heads(
        **dict(zip(names, table, strict=True)),
        bytes=np.array([float(call.work.bytes) for call in calls]),
        peak_flops_per_s=np.array([peak_flops_per_s(device, call.pipe) for call in calls]),
    )


def law_parts(parameters: Mapping[str, float], h: Heads, device: Device) -> Parts:
    """The forward law for both query tiles, reduced to the faster; backward scales the products and adds its passes."""
    tile = QUERY_TILES[None, :]
    tiles_per_head = np.ceil(h.q_len[:, None] / tile)
    tiles = tiles_per_head * (h.batch * h.heads)[:, None]
    longest_span = np.ceil(h.kv_len / KEY_BLOCK)[:, None] * KEY_BLOCK
    mean_span = np.where(h.causal[:, None] > 0, _mean_causal_span(tiles_per_head, tile, longest_span), longest_span)
    dims = h.head_dim + h.v_dim
    products = np.where(h.backward > 0, BACKWARD_PRODUCTS / FORWARD_PRODUCTS / BACKWARD_RATIO, 1.0)
    depth = dims / (dims + 2.0 * parameters["half_dim"])
    rate = h.peak_flops_per_s / device.n_sms * parameters["eff"] * depth
    per_pair = products * 2.0 * dims / rate + parameters["exp_share"] / (EXP_PER_CLOCK * device.clock_hz)
    load = tiles / device.n_sms
    longest = tile * longest_span * per_pair[:, None]
    mixed = load * tile * mean_span * per_pair[:, None] + parameters["tail"] * longest
    compute = np.where(h.causal[:, None] > 0, np.maximum(longest, mixed), np.ceil(load) * longest)
    port = parameters["l2_eff"] * L2_PORT_BYTES * device.clock_hz * device.n_sms
    l2 = tiles * mean_span * (products * dims * h.itemsize_bytes)[:, None] / port
    bandwidth = device.memory_bytes_per_s * parameters["bw_eff"]
    memory = np.broadcast_to((h.bytes / bandwidth)[:, None], compute.shape)
    body = _soft_max((compute, l2, memory), parameters["sharp"]) + np.ceil(load) * parameters["prolog_s"]
    rows, best = np.arange(len(h.batch)), body.argmin(axis=1)
    fastest = body[rows, best]
    sustained = fastest * (1.0 + parameters["throttle"] * fastest / (fastest + SUSTAINED_S))
    return Parts(
        time_s=sustained + parameters["floor_s"] + _backward_extra_s(h, device, bandwidth),
        compute_s=compute[rows, best],
        memory_s=memory[rows, best],
        l2_s=l2[rows, best],
        tiles=tiles[rows, best],
    )


def _mean_causal_span(tiles: Floats, tile: Floats, longest: Floats) -> Floats:
    """Mean keys per tile when tile i sees the first (i + 1) tile keys, at most all."""
    growing = np.minimum(tiles, np.floor(longest / tile))
    total = tile * growing * (growing + 1.0) / 2.0 + (tiles - growing) * longest
    result: Floats = total / tiles
    return result


def _backward_extra_s(h: Heads, device: Device, bandwidth: float) -> Floats:
    """Seconds of the two small kernels of a backward pass: read O and dO, write and read dQ in float32; their floors."""
    query = h.batch * h.heads * h.q_len
    passes = query * (2.0 * h.v_dim * h.itemsize_bytes + h.head_dim * (2.0 * 4.0 + h.itemsize_bytes))
    extra: Floats = h.backward * (passes / bandwidth + (BACKWARD_KERNELS - 1) * device.kernel_floor_s)
    return extra


def _soft_max(terms: Sequence[Floats], sharpness: float) -> Floats:
    """(sum x^p)^(1/p) without overflow."""
    largest = np.maximum.reduce(terms)
    total = np.zeros_like(largest)
    for term in terms:
        total = total + (term / largest) ** sharpness
    result: Floats = largest * total ** (1.0 / sharpness)
    return result


def correction_features(h: Heads, parts: Parts, device: Device) -> Floats:
    """Feature matrix [n, len(FEATURES)]; the order is FEATURES."""
    load_64 = np.ceil(h.q_len / 64) * h.batch * h.heads / device.n_sms
    load_128 = np.ceil(h.q_len / 128) * h.batch * h.heads / device.n_sms
    return np.column_stack(
        [
            np.log(parts.time_s),
            *(np.log(v / parts.time_s) for v in (parts.compute_s, parts.memory_s, parts.l2_s)),
            *(np.log(v) for v in (h.batch, h.heads, h.kv_heads, h.q_len, h.kv_len)),
            h.head_dim,
            h.causal,
            np.log(parts.tiles),
            *(v / np.ceil(v) for v in (load_64, load_128)),
            np.log(h.heads / h.kv_heads),
            h.q_len % 128,
            h.kv_len % 128,
            np.log(h.bytes / device.l2_bytes),
            np.log(h.batch * h.q_len),
        ]
    )


def law(segment: Segment, calls: Sequence[KernelCall], device: Device) -> LawResult:
    """The law and the correction's features for calls that share a segment."""
    heads = heads_of(calls, device)
    parts = law_parts(segment.parameters, heads, device)
    return LawResult(
        time_s=parts.time_s,
        features=correction_features(heads, parts, device),
        ranged={
            "batch": heads.batch,
            "heads": heads.heads,
            "q_len": heads.q_len,
            "kv_len": heads.kv_len,
            "head_dim": heads.head_dim,
        },
    )


def choose_segment(segments: Mapping[str, Segment], call: KernelCall, device: Device) -> Segment | None:
    """The segment of the call's implementation, or the nearest one; backward and other types are DERIVED.

    A device whose backward passes or memory-efficient kernels were measured has segments of those names. Else the
    memory-efficient kernel, and flash attention below FLASH_CAPABILITY, is derived from FlashAttention-2.

    PyTorch's flash operator is FlashAttention-2 everywhere; on Hopper only the third generation was measured, and the
    second is derived from it. cudnn's kernel on Hopper is as fast as the third (Shah et al. 2024, figure 5).
    """
    hopper = float(device.compute_capability or 0) >= HOPPER
    asked = IMPLEMENTATIONS[int(call.features["implementation"])]
    efficient = asked == "auto" and runs_efficient(call, device)
    if asked == "auto":
        asked = "flash3" if hopper and call.features["variant"] == CUDNN else "flash2"
    own = segments.get(f"{'efficient' if efficient else asked}{'_backward' if call.features['backward'] else ''}")
    if own is not None and (efficient or call.features["backward"]) and call.pipe.endswith("_tensor"):
        return own
    if efficient:
        return _efficient(segments, call)
    found = segments.get(asked)
    if found is None and asked == "flash2" and hopper and "flash3" in segments:
        found = _slower(segments["flash3"], HOPPER_SPEEDUP)
    if found is None:
        found = next((s.only_law() for s in segments.values()), None)
    if found is None or not call.pipe.endswith("_tensor"):
        return found.only_law() if found else None
    measured = call.features["backward"] == 0 and call.pipe == "bf16_tensor"
    if measured:
        return found
    return found.only_law() if call.features["backward"] else found.derived()


def runs_efficient(call: KernelCall, device: Device) -> bool:
    """True if PyTorch's fused attention on `device` is the memory-efficient kernel for this call."""
    old = device.kind == "cuda" and float(device.compute_capability or 0) < FLASH_CAPABILITY
    return call.features["variant"] == EFFICIENT or old


def _efficient(segments: Mapping[str, Segment], call: KernelCall) -> Segment | None:
    """The memory-efficient kernel: half as fast as FlashAttention-2 on tensor cores; on FP32 cores the law as it is."""
    if not segments:
        return None
    forward = {name: segment for name, segment in segments.items() if not name.endswith("_backward")}
    found = (
        forward.get("flash2") or forward.get("flash3") or next(iter(forward.values()), next(iter(segments.values())))
    )
    slowdown = EFFICIENT_SLOWDOWN * (HOPPER_SPEEDUP if found.name == "flash3" else 1.0)
    return _slower(found, slowdown) if call.pipe.endswith("_tensor") else found.only_law()


def _slower(segment: Segment, slowdown: float) -> Segment:
    """Another kernel's law from this one: its tensor-core and exponential rates divided by `slowdown`."""
    parameters = dict(segment.parameters)
    parameters["eff"] /= slowdown
    parameters["exp_share"] *= slowdown
    return replace(segment.only_law(), name=f"{segment.name}_slower_{slowdown:g}", parameters=parameters)


@kernel_family("attention")
def attention_family(calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
    """Estimates of fused attention by the fit of this device, or by roofline without one."""
    return price_by_segments(calls, device, "attention", LAW, (choose_segment, law))
