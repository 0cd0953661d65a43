"""Which fused kernel `scaled_dot_product_attention` becomes on the target; on `meta` torch would take the math path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfmodel.extract import _torch
from perfmodel.extract.rewrites.fused import fused
from perfmodel.extract.rewrites.routing import active, route

_OPERATOR = "scaled_dot_product_attention"
_FLASH_MAX_HEAD_DIM = 256  # torch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash
_FLASH_HEAD_DIM_MULTIPLE = 8  # attention.cpp, pad_last_dim<8>
_BIAS_MULTIPLE = 16  # attention.cpp, pad_bias<16> in elements
_EFFICIENT_ALIGNMENT = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}  # cuda/sdp_utils.cpp, sm80 and later


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool

    @property
    def is_plain(self) -> bool:
        """Four dimensions, no empty length, last dimension contiguous: what every fused kernel asks for."""
        tensors = (self.query, self.key, self.value)
        return all(t.dim() == 4 and t.stride(-1) == 1 and t.size(-2) > 0 for t in tensors)

    @property
    def same_head_dim(self) -> bool:
        return self.query.size(-1) == self.key.size(-1) == self.value.size(-1)

    @property
    def same_heads(self) -> bool:
        return self.query.size(1) == self.key.size(1) == self.value.size(1)

    @property
    def mask_needs_grad(self) -> bool:
        return self.mask is not None and self.mask.requires_grad


def _parsed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Attention:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return _Attention(
        query=given["query"],
        key=given["key"],
        value=given["value"],
        mask=given.get("attn_mask"),
        dropout=float(given.get("dropout_p", 0.0)),
        causal=bool(given.get("is_causal", False)),
        scale=given.get("scale"),
        gqa=bool(given.get("enable_gqa", False)),
    )


def _math(call: _Attention) -> Tensor:
    """Separate products and softmax, as torch decomposes them."""
    result = _torch.composite(
        "_scaled_dot_product_attention_math",
        call.query,
        call.key,
        call.value,
        call.mask,
        call.dropout,
        call.causal,
        None,
        scale=call.scale,
        enable_gqa=call.gqa,
    )
    out: Tensor = result[0]
    return out


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as 0 and -inf, as `convert_boolean_attn_mask` makes it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    minus_infinity = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, minus_infinity)


def _takes_flash(call: _Attention) -> bool:
    return (
        call.is_plain
        and call.same_head_dim
        and call.mask is None
        and call.query.dtype in (torch.float16, torch.bfloat16)
        and call.query.size(-1) <= _FLASH_MAX_HEAD_DIM
        and (call.same_heads or call.gqa)
        and not (call.causal and call.query.size(-2) != call.key.size(-2))
    )


def _takes_efficient(call: _Attention) -> bool:
    alignment = _EFFICIENT_ALIGNMENT.get(call.query.dtype)
    return (
        alignment is not None
        and call.is_plain
        and call.same_heads
        and call.query.size(-1) % alignment == 0
        and call.value.size(-1) % alignment == 0
    )


def _flash(call: _Attention) -> Tensor:
    """Pads the head dimension to a multiple of 8 where needed, runs the kernel, cuts the padding off."""
    width = call.query.size(-1)
    missing = -width % _FLASH_HEAD_DIM_MULTIPLE
    query, key, value = call.query, call.key, call.value
    if missing:
        query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value))
    scale = call.scale if call.scale is not None or not missing else width**-0.5
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout, call.causal, False, scale=scale
    )
    out: Tensor = result[0]
    return out[..., :width] if missing else out


def _bias(call: _Attention) -> Tensor | None:
    """The mask as the memory-efficient kernel reads it: additive, rows aligned, expanded to all heads."""
    bias = _additive(call.mask, call.query.dtype)
    if bias is None:
        return None
    length = bias.size(-1)
    missing = -length % _BIAS_MULTIPLE
    if missing:
        bias = torch.nn.functional.pad(bias, (0, missing))[..., :length]
    return bias.expand(call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2))


def _efficient(call: _Attention) -> Tensor:
    tensors = (call.query, call.key, call.value)
    needs_statistics = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    result = torch.ops.aten._scaled_dot_product_efficient_attention(
        *tensors, _bias(call), needs_statistics, call.dropout, call.causal, scale=call.scale
    )
    out: Tensor = result[0]
    return out


@route("cuda", _OPERATOR)
def sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """Flash for half types up to head dimension 256 without a mask, else memory-efficient, else separate products.

    torch's order and conditions on compute capability 8.0 and later (cuda/sdp_utils.cpp). On older devices (V100, T4)
    torch has no flash kernel and takes the memory-efficient one; the device is not known here, so the kernel model
    makes that difference. With real values neither kernel exists on this machine: the same op is recorded and its
    values come from the math path.
    """
    call = _parsed(args, kwargs)
    flash = _takes_flash(call)
    if not flash and not _takes_efficient(call):
        return _math(call)
    routing = active()
    routing.used.add("sdpa")
    if routing.values == "real":
        return _on_real_values(call, "flash" if flash else "efficient")
    return _flash(call) if flash else _efficient(call)


def _on_real_values(call: _Attention, kind: str) -> Tensor:
    name = f"aten._scaled_dot_product_{kind}_attention"
    tensors = [call.query, call.key, call.value] + ([] if call.mask is None else [call.mask])

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return _math(
            _Attention(
                query=query,
                key=key,
                value=value,
                mask=mask,
                dropout=call.dropout,
                causal=call.causal,
                scale=call.scale,
                gqa=call.gqa,
            )
        )

    names = ("query", "key", "value", "attn_bias")[: len(tensors)]
    attrs = {"dropout_p": call.dropout, "is_causal": call.causal, "scale": call.scale}
    return fused(name, compute, tensors, names, attrs)


@route("cpu", _OPERATOR)
def sdpa_on_cpu(*args: Any, **kwargs: Any) -> Tensor:
    """The CPU's flash kernel, or separate products with dropout or a mask that needs a gradient (sdp_utils_cpp.cpp)."""
    call = _parsed(args, kwargs)
    fits = call.is_plain and call.same_head_dim and (call.same_heads or call.gqa)
    if not fits or call.dropout > 0.0 or call.mask_needs_grad:
        return _math(call)
    active().used.add("sdpa")
    result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        call.query,
        call.key,
        call.value,
        call.dropout,
        call.causal,
        attn_mask=_additive(call.mask, call.query.dtype),
        scale=call.scale,
    )
    out: Tensor = result[0]
    return out
