"""What the CPU's law reads of an op, against counts by hand."""

import numpy as np
import pytest

from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels.cpu_features import LANES, TABLE_GRAIN, accesses, cpu_call, gradient_rows, op_key
from perfmodel.kernels.cpu_memory import warm
from perfmodel.validate.train import N_BATCHES, batches

CACHE_BYTES = 32.0 * 2**20


def spec(index: int, *shape: int, dtype: str = "float32") -> TensorSpec:
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return TensorSpec(id=index, shape=shape, dtype=dtype, strides=strides, storage=index)


def softmax(rows: int, columns: int) -> Op:
    sides = spec(0, rows, columns), spec(1, rows, columns)
    return Op(id=0, name="aten._softmax", inputs=sides[:1], input_names=("self",), outputs=sides[1:], attrs={"dim": -1})


def features(op: Op) -> dict[str, float]:
    return dict(cpu_call(op, warm(op), None, CACHE_BYTES).features)


@pytest.mark.parametrize(
    ("columns", "tails", "narrow"), [(LANES, 0.0, 0.0), (LANES + 4, 7.0, 0.0), (LANES - 4, 0.0, 7.0 * (LANES - 4))]
)
def test_rows_that_do_not_fill_vectors(columns: int, tails: float, narrow: float) -> None:
    found = features(softmax(7, columns))
    assert (found["tails"], found["narrow"], found["parts"]) == (tails, narrow, 7.0)


def test_lanes_of_a_product_are_those_of_its_last_vector() -> None:
    a, b, c = spec(0, 8, 32), spec(1, 32, 20), spec(2, 8, 20)
    op = Op(id=0, name="aten.mm", inputs=(a, b), input_names=("self", "mat2"), outputs=(c,))
    found = features(op)
    assert found["lanes_n"] == pytest.approx(32 / 20)
    assert found["lanes_k"] == 1.0


def gradient(lookups: int, table_rows: int, *, sparse: bool = False) -> Op:
    grad, indices, out = spec(0, 4, 8), spec(1, lookups, dtype="int64"), spec(2, table_rows, 8)
    attrs = {"num_weights": table_rows, "sparse": sparse}
    names = ("grad", "indices")
    return Op(
        id=1,
        name="aten._embedding_bag_backward",
        inputs=(grad, indices),
        input_names=names,
        outputs=(out,),
        attrs=attrs,
    )


def test_a_gradient_names_the_rows_that_its_lookups_drew() -> None:
    lookup = Op(
        id=0,
        name="aten._embedding_bag",
        inputs=(spec(5, 3000, 8), spec(1, 2000, dtype="int64")),
        input_names=("weight", "indices"),
        outputs=(spec(6, 4, 8),),
        attrs={"zipf_exponent": 1.2},
    )
    op = gradient(2000, 3000)
    generator = np.random.default_rng(0)
    weight = np.arange(1, 3001) ** -1.2
    drawn = [np.unique(generator.choice(3000, 2000, p=weight / weight.sum())).size for _ in range(200)]
    assert gradient_rows(op, accesses([lookup])) == pytest.approx(np.mean(drawn), rel=0.01)
    uniform = [np.unique(generator.integers(0, 3000, 2000)).size for _ in range(200)]
    assert gradient_rows(op, {}) == pytest.approx(np.mean(uniform), rel=0.01)
    assert gradient_rows(softmax(2, 2), {}) == 0.0


def test_a_dense_gradient_has_threads_by_rows_of_the_table() -> None:
    def parts(lookups: int, rows: int) -> float:
        grad, indices, out = spec(0, lookups, 8), spec(1, lookups, dtype="int64"), spec(2, rows, 8)
        names = ("grad_output", "indices")
        op = Op(id=0, name="aten.embedding_dense_backward", inputs=(grad, indices), input_names=names, outputs=(out,))
        return features(op)["parts"]

    assert parts(TABLE_GRAIN + 1, 3 * TABLE_GRAIN) == 3.0
    assert parts(TABLE_GRAIN + 1, 500) == parts(50, 9 * TABLE_GRAIN) == 1.0


def test_grouped_convolutions_are_a_loop_of_their_own() -> None:
    image, weight, out = spec(0, 1, 8, 4, 4), spec(1, 8, 1, 3, 3), spec(2, 1, 8, 4, 4)
    names = ("input", "weight")
    op = Op(
        id=0, name="aten.convolution", inputs=(image, weight), input_names=names, outputs=(out,), attrs={"groups": 8}
    )
    assert op_key(op) == "convolution_grouped"


def test_batches_of_a_live_dlrm_name_other_rows() -> None:
    tables = [{"rows": 5000, "count": 2, "pooling_factor": 3}]
    model = {"kind": "dlrm", "name": "d", "batch_size": 16, "dense_features": 4, "bottom_mlp": [8], "top_mlp": [4, 1],
             "embedding_dim": 8, "tables": tables}  # fmt: skip
    drawn = batches(model)
    first = {tuple(args[1][0].tolist()) for args, _ in drawn}
    assert len(first) == len(drawn) == N_BATCHES
    assert batches({"kind": "vision", "name": "r", "depth": 18, "batch_size": 2, "classes": 4}) == ()
