"""What a layer's tensor-parallel ranks move with sequence parallelism, in closed form: one gather a value and pass.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2): a pair of a column- and a row-parallel block gathers its input and
scatters its output forward; backward gathers the output's gradient, scatters the input's, and gathers the input once more for
the gradients of weights. Each moves s b h elements however many linears read the input.
"""

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from perfmodel.api import extract_graph
from perfmodel.config import load_model
from perfmodel.config.plan import TensorParallel
from perfmodel.extract import trace
from perfmodel.graph import Graph, Op, TensorSpec
from perfmodel.kernels import work
from perfmodel.models import build
from perfmodel.plan.tensor_parallel import tensor_parallel
from perfmodel.plan.values import Values

S, B, H, FFN = 32, 2, 96, 160
HIDDEN_BYTES = 2 * S * B * H
COMMON: dict[str, Any] = {
    "kind": "transformer", "name": "tiny", "batch_size": B, "precision": "bf16", "optimizer": "adamw", "vocab_size": 256,
    "hidden_size": H, "heads": 4, "max_positions": S,
}  # fmt: skip
LLAMA = {"architecture": "llama", "kv_heads": 4, "ffn_size": FFN}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, grouped queries": {**LLAMA, "kv_heads": 4, "heads": 8},
    "llama of Megatron-LM": {**LLAMA, "implementation": "megatron"},
    "llama under autocast": {**LLAMA, "precision": "amp_bf16"},
    "gpt2": {"architecture": "gpt2"},
    "opt": {"architecture": "opt"},
    "bert": {"architecture": "bert"},
    "mixtral": {"architecture": "mixtral", "kv_heads": 4, "ffn_size": FFN, "experts": 4, "experts_per_token": 2},
}
PAIRS = 2  # of a layer: attention and feed-forward
DENSE = ("llama", "llama, grouped queries", "llama of Megatron-LM", "gpt2", "opt", "bert")


def traced(model: dict[str, Any]) -> Graph:
    return trace(build(load_model(model)))


@cache
def whole(name: str, layers: int) -> Graph:
    return traced({**COMMON, **MODELS[name], "layers": layers})


def collectives(graph: Graph, inside: str = "") -> Counter[tuple[str, str, int]]:
    """How many of which kind in which phase, with their bytes; in modules whose path contains a text."""
    return Counter(
        (op.phase, op.name.removeprefix("perfmodel."), op.attrs["bytes"])
        for op in graph.ops
        if "group" in op.attrs and inside in op.module
    )


def of_layers(name: str, graphs: tuple[Graph, Graph]) -> Counter[tuple[str, str, int]]:
    """What one more layer adds to what a rank issues, without the one sum of the gradients of shared weights."""
    fewer, more = (collectives(graph) for graph in graphs)
    assert not fewer - more or {key[1] for key in fewer - more} == {"all_reduce"}, name
    return Counter({key: n for key, n in (more - fewer).items() if key[1] != "all_reduce"})


def layer(name: str, n: int, **options: bool) -> Counter[tuple[str, str, int]]:
    plan = TensorParallel(**{"sequence": True, **options})
    one, two = (tensor_parallel(whole(name, layers), plan, n) for layers in (1, 2))
    return of_layers(name, (one, two))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", DENSE)
def test_a_layer_moves_what_korthikanti_counts(name: str, n: int) -> None:
    assert layer(name, n) == {
        ("forward", "all_gather", HIDDEN_BYTES): PAIRS,
        ("forward", "reduce_scatter", HIDDEN_BYTES): PAIRS,
        ("backward", "all_gather", HIDDEN_BYTES): 2 * PAIRS,
        ("backward", "reduce_scatter", HIDDEN_BYTES): PAIRS,
    }


@pytest.mark.parametrize("name", DENSE)
def test_without_sequence_parallelism_a_layer_has_four_all_reduces(name: str) -> None:
    """Shoeybi et al. 2019 (arXiv:1909.08053, section 3): two forward and two backward."""
    counts = [collectives(tensor_parallel(whole(name, layers), TensorParallel(), 2)) for layers in (1, 2)]
    assert counts[1] - counts[0] == {
        ("forward", "all_reduce", HIDDEN_BYTES): PAIRS,
        ("backward", "all_reduce", HIDDEN_BYTES): PAIRS,
    }


def test_separate_projections_move_what_megatrons_joint_ones_do() -> None:
    assert layer("llama", 2) == layer("llama of Megatron-LM", 2)


def test_attention_of_a_mixture_is_a_pair() -> None:
    found = collectives(tensor_parallel(whole("mixtral", 2), TensorParallel(sequence=True), 2), "self_attn")
    assert {key: n for key, n in found.items() if key[1] == "all_gather"} == {
        ("forward", "all_gather", HIDDEN_BYTES): 2,
        ("backward", "all_gather", HIDDEN_BYTES): 4,
    }


def test_as_many_rows_as_features_are_told_apart() -> None:
    """Of a mixture's rows (tokens x experts, features) the features were once taken for tokens where both are as many."""
    square = {**MODELS["mixtral"], "hidden_size": S * B, "layers": 2}
    graph = tensor_parallel(traced({**COMMON, **square}), TensorParallel(sequence=True), 2)
    found = collectives(graph, ".mlp")
    rows = 2 * (2 * S * B) * (S * B)  # two experts a token
    assert found == {
        ("forward", "all_gather", rows): 2,
        ("forward", "all_reduce", rows): 2,
        ("backward", "all_gather", rows): 2,
        ("backward", "all_reduce", rows): 2,
    }


def test_casts_of_one_value_share_a_gather() -> None:
    """Under autocast every linear casts its input by itself; what they cast is gathered once."""
    gathers = {key: n for key, n in layer("llama under autocast", 2).items() if key[1] == "all_gather"}
    assert gathers == {
        ("forward", "all_gather", HIDDEN_BYTES): PAIRS,
        ("backward", "all_gather", HIDDEN_BYTES): 2 * PAIRS,
    }


class Branches(torch.nn.Module):
    """Three readers of one value, two of them through views, in a layer of a user's own names."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(256, H)
        self.norm = torch.nn.LayerNorm(H)
        self.one, self.two, self.three = (torch.nn.Linear(H, FFN) for _ in range(3))
        self.out = torch.nn.Linear(FFN, H)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        y = self.norm(x)
        flat = y.reshape(-1, H)
        gate = torch.sigmoid(self.one(y)) * self.two(flat).reshape(B, S, FFN) + self.three(y.detach()).relu()
        return x + self.out(gate)


@cache
def branches() -> Graph:
    ids = torch.zeros(B, S, dtype=torch.int64)
    return extract_graph(Branches(), inputs=ids, loss=lambda out: out.float().square().mean())


USERS = {"column": ("one", "two", "three"), "row": ("out",), "vocabulary": ("words",), "sequence": True}


def test_a_users_module_is_a_pair() -> None:
    found = collectives(tensor_parallel(branches(), TensorParallel(**USERS), 2))
    hidden = 2 * HIDDEN_BYTES  # fp32
    assert {key: n for key, n in found.items() if key[1] != "all_reduce"} == {
        ("forward", "all_gather", hidden): 1,
        ("forward", "reduce_scatter", hidden): 2,  # one of the embedding
        ("backward", "all_gather", hidden): 3,
        ("backward", "reduce_scatter", hidden): 1,
    }


def test_a_gathered_buffer_lives_from_its_gather_to_its_last_reader() -> None:
    graph = tensor_parallel(whole("llama", 2), TensorParallel(sequence=True), 2)
    storages = {storage.id: storage for storage in graph.storages}
    for op in graph.ops:
        if op.name == "perfmodel.all_gather":
            readers = [o.id for o in graph.ops if any(s.storage == op.outputs[0].storage for s in o.inputs)]
            buffer = storages[op.outputs[0].storage]
            assert (buffer.born, buffer.dies) == (op.id, readers[-1])
            assert {graph.ops[i].phase for i in readers} == {op.phase}
            assert buffer.bytes == HIDDEN_BYTES


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_every_storage_lives_as_long_as_it_is_touched(name: str) -> None:
    """Additions that come later than in the model's own graph keep what they add."""
    for options in ({}, {"sequence": True}, {"sequence": True, "async_tp": True}):
        graph = tensor_parallel(whole(name, 2), TensorParallel(**options), 2)
        last = {s.storage: op.id for op in graph.ops for s in (*op.inputs, *op.outputs)}
        short = [s.id for s in graph.storages if s.kind == "activation" and s.dies < last.get(s.id, -1)]
        assert not short, options


def test_products_of_one_gathered_matrix_are_cut_together() -> None:
    """Query, key and value, and gate and up across the SiLU between them: one ring each, a piece of every product a step."""
    n = 4
    graph = tensor_parallel(whole("llama", 2), TensorParallel(sequence=True, async_tp=True), n)
    ops = [op for op in graph.ops if ".layers.1." in op.module and op.phase == "forward"]
    steps = [i for i, op in enumerate(ops) if op.name == "perfmodel.send_recv" and "self_attn" in op.module]
    beside = [[op.module.rpartition(".")[2] for op in ops[i + 1 : i + 4]] for i in steps[: n - 1]]
    assert beside == [["q_proj", "k_proj", "v_proj"]] * (n - 1)
    feed = [op for op in ops if ".mlp" in op.module and op.name in ("perfmodel.send_recv", "aten.mm", "aten.silu")]
    order = ["send_recv" if "send" in op.name else op.module.rpartition(".")[2] for op in feed]
    ring = ["send_recv", "gate_proj", "up_proj"] * (n - 1) + ["gate_proj", "up_proj", "act_fn"]
    assert order[: len(ring)] == ring
    blocking = tensor_parallel(whole("llama", 2), TensorParallel(sequence=True), n)
    flops = [sum(work(op).flops for op in g.ops if op.name in ("aten.mm", "aten.addmm")) for g in (blocking, graph)]
    assert flops[0] == flops[1]


def spec(number: int, storage: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(id=number, shape=(4,), dtype=dtype, strides=(1,), storage=storage)


def op(name: str, inputs: tuple[TensorSpec, ...], output: TensorSpec) -> Op:
    return Op(id=0, name=name, inputs=inputs, input_names=("self",) * len(inputs), outputs=(output,), phase="forward")


def test_a_written_tensor_has_a_new_value() -> None:
    values = Values()
    x, view, part, cast, again = spec(1, 1), spec(2, 1), spec(3, 1), spec(4, 4, "float16"), spec(5, 5, "float16")
    for name, source, result in (
        ("view", x, view),
        ("slice", x, part),
        ("_to_copy", x, cast),
        ("_to_copy", view, again),
    ):
        values.follow(op(f"aten.{name}", (source,), result))
    assert values.of(x) == values.of(view)
    assert values.of(cast) == values.of(again)
    assert len({values.of(each) for each in (x, part, cast)}) == 3
    before = values.of(x)
    values.follow(op("aten.add_", (view, cast), view))
    assert values.of(x) != before
    assert values.of(cast) == values.of(again)
    third = spec(6, 6, "float16")
    values.follow(op("aten._to_copy", (x,), third))
    assert values.of(third) != values.of(cast)
