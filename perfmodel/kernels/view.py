"""Ops that run no kernel on a device: views, metadata, allocation. Each is named here; nothing is free by default."""

from __future__ import annotations

from perfmodel.graph import Op
from perfmodel.kernels.registry import KernelCall, kernel_rule

# Views of ATen (native_functions.yaml: outputs alias an input and no kernel runs).
VIEWS = (
    "aten._reshape_alias",
    "aten._unsafe_view",
    "aten.alias",
    "aten.as_strided",
    "aten.as_strided_",
    "aten.broadcast_to",
    "aten.chunk",
    "aten.detach",
    "aten.detach_",
    "aten.diagonal",
    "aten.expand",
    "aten.expand_as",
    "aten.flatten",
    "aten.imag",
    "aten.lift",
    "aten.lift_fresh",
    "aten.mH",
    "aten.mT",
    "aten.movedim",
    "aten.narrow",
    "aten.numpy_T",
    "aten.permute",
    "aten.real",
    "aten.select",
    "aten.slice",
    "aten.split",
    "aten.split_with_sizes",
    "aten.squeeze",
    "aten.squeeze_",
    "aten.swapaxes",
    "aten.t",
    "aten.t_",
    "aten.transpose",
    "aten.transpose_",
    "aten.unbind",
    "aten.unflatten",
    "aten.unfold",
    "aten.unsafe_chunk",
    "aten.unsafe_split",
    "aten.unsafe_split_with_sizes",
    "aten.unsqueeze",
    "aten.unsqueeze_",
    "aten.view",
    "aten.view_as",
    "aten.view_as_complex",
    "aten.view_as_real",
)
# Memory from the caching allocator, without a fill (c10/cuda/CUDACachingAllocator.cpp: no kernel on a cache hit).
ALLOCATIONS = (
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.empty_permuted",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten.resize_",
)
# Metadata of dense and sparse tensors, and bookkeeping of autograd and autocast.
METADATA = (
    "perfmodel.synchronize",
    "aten._coalesced_",
    "aten._indices",
    "aten._nnz",
    "aten._sparse_coo_tensor_unsafe",
    "aten._sparse_coo_tensor_with_dims",
    "aten._sparse_coo_tensor_with_dims_and_tensors",
    "aten._values",
    "aten._version",
    "aten.dense_dim",
    "aten.indices",
    "aten.is_coalesced",
    "aten.is_same_size",
    "aten.record_stream",
    "aten.set_",
    "aten.sparse_dim",
    "aten.sym_numel",
    "aten.sym_size",
    "aten.sym_storage_offset",
    "aten.sym_stride",
    "aten.values",
    "prim.device",
    "prim.layout",
    "profiler._record_function_enter_new",
    "profiler._record_function_exit",
)


@kernel_rule(*VIEWS, *ALLOCATIONS, *METADATA)
def no_kernel(op: Op) -> tuple[KernelCall, ...]:
    """No device work at all: a new way to look at memory, or memory itself."""
    return ()
