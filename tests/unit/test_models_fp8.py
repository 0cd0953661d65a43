"""FP8 products of Megatron's layers: values on the CPU, what is recorded and priced, how tensor parallelism splits them."""

import pytest
import torch

from perfmodel.api import Predictor, extract_graph
from perfmodel.db import load_device
from perfmodel.errors import ConfigError
from perfmodel.estimate import Source
from perfmodel.kernels import price
from perfmodel.models.fp8 import Fp8Linear

MODEL = {
    "kind": "transformer", "name": "m", "architecture": "llama", "implementation": "megatron", "batch_size": 1,
    "precision": "bf16", "vocab_size": 512, "hidden_size": 256, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_size": 512,
    "max_positions": 128, "products": "fp8",
}  # fmt: skip


def test_values_are_those_of_rounded_factors():
    torch.manual_seed(0)
    layer = Fp8Linear(48, 32)
    x = torch.randn(8, 48, requires_grad=True)
    gradient = torch.randn(8, 32)
    out = layer(x)
    out.backward(gradient)
    x8, w8 = (t.detach().to(torch.float8_e4m3fn).float() for t in (x, layer.weight))
    g8 = gradient.to(torch.float8_e5m2).float()
    torch.testing.assert_close(out, x8 @ w8.t() + layer.bias)
    torch.testing.assert_close(x.grad, g8 @ w8)
    torch.testing.assert_close(layer.weight.grad, g8.t() @ x8)
    torch.testing.assert_close(layer.bias.grad, gradient.sum(0))
    near = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert (out - near).norm() < 0.05 * near.norm()


def test_a_layer_has_four_products_forward_and_eight_backward():
    graph = extract_graph(MODEL)
    found = [op for op in graph.ops if op.name == "perfmodel.fp8_product"]
    assert [sum(op.phase == phase for op in found) for phase in ("forward", "backward")] == [2 * 4, 2 * 8]
    casts = [op for op in graph.ops if op.name == "perfmodel.cast_transpose"]
    assert [sum(op.phase == phase for op in casts) for phase in ("forward", "backward")] == [2 * 4, 2 * 4]


def test_frozen_weights_have_no_gradient_and_no_transposes():
    graph = extract_graph({**MODEL, "lora_rank": 8})
    names = [op.name for op in graph.ops if op.phase == "backward"]
    assert names.count("perfmodel.fp8_product") == 2 * 4 - 1  # nothing before the first layer is trained
    assert "perfmodel.cast_transpose" not in names


def test_products_are_derived_from_the_datasheets_ratio():
    device = load_device("h100_sxm")
    sizes = {"hidden_size": 8192, "ffn_size": 28672, "heads": 64, "kv_heads": 64, "layers": 1, "max_positions": 4096}

    def largest(products, name):
        ops = [op for op in extract_graph({**MODEL, **sizes, "products": products}).ops if op.name == name]
        return max((estimates[0] for estimates in price(ops, device)), key=lambda e: e.time_s)

    narrow, wide = largest("fp8", "perfmodel.fp8_product"), largest("own", "aten.mm")
    # 8 TFLOP at 1979 and 989 TFLOP/s: twice as fast at the same share of the peak.
    assert narrow.source is Source.DERIVED
    assert wide.time_s / narrow.time_s == pytest.approx(2.0, rel=0.15)


def test_tensor_parallel_ranks_exchange_what_they_do_without_fp8():
    def volumes(products):
        run = Predictor(model={**MODEL, "products": products}, topology="dgx_h100").run("tp=2,dp=4")
        events = [e for lowered in run.classes for e in lowered.rank_class.events if e.collective is not None]
        return sorted((e.collective.op, e.collective.bytes, e.phase) for e in events)

    assert volumes("fp8") == volumes("own")


def test_buckets_hold_gradients_of_what_is_trained_alone():
    predictor = Predictor(model={**MODEL, "lora_rank": 8}, topology="dgx_h100")
    trained = sum(p.tensor.bytes for p in predictor.graph().parameters if "lora_" in p.name)
    assert predictor.predict("dp=8").ranks[0].memory.communication_bytes == trained
    assert predictor.predict("dp=4,tp=2,sequence=true").ranks[0].memory.communication_bytes < trained


def test_only_megatrons_layers_know_fp8():
    with pytest.raises(ConfigError, match="products: found fp8 with implementation huggingface"):
        extract_graph({**MODEL, "implementation": "huggingface"})
