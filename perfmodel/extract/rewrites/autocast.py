"""Automatic mixed precision: which operators cast their inputs, to which type. `torch.autocast("meta")` is refused.

The casts are real operators (`aten._to_copy`) that autograd differentiates, and casts of fp32 weights are kept for the
rest of the forward pass, as torch/aten/src/ATen/autocast_mode.cpp does. Lists: torch/include/ATen/autocast_mode.h (CUDA)
and autocast_mode.cpp (CPU); a test compares them with the header and with the kernels registered in the running torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from perfmodel.extract import _torch
from perfmodel.extract.record import Recorder

Policy = Literal["lower", "fp32", "fp32_dtype", "append_dtype", "promote"]

CUDA_LISTS: Mapping[Policy, str] = {
    "lower": "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv "
    "linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention "
    "scaled_dot_product_attention cudnn_convolution cudnn_convolution_transpose",
    "fp32": "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa",
    "fp32_dtype": "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList",
    "append_dtype": "norm.Scalar norm.ScalarOpt_dim",
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
}
# Registered beside cuDNN's RNN (native/cudnn/RNN.cpp), hence missing in a torch without CUDA.
CUDA_ELSEWHERE = "_cudnn_rnn"
CPU_LISTS: Mapping[Policy, str] = {
    "lower": "conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm "
    "_addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input prelu scaled_dot_product_attention _native_multi_head_attention",
    "promote": "stack cat index_copy",
}
# Refused under CUDA autocast with an error that names the safe loss (autocast_mode.cpp).
CUDA_BANNED = frozenset({"binary_cross_entropy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Casting:
    """One `torch.autocast` region."""

    enabled: bool
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True)
class Autocast:
    """Autocast of one step: the regions entered so far, innermost last, and the weights cast in them.

    `whole_step` is the region round forward and loss; checkpointing enters it again where it recomputes.
    """

    target: Literal["cuda", "cpu"]
    recorder: Recorder
    whole_step: Casting | None = None
    regions: list[Casting] = field(default_factory=list)
    weights: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def region(self) -> Casting | None:
        """The casting in force: none in backward, except while checkpointing recomputes a forward."""
        if self.recorder.phase == "backward" and not torch.is_grad_enabled():
            self.weights.clear()
            return None
        recompute = self.recorder.phase == "backward" and not self.regions
        region = self.whole_step if recompute else self.regions[-1] if self.regions else None
        return region if region is not None and region.enabled else None


_ACTIVE: ContextVar[Autocast] = ContextVar("autocast")


def policies(target: Literal["cuda", "cpu"]) -> Mapping[str, Policy]:
    """The policy of each operator with a list entry; on the CPU everything else that torch registers casts to fp32."""
    lists = CUDA_LISTS if target == "cuda" else CPU_LISTS
    named: dict[str, Policy] = {op: policy for policy, text in lists.items() for op in text.split()}
    if target == "cuda":
        named[CUDA_ELSEWHERE] = "lower"
    else:
        rest = _torch.operators_with_kernel("AutocastCPU") - named.keys()
        named.update((operator, "fp32") for operator in rest)
    return named


@cache
def _policies(target: Literal["cuda", "cpu"]) -> Mapping[str, Policy]:
    return policies(target)


@contextmanager
def autocast(state: Autocast) -> Iterator[None]:
    """Switches casts on for one step, and lets the model's own `torch.autocast` regions act on it."""
    operators = _policies("cuda").keys() | _policies("cpu").keys() | CUDA_BANNED
    _torch.CASTS.install({operator: _entry(operator) for operator in sorted(operators)})
    token = _ACTIVE.set(state)
    dtype = torch.get_autocast_dtype(state.target)
    try:
        with _torch.CASTS.on(), _torch.autocast_regions({"meta", state.target}, _enter, _leave):
            yield
    finally:
        state.regions.clear()
        _tell_torch(state)
        torch.set_autocast_dtype(state.target, dtype)
        _ACTIVE.reset(token)


def _enter(*, enabled: bool, dtype: torch.dtype | None) -> None:
    state = _ACTIVE.get()
    default = torch.float16 if state.target == "cuda" else torch.bfloat16
    state.regions.append(Casting(enabled=enabled, dtype=dtype or default))
    _tell_torch(state)


def _leave() -> None:
    state = _ACTIVE.get()
    state.regions.pop()
    _tell_torch(state)
    if not state.regions:
        state.weights.clear()


def _tell_torch(state: Autocast) -> None:
    """Makes `torch.is_autocast_enabled` say what holds; checkpointing and model code ask. It casts nothing by itself."""
    region = state.regions[-1] if state.regions else None
    torch.set_autocast_enabled(state.target, region is not None and region.enabled)
    if region is not None:
        torch.set_autocast_dtype(state.target, region.dtype)


def _entry(operator: str) -> Callable[..., Any]:
    function = _torch.overload(operator)

    def call(*args: Any, **kwargs: Any) -> Any:
        state = _ACTIVE.get()
        region = state.region()
        if region is None:
            with _torch.CASTS.off():
                return function(*args, **kwargs)
        policy = _policies(state.target).get(operator)
        if policy is None:
            return _unlisted(operator, state, args, kwargs)
        state.used.add("autocast")
        with _torch.CASTS.off():
            return _apply(policy, function, args, kwargs, (state, region))

    return call


def _unlisted(operator: str, state: Autocast, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An operator that only the other target lists: no casts of its own, but those of the operators inside it."""
    if state.target == "cuda" and operator in CUDA_BANNED:
        raise RuntimeError(
            f"torch.nn.functional.{operator} is unsafe to autocast; use {operator}_with_logits on the values before the "
            "sigmoid"
        )
    if _torch.is_composite(operator):
        return _torch.composite(operator, *args, **kwargs)
    with _torch.CASTS.off():
        return _torch.overload(operator)(*args, **kwargs)


def _apply(
    policy: Policy,
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    where: tuple[Autocast, Casting],
) -> Any:
    region = where[1]
    if policy == "lower":
        return function(*_cast(args, region.dtype, where), **_cast(dict(kwargs), region.dtype, where))
    if policy == "fp32":
        return function(*_cast(args, torch.float32, where), **_cast(dict(kwargs), torch.float32, where))
    if policy == "promote":
        dtype = _widest(args, region.dtype)
        return function(*_cast(args, dtype, where), **_cast(dict(kwargs), dtype, where))
    if policy == "append_dtype":
        return _norm(function, args, kwargs)
    if _is_eligible(args[0]) and _torch.argument(function, "dtype", args, kwargs) is None:
        return _torch.call_with(function, args, {**kwargs, "dtype": torch.float32})
    return function(*args, **kwargs)


def _norm(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`norm` in fp32: the same call through the overload that takes a dtype."""
    if not _is_eligible(args[0]):
        return function(*args, **kwargs)
    with_dtype = "norm.ScalarOpt_dtype" if len(args) < 3 else "norm.ScalarOpt_dim_dtype"
    return _torch.overload(with_dtype)(*args, **kwargs, dtype=torch.float32)


def _is_eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _widest(args: tuple[Any, ...], dtype: torch.dtype) -> torch.dtype:
    for value in args:
        if isinstance(value, tuple | list):
            dtype = _widest(tuple(value), dtype)
        elif _is_eligible(value) and value.dtype != dtype:
            dtype = torch.float32
    return dtype


def _cast(value: Any, dtype: torch.dtype, where: tuple[Autocast, Casting]) -> Any:
    if isinstance(value, dict):
        return {key: _cast(item, dtype, where) for key, item in value.items()}
    if isinstance(value, tuple):
        # The last argument is cast first: C++ evaluates the arguments of the call in that order (GCC).
        return tuple(reversed([_cast(item, dtype, where) for item in reversed(value)]))
    if isinstance(value, list):
        return [_cast(item, dtype, where) for item in value]
    if not _is_eligible(value) or value.dtype == dtype:
        return value
    state, region = where
    is_weight = dtype == region.dtype and value.dtype == torch.float32 and value.requires_grad and value.is_leaf
    if not is_weight or _torch.is_view(value):
        return value.to(dtype)
    known = state.weights.get(id(value))
    if known is None:
        known = state.weights[id(value)] = (value, value.to(dtype))
    return known[1]
