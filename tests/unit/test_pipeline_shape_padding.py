"""Compiled code pads 16-bit products of odd sizes; eager code does not."""

from perfmodel.config import load_model
from perfmodel.db import load_device
from perfmodel.extract import trace
from perfmodel.kernels import calls_of, price
from perfmodel.models import build
from perfmodel.pipeline.fuse import fuse_graph

SMALL = {"batch_size": 2, "layers": 1}


def heads(precision, vocabulary):
    """Products of the vocabulary, eager and compiled."""
    graph = trace(build(load_model("gpt2", {**SMALL, "precision": precision, "vocab_size": vocabulary})))
    mine = [op for op in graph.ops if op.name == "aten.mm" and vocabulary in {n for s in op.inputs for n in s.shape}]
    names = {op.inputs for op in mine}
    return mine, [op for op in fuse_graph(graph).ops if op.name == "aten.mm" and op.inputs in names]


def test_products_over_50257_words_cost_as_those_over_50264_and_their_copies_once_compiled() -> None:
    """50,264 is the next multiple of eight 16-bit numbers; what has 50,257 rows or columns is copied."""
    device = load_device("a100_sxm_80gb")
    eager, compiled = heads("bf16", 50257)
    _, even = heads("bf16", 50264)
    assert len(eager) == len(compiled) == len(even) == 3
    for odd, padded, wide in zip(eager, compiled, even, strict=True):
        slow, fast, same = (price([op], device)[0][-1].time_s for op in (odd, padded, wide))
        assert fast == same
        assert slow > 1.5 * fast
        assert calls_of(padded)[-1].work.flops > calls_of(odd)[-1].work.flops
        copied = [spec for spec in odd.inputs if 50257 in spec.shape]
        assert [call.work.read_bytes for call in calls_of(padded)[:-1]] == [spec.bytes for spec in copied]
        assert [call.work.write_bytes for call in calls_of(padded)[:-1]] == [
            spec.bytes // 50257 * 50264 for spec in copied
        ]


def test_single_precision_is_not_padded() -> None:
    eager, compiled = heads("fp32", 50257)
    assert [calls_of(op) for op in compiled] == [calls_of(op) for op in eager]
