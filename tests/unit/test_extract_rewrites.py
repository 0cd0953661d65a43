"""What CUDA runs instead of torch's choice on tensors without storage.

Oracles: torch's own header and dispatcher for the autocast lists, CPU autocast of the real torch, torch's conditions for
fused attention (quoted in rewrites/attention.py), hand counts of optimizer and scaler calls.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as fn

from perfmodel.config.dlrm import DlrmSpec
from perfmodel.extract import _torch, trace
from perfmodel.extract.rewrites.autocast import CPU_LISTS, CUDA_BANNED, CUDA_LISTS, policies
from perfmodel.models import BuiltModel, build

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def built(module, *args, loss=None, **fields):
    return BuiltModel(name="m", module=module, args=args, loss=loss or (lambda out: out.float().sum()), **fields)


def names(graph, phase=None):
    return [op.name.removeprefix("aten.") for op in graph.ops if phase in (None, op.phase)]


class Attention(nn.Module):
    def __init__(self, head_dim=16, kv_heads=4, *, dtype=torch.bfloat16, mask=None, needs_grad=False, **options):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(2, 4, 6, head_dim, dtype=dtype))
        self.key = nn.Parameter(torch.zeros(2, kv_heads, options.pop("kv_length", 6), head_dim, dtype=dtype))
        self.mask = None if mask is None else nn.Parameter(mask, requires_grad=needs_grad)
        self.options = options

    def forward(self):
        return fn.scaled_dot_product_attention(self.query, self.key, self.key, attn_mask=self.mask, **self.options)


BOOLEAN = torch.ones(6, 6, dtype=torch.bool)
ADDITIVE = torch.zeros(2, 1, 6, 6, dtype=torch.bfloat16)
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("module", "kernel"),
    [
        (Attention(is_causal=True), FLASH),
        (Attention(256), FLASH),
        (Attention(20), FLASH),  # padded to 24
        (Attention(264), EFFICIENT),
        (Attention(dropout_p=0.1), FLASH),
        (Attention(kv_heads=2, enable_gqa=True), FLASH),
        (Attention(dtype=torch.float16), FLASH),
        (Attention(dtype=torch.float32), EFFICIENT),
        (Attention(mask=ADDITIVE), EFFICIENT),
        (Attention(mask=BOOLEAN), EFFICIENT),
        (Attention(is_causal=True, kv_length=8), EFFICIENT),  # flash refuses a causal mask that is not square
        (Attention(kv_heads=2, enable_gqa=True, dtype=torch.float32), None),
        (Attention(18, dtype=torch.float32), None),  # not a multiple of 4 elements
        (Attention(dtype=torch.float64), None),
    ],
)
def test_attention_kernel(module, kernel):
    if module.mask is not None:
        module.mask.requires_grad_(requires_grad=False)
    graph = trace(built(module))
    fused = [name for name in names(graph) if name.startswith("_scaled_dot_product")]
    assert fused == ([] if kernel is None else [kernel, f"{kernel}_backward"])
    assert ("bmm" in names(graph)) == (kernel is None)
    assert graph.rewrites == (() if kernel is None else ("sdpa",))


def test_attention_pads_the_head_dimension_to_eight():
    forward = next(op for op in trace(built(Attention(20))).ops if op.name.endswith(FLASH))
    assert [spec.shape[-1] for spec in forward.inputs] == [24, 24, 24]
    assert forward.attrs["scale"] == pytest.approx(20**-0.5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_with_real_values_is_recorded_as_the_same_kernel(dropout):
    module = Attention(dtype=torch.float32, dropout_p=dropout)
    for values in ("meta", "real"):
        graph = trace(built(module), values=values)
        fused = [op for op in graph.ops if "scaled_dot_product" in op.name]
        assert [op.name for op in fused] == [f"aten.{EFFICIENT}", f"aten.{EFFICIENT}_backward"]
        assert [spec.shape for spec in fused[1].inputs[1:4]] == [spec.shape for spec in fused[0].inputs[:3]]
        assert {op.attrs.get("dropout_p", 0.0) for op in fused} == {dropout}


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch = nn.BatchNorm2d(4)
        self.rms = nn.RMSNorm(6)

    def forward(self, x):
        return self.rms(fn.dropout(self.batch(self.conv(x)), 0.5))


def test_norms_and_dropout_are_one_kernel_each_way():
    graph = trace(built(Norms(), torch.ones(2, 3, 8, 8)))
    assert names(graph, "forward") == [
        "convolution",
        "add_",  # batch norm counts its batches
        "cudnn_batch_norm",
        "native_dropout",
        "_fused_rms_norm",
    ]
    backward = [name for name in names(graph, "backward") if name.endswith("_backward")]
    assert backward == [
        "_fused_rms_norm_backward",
        "native_dropout_backward",
        "cudnn_batch_norm_backward",
        "convolution_backward",
    ]
    assert set(graph.rewrites) == {"batch_norm", "dropout", "rms_norm"}
    last = next(op for op in graph.ops if op.name == "aten._fused_rms_norm_backward")
    assert last.module == "rms"
    assert [spec.shape for spec in last.outputs] == [(2, 4, 6, 6), (6,)]


@pytest.mark.parametrize(("precision", "product"), [("fp32", None), ("tf32", True), ("bf16", None)])
def test_tf32_marks(precision, product):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv1d(3, 4, 1), nn.Linear(5, 6)

        def forward(self, x):
            return self.linear(self.conv(x))

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    graph = trace(built(Both().to(dtype), torch.ones(2, 3, 5, dtype=dtype), precision=precision))
    marks = {op.name: op.attrs.get("allow_tf32") for op in graph.ops if op.name in ("aten.addmm", "aten.convolution")}
    assert marks == {"aten.addmm": product, "aten.convolution": None if precision == "bf16" else True}


def header_list(macro: str) -> set[str]:
    text = HEADER.read_text().split(f"#define {macro}(_)")[1]
    body = re.match(r"(?:.*\\\n)*.*", text).group()
    return {".".join(part.strip() for part in call.split(",")) for call in re.findall(r"_\((\w+(?:, *\w+)?)\)", body)}


@pytest.mark.parametrize(
    ("policy", "macro", "extra"),
    [
        ("lower", "AT_FORALL_LOWER_PRECISION_FP", {"cudnn_convolution", "cudnn_convolution_transpose"}),
        ("fp32", "AT_FORALL_FP32", set()),
        ("fp32_dtype", "AT_FORALL_FP32_SET_OPT_DTYPE", set()),
        ("promote", "AT_FORALL_PROMOTE", set()),
    ],
)
def test_cuda_autocast_lists_are_torchs(policy, macro, extra):
    if not HEADER.exists():
        pytest.skip("this torch ships no headers")
    assert set(CUDA_LISTS[policy].split()) == header_list(macro) | extra


def test_every_operator_that_torch_registers_for_autocast_has_a_policy():
    cuda = policies("cuda").keys() | CUDA_BANNED
    assert cuda - {"_cudnn_rnn"} == _torch.operators_with_kernel("AutocastCUDA")
    assert policies("cpu").keys() == _torch.operators_with_kernel("AutocastCPU")
    assert not set(CPU_LISTS["lower"].split()) & set(CPU_LISTS["promote"].split())


class Mixed(nn.Module):
    """One operator of each policy."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        low = self.linear(x)
        again = self.linear(low)  # the weight's cast is reused
        wide = fn.softmax(again, -1) + torch.exp(low)
        return torch.addcmul(wide, low, again)


def test_cuda_autocast_by_hand():
    graph = trace(built(Mixed(), torch.ones(3, 8), precision="amp_fp16"))
    forward = [op for op in graph.ops if op.phase == "forward"]
    casts = [(op.inputs[0].dtype, op.outputs[0].dtype, op.outputs[0].shape) for op in forward if "copy" in op.name]
    half, single = "float16", "float32"
    assert casts == [
        (single, half, (8,)),  # arguments are cast last to first: bias, weight, input
        (single, half, (8, 8)),
        (single, half, (3, 8)),
        (half, single, (3, 8)),  # exp in fp32
        (half, single, (3, 8)),  # addcmul in the widest type of its arguments
        (half, single, (3, 8)),
    ]
    products = [op for op in forward if op.name == "aten.addmm"]
    assert {spec.dtype for op in products for spec in (*op.inputs, *op.outputs)} == {half}
    softmax = next(op for op in forward if op.name == "aten._softmax")
    assert softmax.outputs[0].dtype == single


def test_loss_scaling_by_hand():
    graph = trace(built(nn.Linear(8, 8), torch.ones(3, 8), precision="amp_fp16", optimizer="adam"))
    assert names(graph, "loss")[-1] == "mul"
    optimizer = names(graph, "optimizer")
    assert optimizer[:6] == [
        "_to_copy",  # scale to double, its reciprocal, back to float
        "reciprocal",
        "_to_copy",
        "full",
        "_amp_foreach_non_finite_check_and_unscale_",
        "_local_scalar_dense",
    ]
    assert optimizer[-1] == "_amp_update_scale_"
    assert [op.name for op in graph.ops if op.host_sync] == ["aten._local_scalar_dense"]
    assert "grad_scaler" in graph.rewrites


def test_a_models_own_autocast_regions_count():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                inside = torch.is_autocast_enabled("cuda")
                x = self.linear(x)
                with torch.autocast(x.device.type, enabled=False):
                    return self.linear(x.float()) if inside else x

    graph = trace(built(Own(), torch.ones(3, 8)))
    assert [op.inputs[0].dtype for op in graph.ops if op.name == "aten.addmm"] == ["bfloat16", "float32"]


# Calls by hand from torch/optim: the foreach implementations on CUDA for parameters of one type.
FOREACH = {
    "sgd": ["_foreach_add_"],
    "adagrad": ["_foreach_addcmul_", "_foreach_sqrt", "_foreach_add_", "_foreach_mul", "_foreach_addcdiv_"],
    "adam": [
        "_foreach_lerp_",
        "_foreach_mul_",
        "_foreach_addcmul_",
        "_foreach_sqrt",
        "_foreach_div_",
        "_foreach_add_",
        "_foreach_addcdiv_",
    ],
}


@pytest.mark.parametrize("values", ["meta", "real"])
@pytest.mark.parametrize("optimizer", FOREACH)
def test_optimizers_step_all_parameters_at_once_on_cuda(optimizer, values):
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    graph = trace(built(module, torch.ones(3, 8), optimizer=optimizer), values=values)
    steps = [name for name in names(graph, "optimizer") if name != "lift_fresh"]
    assert steps == FOREACH[optimizer]
    first = next(op for op in graph.ops if op.name == f"aten.{FOREACH[optimizer][0]}")
    assert len(first.args("self")) == 4


def test_a_fused_optimizer_is_one_call():
    graph = trace(built(nn.Linear(8, 8), torch.ones(3, 8), optimizer="adamw", optimizer_kwargs={"fused": True}))
    assert names(graph, "optimizer") == ["_foreach_add_", "_fused_adamw_"]


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_tables_updated_in_backward_have_no_gradient_and_no_optimizer_ops(optimizer):
    spec = {
        "name": "d",
        "batch_size": 4,
        "dense_features": 3,
        "bottom_mlp": (8,),
        "top_mlp": (1,),
        "embedding_dim": 8,
        "tables": ({"rows": 10}, {"rows": 20, "pooling_factor": (3.0,)}),
    }
    apart, fused = (
        trace(build(DlrmSpec(**spec, sparse_optimizer={"name": optimizer, "fused": fuse}))) for fuse in (False, True)
    )
    kernels = [op for op in fused.ops if "batched_embedding" in op.name]
    assert [(op.phase, op.module[-2:]) for op in kernels] == [
        ("forward", "t0"),
        ("forward", "t1"),
        ("backward", "t1"),
        ("backward", "t0"),
    ]
    assert [op.attrs["tables"][0]["rows"] for op in kernels] == [10, 20, 20, 10]
    assert {op.attrs["optimizer"] for op in kernels} == {optimizer}
    assert [op.id for op in fused.ops] == list(range(len(fused.ops)))
    weights = {p.name: p for p in fused.parameters if p.sparse_grad}
    for op in kernels[2:]:
        parameter = weights[op.attrs["parameter"]]
        assert op.outputs[0] == parameter.tensor
        assert parameter.grad_op == op.id
    tables = {p.tensor.storage for p in weights.values()}
    assert not [op for op in fused.ops if op.phase == "optimizer" and tables & {s.storage for s in op.inputs}]
    assert [n for n in names(apart) if "sparse" not in n and "coalesce" not in n].count("_foreach_add_") == 1
    dense = [p.name for p in fused.parameters if not p.sparse_grad]
    after = {p.name: [op.name for op in fused.ops[: p.grad_op + 1]][-1] for p in fused.parameters if p.name in dense}
    before = {p.name: [op.name for op in apart.ops[: p.grad_op + 1]][-1] for p in apart.parameters if p.name in dense}
    assert after == before
    state = [s.bytes for s in fused.storages if s.kind == "optimizer_state"]
    assert state == ([] if optimizer == "sgd" else [10 * 4, 20 * 4])
    assert sum(s.bytes for s in fused.storages) < sum(s.bytes for s in apart.storages)
