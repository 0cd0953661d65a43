"""The DLRM module against loops that follow the paper, and drawn indices against their distributions."""

import itertools

import numpy as np
import pytest
import torch

from perfmodel.config import load_model
from perfmodel.config.dlrm import Distribution
from perfmodel.models import build, materialize
from perfmodel.models.indices import draw_indices, draw_lengths, offsets_of

BASE = {
    "kind": "dlrm",
    "name": "d",
    "dense_features": 3,
    "bottom_mlp": [5, 4],
    "top_mlp": [6, 1],
    "embedding_dim": 4,
    "batch_size": 6,
    "tables": [
        10,
        {"name": "shared", "rows": 20, "pooling_factor": [2, 3]},
        {"name": "w", "rows": 30, "weighted": True, "pooling_factor": 2.5, "ragged": True},
    ],
}


def real(**changes):
    return materialize(build(load_model({**BASE, **changes})), 7)


def looked_up(built):
    """(batch, dim) of every feature by loops over bags."""
    _, indices, offsets, weights = built.args
    vectors = []
    for bag, index, offset, weight in zip(
        built.module.sparse_arch.embedding_bags.values(), indices, offsets, weights, strict=True
    ):
        ends = [*offset.tolist()[1:], len(index)]
        rows = []
        for start, end in zip(offset.tolist(), ends, strict=True):
            total = torch.zeros(bag.embedding_dim)
            for position in range(start, end):
                scale = 1.0 if weight is None else weight[position]
                total = total + scale * bag.weight[index[position]]
            rows.append(total)
        vectors += list(torch.stack(rows).split(built.batch_size))
    return vectors


def bottom(built):
    x = built.args[0]
    for layer in (built.module.dense_arch[0], built.module.dense_arch[2]):
        x = torch.relu(x @ layer.weight.T + layer.bias)
    return x


def top(built, x):
    first, last = built.module.over_arch[0], built.module.over_arch[2]
    return torch.relu(x @ first.weight.T + first.bias) @ last.weight.T + last.bias


@pytest.mark.parametrize("padding", [1, 8])
def test_dot_interaction(padding):
    built = real(interaction={"kind": "dot", "pad_to_multiple": padding})
    dense = bottom(built)
    vectors = [dense, *looked_up(built)]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
    crossed = torch.cat([dense, torch.stack(pairs, 1)], 1)
    assert crossed.shape[1] == 4 + 5 * 4 // 2
    width = -(-crossed.shape[1] // padding) * padding
    crossed = torch.cat([crossed, torch.zeros(len(crossed), width - crossed.shape[1])], 1)
    torch.testing.assert_close(built.module(*built.args), top(built, crossed))


def test_the_fused_dot_interaction_is_the_spelled_out_one():
    plain, fused = (real(interaction={"kind": "dot", "pad_to_multiple": 8, "fused": fused}) for fused in (False, True))
    for built in (plain, fused):
        built.loss(built.module(*built.args)).backward()
    torch.testing.assert_close(fused.module(*fused.args), plain.module(*plain.args))
    for (name, a), (other, b) in zip(fused.module.named_parameters(), plain.module.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense())
    on_meta = build(load_model({**BASE, "interaction": {"kind": "dot", "pad_to_multiple": 8, "fused": True}}))
    assert on_meta.module(*on_meta.args).shape == (6, 1)


def test_cat_interaction_takes_tables_of_any_width():
    built = real(interaction="cat", tables=[{"rows": 9, "dim": 2}, {"rows": 8, "dim": 6, "pooling_factor": 3}])
    crossed = torch.cat([bottom(built), *looked_up(built)], 1)
    torch.testing.assert_close(built.module(*built.args), top(built, crossed))


def test_low_rank_cross_interaction():
    built = real(interaction={"kind": "dcnv2", "layers": 2, "rank": 3})
    start = torch.cat([bottom(built), *looked_up(built)], 1)
    x = start
    for v, w in zip(built.module.inter_arch.v_kernels, built.module.inter_arch.w_kernels, strict=True):
        x = start * (x @ v.weight.T @ w.weight.T + w.bias) + x
    torch.testing.assert_close(built.module(*built.args), top(built, x))


def test_the_loss_is_binary_cross_entropy():
    built = real()
    logits = built.module(*built.args)
    chances = torch.sigmoid(logits)
    (clicked,) = built.targets
    expected = -(clicked * chances.log() + (1 - clicked) * (1 - chances).log()).mean()
    torch.testing.assert_close(built.loss(logits), expected)


def test_table_gradients_are_sparse_and_tables_are_described():
    built = real()
    built.loss(built.module(*built.args)).backward()
    names = dict(built.module.named_parameters())
    assert [t.parameter.split(".")[-2] for t in built.tables] == ["t0", "shared", "w"]
    assert [t.pooling_factor for t in built.tables] == [1.0, 5.0, 2.5]
    assert [t.weighted for t in built.tables] == [False, False, True]
    for table in built.tables:
        assert names[table.parameter].grad.is_sparse
        assert names[table.parameter].shape == (table.rows, table.dim)


def test_counts_make_equal_tables_with_their_own_names():
    spec = load_model({**BASE, "tables": [{"name": "a", "count": 3, "rows": 5}, {"count": 2, "rows": 6}]})
    assert [(t.name, t.rows) for t in spec.expanded_tables] == [
        ("a_0", 5),
        ("a_1", 5),
        ("a_2", 5),
        ("t3", 6),
        ("t4", 6),
    ]


def test_half_precision_tables():
    built = real(tables=[{"rows": 9, "precision": "bf16"}, {"rows": 9, "precision": "fp16"}])
    assert built.tables[0].itemsize_bytes == 2
    assert torch.isfinite(built.loss(built.module(*built.args)))


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.05, 2.0])
def test_zipf_draws_follow_the_power_law(exponent):
    rows, n = 50, 200_000
    drawn = draw_indices(Distribution(zipf=exponent), rows, n, np.random.default_rng(0))
    expected = np.arange(1, rows + 1) ** -exponent
    expected *= n / expected.sum()
    found = np.sort(np.bincount(drawn.numpy(), minlength=rows))[::-1]
    assert abs(found - expected).max() < 5 * np.sqrt(expected.max())


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
def test_the_tail_beyond_exact_weights_is_right(exponent, monkeypatch):
    """The share of draws on ranks 100..999 when only 64 weights are summed, against the full sum."""
    from perfmodel.models import indices

    monkeypatch.setattr(indices, "_EXACT_ROWS", 64)
    ranks = indices._draw_zipf(exponent, 1000, 200_000, np.random.default_rng(1))
    weights = np.arange(1, 1001) ** -exponent
    expected = weights[100:].sum() / weights.sum()
    assert (ranks >= 100).mean() == pytest.approx(expected, abs=5e-3)
    assert ranks.min() == 0
    assert ranks.max() <= 999


def test_histogram_draws_hit_each_class_as_often_as_it_says():
    drawn = draw_indices(Distribution(histogram=((2, 100.0), (8, 25.0))), 10, 80_000, np.random.default_rng(2))
    counts = np.sort(np.bincount(drawn.numpy(), minlength=10))[::-1]
    assert counts[:2] == pytest.approx([20_000] * 2, rel=0.05)
    assert counts[2:] == pytest.approx([5_000] * 8, rel=0.06)


@pytest.mark.parametrize("ragged", [False, True])
def test_bag_lengths_sum_to_the_mean(ragged):
    lengths = draw_lengths(2.5, 1000, ragged=ragged, rng=np.random.default_rng(3))
    assert int(lengths.sum()) == 2500
    assert set(lengths.tolist()) == ({2, 3} if not ragged else set(lengths.tolist()))
    assert float(lengths.float().var()) == pytest.approx(2.5 if ragged else 0.25, rel=0.2)
    starts = [0, *itertools.accumulate(lengths.tolist())][:-1]
    assert offsets_of(lengths).tolist() == starts
