"""Modules as users write them: shared and frozen parameters, custom gradients, devices, recurrent nets, mistakes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from perfmodel.errors import GraphError
from perfmodel.extract import trace
from perfmodel.models import BuiltModel

X = (3, 8)


def built(module: nn.Module, *args, loss=None, **fields) -> BuiltModel:
    return BuiltModel(
        name="user",
        module=module,
        args=args or (torch.ones(X),),
        loss=loss or (lambda out: out.sum()),
        **fields,
    )


def names(graph, phase=None):
    return [op.name for op in graph.ops if phase in (None, op.phase)]


def rows(graph):
    return [(op.phase, op.name, op.module, tuple(t.shape for t in (*op.inputs, *op.outputs))) for op in graph.ops]


def same_on_cpu(module: nn.Module, *args, **fields):
    """Traces on meta and for real; both must dispatch the same. Returns the first."""
    meta, real = (trace(built(module, *args, **fields), target="cpu", values=v) for v in ("meta", "real"))
    assert rows(meta) == rows(real)
    return meta


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_a_shared_parameter_appears_once_and_is_ready_at_its_last_use():
    graph = same_on_cpu(Shared())
    assert [p.name for p in graph.parameters] == ["first.weight", "first.bias", "second.bias"]
    assert names(graph, "backward").count("aten.add") == 1
    ready = {p.name: p.grad_op for p in graph.parameters}
    assert ready["second.bias"] < ready["first.weight"]


def test_a_frozen_parameter_has_no_gradient():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[0].requires_grad_(False)
    graph = same_on_cpu(module)
    assert [p.grad_op is None for p in graph.parameters] == [True, True, False, False]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class CustomGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return Cube.apply(self.layer(x))


def test_a_custom_gradient_belongs_to_its_module():
    graph = same_on_cpu(CustomGradient())
    powers = [op for op in graph.ops if op.name == "aten.pow"]
    assert [(op.phase, op.module) for op in powers] == [("forward", ""), ("backward", "")]
    assert {op.module for op in graph.ops if op.phase == "backward" and op.name == "aten.mm"} == {"layer"}


class Devices(nn.Module):
    """Allocates in forward, on the default device, on the input's and on `cuda`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.plain = torch.ones(8)

    def forward(self, x):
        x = x + torch.arange(8) + torch.zeros(8, device=x.device) + torch.tensor([1.0] * 8)
        x = x.to(x.device) * self.scale.to(x) + self.plain
        with torch.no_grad():
            shift = x.mean()
        return self.layer(x - shift)


def test_tensors_made_in_forward_land_on_the_traced_device():
    graph = trace(built(Devices()))
    assert "aten.arange" in names(graph)
    assert all(p.grad_op is not None for p in graph.parameters)


class OnCuda(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        mask = torch.ones(8, device="cuda") + torch.zeros(8).cuda() + torch.zeros(8).to("cuda:0")
        return self.layer(x * mask.to(device=torch.device("cuda")))


@pytest.mark.parametrize("values", ["meta", "real"])
def test_a_model_that_names_cuda_is_traced_without_one(values):
    graph = trace(built(OnCuda()), values=values)
    assert names(graph).count("aten.addmm") == 1


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.outer = nn.Linear(8, 8)

    def block(self, x):
        return self.outer(checkpoint(self.inner, x, use_reentrant=False)).relu()

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.parametrize("module", [Nested(), Reentrant()])
def test_checkpointing_marks_what_is_redone(module):
    x = torch.ones(X, requires_grad=True)
    graph = same_on_cpu(module, x)
    redone = [op for op in graph.ops if op.recompute]
    assert {op.phase for op in redone} == {"backward"}
    assert {op.name for op in redone} >= {"aten.addmm", "aten.tanh"}
    assert not any("backward" in op.name or op.name == "aten.mm" for op in redone)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(4, 3, 2, stride=2),
            nn.Upsample(scale_factor=2),
        )

    def forward(self, x):
        return self.net(x).flatten(1).t().contiguous()


def test_convolutions_in_place_ops_and_views():
    graph = same_on_cpu(Images(), torch.ones(2, 3, 8, 8))
    relu = next(op for op in graph.ops if op.name == "aten.relu_")
    assert relu.inputs[0].storage == relu.outputs[0].storage


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_net_is_one_kernel_on_cuda(kind):
    module = kind(8, 16, num_layers=2)
    graph = trace(built(module, torch.ones(5, 2, 8), loss=lambda out: out[0].sum()))
    assert names(graph, "forward").count("aten._cudnn_rnn") == 1
    assert names(graph, "backward").count("aten._cudnn_rnn_backward") == 1
    assert "rnn" in graph.rewrites
    assert all(p.grad_op is not None for p in graph.parameters)


def test_tuple_outputs_and_a_loss_module():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, *, x):
            return self.layer(x), x

    target = torch.zeros(3, dtype=torch.long, device="meta")
    criterion = nn.CrossEntropyLoss()
    model = BuiltModel(
        name="pair",
        module=Pair(),
        kwargs={"x": torch.ones(X)},
        loss=lambda out: criterion(out[0], target),
        targets=(target,),
    )
    graph = trace(model)
    assert [op.module for op in graph.ops if op.phase == "loss"] == ["CrossEntropyLoss"] * 2
    assert names(graph, "input") == ["perfmodel.host_to_device_copy"] * 2
    assert {op.stream for op in graph.ops if op.phase == "input"} == {"copy"}


def test_inference_has_no_backward():
    graph = trace(built(nn.Linear(8, 8)), span="forward")
    assert {op.phase for op in graph.ops} == {"forward"}


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 8)

    def forward(self, x):
        return self.layer(x)


class Raises(nn.Module):
    def forward(self, x):
        raise KeyError("missing")


class Sizes(nn.Module):
    def forward(self, x):
        return x[x > 0].sum()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Wrong(), ("forward failed in module layer", "test_extract_user_modules.py", "self.layer(x)", "RuntimeError")),
        (Raises(), ("module Raises", "raise KeyError", "KeyError: 'missing'")),
        (Sizes(), ("module Sizes", "x[x > 0].sum()", "--values real")),
    ],
)
def test_a_failing_module_is_named_in_one_line(module, words):
    with pytest.raises(GraphError) as raised:
        trace(built(module))
    text = str(raised.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out: out, "the loss must be a scalar tensor, found a tensor of shape (3, 8)"),
        (lambda out: 1.0, "found float"),
        (lambda out: out.sum().detach(), "depends on no parameter"),
        (lambda out: out.nothing, "the loss failed in"),
    ],
)
def test_a_wrong_loss_is_one_line(loss, words):
    with pytest.raises(GraphError, match="the loss") as raised:
        trace(built(nn.Linear(8, 8), loss=loss))
    assert words in str(raised.value)


@pytest.mark.parametrize("field", ["optimizer", "sparse_optimizer"])
def test_an_unknown_optimizer_names_the_known_ones(field):
    module = nn.EmbeddingBag(10, 4, sparse=True) if field == "sparse_optimizer" else nn.Linear(8, 8)
    args = (torch.zeros(3, 2, dtype=torch.long),) if field == "sparse_optimizer" else (torch.ones(X),)
    with pytest.raises(GraphError, match=f"{field}: found 'adagrat', allowed .*did you mean 'adagrad'"):
        trace(built(module, *args, **{field: "adagrat"}))


def test_no_state_is_left_behind_after_a_failure():
    with pytest.raises(GraphError):
        trace(built(Wrong(), precision="amp_bf16"))
    assert not torch.is_autocast_enabled("cuda")
    assert torch.ones(2).device.type == "cpu"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
