"""Host time of an op: what the thread that drives the device spends to issue it.

    CUDA: cost = dispatch(phase) · weight(op) + launches · launch time (+ a share per tensor for lists of tensors)
    CPU:  cost = dispatch(phase) · weight(op) for ops that run nothing; the kernels of a CPU are measured as whole calls, so
          an op that does run something adds only what Python or the autograd engine spends around that call.

The device's `HostCosts` hold the seconds of a plain pointwise op. Weights say how many such ops another op's host work is
worth. They are ratios from the published per-op CPU times of DLRM, ResNet-50 and Transformer training on a V100 host
(owensgroup/ml_perf_model, `overheads_study`: T2, the CPU time before an op's first launch; medians over models and batch
sizes) over that of `add` (15.2 us), after taking 1 us off for every nested profiler event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfmodel.db.device import Device
from perfmodel.graph import Op
from perfmodel.kernels.megatron import SOFTMAXES, has_fused_softmax
from perfmodel.kernels.view import ALLOCATIONS, METADATA, VIEWS

DEFAULT_WEIGHT = 1.0
# A view through the dispatcher, the part that Python does not see included: slice, view and flatten 2-3 us and a gap of 2-6 us
# in Kineto traces of A100 and V100 DLRM training, where a plain op is worth 21 us; 0.9 of 3.5 us on a CPU.
VIEW_WEIGHT = 0.25
# Aliases that autograd makes for itself in C++: 0.5-1 us in the same traces.
ALIAS_WEIGHT = 0.05
ALLOCATION_WEIGHT = 0.3
# Python loops of torch.optim and the argument lists of multi_tensor_apply, per tensor in a list: SGD.step spends 141 us
# for 12 parameters before its first launch, 0.7 plain ops a parameter; an Adam step passes each parameter in 12 lists.
PER_TENSOR_WEIGHT = 0.06
# An optimizer's plain ops run in a Python loop without modules or autograd: 11-13 us of addcmul_ and sqrt against 20-28
# us of add and relu in forward (V100 DLRM trace); 1.4 against 3.9 us beyond the call itself on a CPU (see its device.yaml).
OPTIMIZER_WEIGHT = 0.5
# Modules without gradients, against the same with autograd's bookkeeping: 4.3 of 5.4 us an op, both with 0.9 us of kernel
# (measured 2026-11-29 on the project's CPU, torch 2.13: Linear, ReLU, LayerNorm, Sigmoid on 4 x 8).
NO_GRAD_WEIGHT = 0.74
# A collective through torch.distributed: alltoall_base_ spends 80 us in 7 runtime calls on a V100 host (DLRM trace), of which
# launches and tracing are 20.
COLLECTIVE_WEIGHT = 3.3
# Operators on DTensors (FSDP2's parameters and optimizer states), beyond what they cost on plain tensors, a plain op being
# 3.5 us; a 2-core CPU, torch 2.13. Alone: AdamW's step on 32 to 64 parameters of 8 x 2 takes 140 us more a parameter than on
# plain ones, in 8 operators (2026-11-30; repeated calls of one operator 12 us). Lists: _foreach_mul_ on 40 tensors, 12 us and
# 1.6 us a tensor (2026-11-29).
DTENSOR_WEIGHT = 5.0
DTENSOR_LIST_WEIGHT = 3.5
DTENSOR_PER_TENSOR_WEIGHT = 0.45
# Scores that Megatron-LM's fused softmax does not take: two conversions, a product and a mask, each a plain op, and a softmax.
PLAIN_SOFTMAX_WEIGHT = 4 * DEFAULT_WEIGHT + 1.7

_ALIASES = ("aten.detach", "aten.alias", "aten.lift_fresh", "aten._reshape_alias", "aten._version", "aten.is_same_size")

# Weight of ops whose host work differs from a plain pointwise op's, each from the T2 table unless said otherwise.
_CLASSES: Mapping[float, tuple[str, ...]] = {
    # 28-31 us: cuBLAS handle, heuristics and workspace; linear is 41 us with its Python module and its transpose
    2.0: ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addmv", "aten.mv", "aten.dot", "aten._scaled_mm"),
    # 45-124 us: cuDNN descriptors and the plan cache
    4.0: ("aten.convolution", "aten.cudnn_convolution", "aten.convolution_overrideable"),
    # 36-117 us in backward: two plans
    5.0: ("aten.convolution_backward",),
    # 50-70 us forward (module, counters and five outputs), 47-51 us backward
    3.0: (
        "aten.native_batch_norm",
        "aten.cudnn_batch_norm",
        "aten._native_batch_norm_legit",
        "aten._batch_norm_with_update",
        "aten.native_batch_norm_backward",
        "aten.cudnn_batch_norm_backward",
        "aten.batch_norm_backward",
    ),
    # 58.6 us for a batched lookup, 51.9 us for its backward, both custom autograd functions
    3.5: (
        "aten._embedding_bag",
        "aten._embedding_bag_forward_only",
        "aten._embedding_bag_backward",
        "aten._embedding_bag_dense_backward",
        "aten._embedding_bag_sparse_backward",
        "aten._coalesce",
        # NVIDIA's DLRM and Megatron-LM's fused kernels: autograd functions in Python too
        "perfmodel.gather_rows",
        "perfmodel.gather_rows_backward",
        "perfmodel.dot_interaction",
        "perfmodel.dot_interaction_backward",
        "perfmodel.mlp",
        "perfmodel.mlp_backward",
        "perfmodel.bias_gelu",
        "perfmodel.bias_gelu_backward",
        "perfmodel.bias_dropout_add",
        "perfmodel.bias_dropout_backward",
        "perfmodel.causal_softmax",
        "perfmodel.causal_softmax_backward",
        "perfmodel.swiglu",
        "perfmodel.swiglu_backward",
        "perfmodel.rotary",
    ),
    # layer norm 30 us, reductions 25 us, cat 30 us, index 29 us, losses 24-30 us, max pool 26 us, dropout backward 29 us
    1.7: (
        "aten.native_layer_norm",
        "aten.native_layer_norm_backward",
        "aten.native_group_norm",
        "aten.native_group_norm_backward",
        "aten.sum",
        "aten.mean",
        "aten.cat",
        "aten.stack",
        "aten.index",
        "aten.index_select",
        "aten.embedding",
        "aten.embedding_dense_backward",
        "aten.mse_loss",
        "aten.mse_loss_backward",
        "aten.binary_cross_entropy",
        "aten.binary_cross_entropy_backward",
        "aten.nll_loss_forward",
        "aten.nll_loss_backward",
        "aten._softmax",
        "aten._log_softmax",
        "aten._softmax_backward_data",
        "aten._log_softmax_backward_data",
        "aten.max_pool2d_with_indices",
        "aten.max_pool2d_with_indices_backward",
        "aten._adaptive_avg_pool2d",
        "aten.native_dropout",
        "aten.native_dropout_backward",
    ),
    # index backward 28 us before its first launch and 35 us between launches
    4.5: ("aten.index_put", "aten.index_put_", "aten._index_put_impl_"),
    # fused attention: one launch, but checks of every backend first; taken as a matrix product and a half
    3.1: (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_backward",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_efficient_attention_backward",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_cudnn_attention_backward",
    ),
}


def _weights() -> dict[str, float]:
    weights = dict.fromkeys((*VIEWS, *METADATA), VIEW_WEIGHT)
    weights |= dict.fromkeys(ALLOCATIONS, ALLOCATION_WEIGHT)
    weights |= dict.fromkeys(_ALIASES, ALIAS_WEIGHT)
    return weights | {name: weight for weight, names in _CLASSES.items() for name in names}


WEIGHTS: Mapping[str, float] = _weights()


def weight(op: Op) -> float:
    """Host work of `op` in units of a plain pointwise op's, launches apart."""
    base = WEIGHTS.get(op.name, DEFAULT_WEIGHT)
    if op.name in SOFTMAXES and not has_fused_softmax(op.inputs[0]):
        return PLAIN_SOFTMAX_WEIGHT
    if op.name.startswith(("aten._foreach_", "aten._fused_", "aten._amp_foreach_")):
        return base + PER_TENSOR_WEIGHT * len(op.inputs)
    return base


def dispatch_s(op: Op, device: Device) -> float:
    """Host seconds of a plain op in the phase of `op`, launches apart."""
    host = device.host
    if op.phase == "backward":
        return host.backward_op_s
    return host.op_dispatch_s * (OPTIMIZER_WEIGHT if op.phase == "optimizer" else 1.0)


def collective_dispatch_s(device: Device) -> float:
    """Host seconds to issue one collective, its launch apart."""
    return device.host.op_dispatch_s * (COLLECTIVE_WEIGHT if device.kind == "cuda" else 1.0)


def host_cost_s(op: Op, n_kernels: int, device: Device) -> float:
    """Host seconds to dispatch `op` and launch its `n_kernels` kernels on `device`."""
    distributed_s = _dtensor_weight(op) * device.host.op_dispatch_s
    if "host_bytes" in op.attrs:  # a plan's own work on the host's memory (`plan/offload.py`)
        distributed_s += float(op.attrs["host_bytes"]) / float(op.attrs["host_bytes_per_s"])
    if "host_ops" in op.attrs:  # what else Python does there (`plan/host_states.py`)
        distributed_s += float(op.attrs["host_ops"]) * device.host.op_dispatch_s
    if device.kind == "cpu" and n_kernels:
        return dispatch_s(op, device) + distributed_s
    return dispatch_s(op, device) * weight(op) + distributed_s + n_kernels * device.host.launch_s


def _dtensor_weight(op: Op) -> float:
    """Plain ops that the dispatch of an op on DTensors is worth more; 0 on plain tensors."""
    if not op.attrs.get("dtensor"):
        return 0.0
    if op.name.startswith(("aten._foreach_", "aten._fused_")):
        return DTENSOR_LIST_WEIGHT + DTENSOR_PER_TENSOR_WEIGHT * len(op.inputs)
    return DTENSOR_WEIGHT


def host_costs_s(ops: Sequence[Op], n_kernels: Sequence[int], device: Device) -> list[float]:
    """`host_cost_s` of many ops."""
    return [host_cost_s(op, count, device) for op, count in zip(ops, n_kernels, strict=True)]
