"""Shipped models against published sizes; what a build costs; how values are drawn."""

import json
import resource
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from perfmodel.config import list_configs, load_model
from perfmodel.models import build, make_optimizers, materialize

SHARED = Path(__file__).parents[2].parent / "shared"

# Published parameter counts: the checkpoints' model cards on Hugging Face (exact counts of their weights), torchvision's
# weight tables, Brown et al. 2020 (175B: 174,600 million in table 2.1, with the embedding).
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2_large": 774_030_080,
    "gpt3_175b": 174_604_259_328,
    "bert_base": 110_106_428,
    "bert_large": 336_226_108,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "opt_1_3b": 1_315_758_080,
    "resnet50": 25_557_032,
    "resnext50": 25_028_904,
}
RESNETS = {18: 11_689_512, 34: 21_797_672, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize(("name", "published"), PARAMETERS.items())
def test_parameter_counts_are_the_published_ones(name, published):
    assert build(load_model(name)).n_parameters == published


@pytest.mark.parametrize(("depth", "published"), RESNETS.items())
def test_resnets_have_the_published_parameters(depth, published):
    spec = load_model({"kind": "vision", "name": "r", "depth": depth, "batch_size": 2})
    assert build(spec).n_parameters == published


# Multiply-adds of one 224x224 image in billions: torchvision's weight tables.
@pytest.mark.parametrize(("name", "gmacs"), [("resnet50", 4.09), ("resnext50", 4.23)])
def test_resnets_have_the_published_work(name, gmacs):
    built = build(load_model(name, {"batch_size": 1, "precision": "fp32"}))
    with FlopCounterMode(display=False) as counter:
        built.module.eval()(*built.args)
    assert counter.get_total_flops() / 2e9 == pytest.approx(gmacs, abs=0.006)


@pytest.mark.parametrize("name", list_configs("models"))
def test_every_shipped_model_builds_on_meta(name):
    built = build(load_model(name))
    tensors = (*built.module.parameters(), *built.module.buffers(), *built.input_tensors)
    assert all(tensor.is_meta for tensor in tensors)
    assert built.module.training
    assert built.name == name


def test_175_billion_parameters_take_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    build(load_model("gpt3_175b"))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib * 1024 < 1e9


def test_dlrm_is_the_mlperf_model():
    path = SHARED / "data" / "models" / "recsys_model_specs.json"
    if not path.exists():
        pytest.skip("shared/ is absent: the MLPerf specification cannot be compared")
    logged = json.loads(path.read_text())["mlperf_v07_pytorch_dlrm"]
    spec = load_model("dlrm")
    assert [table.rows for table in spec.expanded_tables] == logged["table_rows"]
    assert list(spec.bottom_mlp) == logged["bottom_mlp"]
    assert list(spec.top_mlp) == logged["top_mlp"]
    assert spec.batch_size * 8 == logged["global_batch"]
    built = build(spec)
    assert built.module.over_arch[0].in_features == 480
    assert {table.parameter for table in built.tables} < {name for name, _ in built.module.named_parameters()}


SMALL = {
    "dlrm": {
        "kind": "dlrm",
        "name": "d",
        "dense_features": 3,
        "bottom_mlp": [5, 4],
        "top_mlp": [6, 1],
        "embedding_dim": 4,
        "batch_size": 6,
        "tables": [10, {"rows": 20, "pooling_factor": [2, 3]}, {"rows": 30, "weighted": True, "pooling_factor": 2.5}],
    },
    "vision": {"kind": "vision", "name": "v", "depth": 18, "batch_size": 2, "image_size": 32, "classes": 5},
    "gpt2": {
        "kind": "transformer",
        "name": "g",
        "architecture": "gpt2",
        "vocab_size": 40,
        "hidden_size": 8,
        "layers": 2,
        "heads": 2,
        "max_positions": 8,
        "batch_size": 2,
    },
}


@pytest.mark.parametrize("kind", SMALL)
def test_materialized_models_have_the_shapes_of_the_built_ones_and_are_deterministic(kind):
    built = build(load_model(SMALL[kind]))
    first, second, other = (materialize(built, seed) for seed in (1, 1, 2))
    for ours in ("module", "input_tensors"):
        shapes = [
            [(tuple(t.shape), t.dtype) for t in (b.module.parameters() if ours == "module" else b.input_tensors)]
            for b in (built, first)
        ]
        assert shapes[0] == shapes[1]
    same = zip(first.input_tensors, second.input_tensors, strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert any(not torch.equal(a, b) for a, b in zip(first.input_tensors, other.input_tensors, strict=True))
    losses = [float(b.loss(b.module(*b.args)).detach()) for b in (first, second)]
    assert losses[0] == losses[1]


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    materialize(build(load_model(SMALL["gpt2"])), 1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own Adagrad says so, once
@pytest.mark.parametrize("sparse", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("dense", ["sgd", "adagrad", "adam", "adamw"])
def test_every_optimizer_trains(dense, sparse):
    built = build(load_model({**SMALL["dlrm"], "optimizer": dense, "sparse_optimizer": sparse}))
    real = materialize(built, 3)
    optimizers = make_optimizers(real)
    assert len(optimizers) == 2
    before = [p.detach().clone() for p in real.module.parameters()]
    real.loss(real.module(*real.args)).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, real.module.parameters(), strict=True))


def test_rowwise_adagrad_is_the_formula():
    """Row r: s += mean(g^2); w -= lr * g / (sqrt(s) + eps), with g summed over repeated rows."""
    from perfmodel.models.training import RowwiseAdagrad

    weight = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = RowwiseAdagrad([weight], lr=0.1, eps=1e-8)
    weight.grad = torch.sparse_coo_tensor([[1, 3, 1]], [[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]], (4, 2))
    optimizer.step()
    # Row 1: g = (1, 3), s = 5. Row 3: g = (2, 0), s = 2.
    expected = torch.ones(4, 2)
    expected[1] -= 0.1 * torch.tensor([1.0, 3.0]) / 5**0.5
    expected[3] -= 0.1 * torch.tensor([2.0, 0.0]) / 2**0.5
    torch.testing.assert_close(weight.detach(), expected)


def test_bf16_models_are_bf16_and_autocast_ones_are_not():
    for precision, dtype in (("bf16", torch.bfloat16), ("amp_bf16", torch.float32), ("tf32", torch.float32)):
        built = build(load_model({**SMALL["gpt2"], "precision": precision}))
        assert {p.dtype for p in built.module.parameters()} == {dtype}


def test_checkpointing_recomputes_and_gives_the_same_gradients():
    plain, saved = (
        materialize(build(load_model({**SMALL["gpt2"], "gradient_checkpointing": on})), 1) for on in (False, True)
    )
    assert saved.checkpointing
    assert not plain.checkpointing
    for built in (plain, saved):
        built.loss(built.module(*built.args)).backward()
    for a, b in zip(plain.module.parameters(), saved.module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    work = []
    for built in (plain, saved):
        with FlopCounterMode(display=False) as counter:
            built.loss(built.module(*built.args)).backward()
        work.append(counter.get_total_flops())
    assert work[1] > work[0]
