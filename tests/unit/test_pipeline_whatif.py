"""What-ifs and bounds on a hand-built class: a host task, a product, a pointwise kernel and an all-reduce, in sequence."""

import pytest

from perfmodel.api import predict_run
from perfmodel.errors import ConfigError
from perfmodel.pipeline.whatif import WhatIf, parse_what_if

MODEL = {
    "kind": "dlrm", "name": "tiny", "batch_size": 4096, "dense_features": 13, "bottom_mlp": [512, 256, 64],
    "top_mlp": [1024, 512, 1], "embedding_dim": 64, "tables": [1000] * 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def predicted():
    """The iteration time under changes, each asked once."""
    known = {}

    def ask(*what_if, **options):
        key = (what_if, tuple(options.items()))
        if key not in known:
            known[key] = predict_run(MODEL, "dgx", what_if=what_if, check=True, **options)
        return known[key]

    return ask


@pytest.mark.parametrize(
    ("text", "what", "factor"),
    [
        ("gemm x0.5", "gemm", 0.5),
        ("nvlink x2", "nvlink", 2.0),
        ("no host", "host", 0.0),
        ("  all_reduce  x 0 ", "all_reduce", 0.0),
        ("launch latency x3", "launch latency", 3.0),
    ],
)
def test_words_are_read(text, what, factor):
    assert parse_what_if(text) == WhatIf(what=what, factor=factor)


@pytest.mark.parametrize(
    "text", ["gemm", "gemm 2", "gemm x", "gemm xtwo", "gemm x-1", "gemm xnan", "gemm xinf", "", "no"]
)
def test_what_is_no_change_is_refused(text):
    with pytest.raises(ConfigError, match="what-if"):
        parse_what_if(text)


def test_a_link_without_bandwidth_is_refused():
    with pytest.raises(ConfigError, match="no network"):
        parse_what_if("no nvlink")


def test_an_unknown_word_is_answered_with_the_nearest(predicted):
    with pytest.raises(ConfigError, match="did you mean 'gemm'"):
        predicted("gem x0.5")


def test_a_link_that_limits_nothing_is_said(predicted):
    with pytest.raises(ConfigError, match="limits here: nvlink"):
        predicted("infiniband x2")


def test_a_factor_of_one_changes_nothing(predicted):
    assert predicted("gemm x1").prediction.iteration_time_s == predicted().prediction.iteration_time_s


def test_a_family_takes_its_share_with_it(predicted):
    """Device time of the family halves; everything else keeps its time."""

    def device_s(run, wanted):
        tasks = run.classes[0].tasks
        own = [i for i, name in enumerate(tasks.names) if name == "gemm"]
        hit = [f in own for f in tasks.family]
        return sum(t for t, h in zip(tasks.time_s, hit, strict=True) if h is wanted)

    usual, changed = predicted(), predicted("gemm x0.5")
    assert device_s(changed, True) == pytest.approx(0.5 * device_s(usual, True))
    assert device_s(changed, False) == pytest.approx(device_s(usual, False))


def test_the_host_and_network_bounds_are_what_the_words_give(predicted):
    """Two ways to the same number: the simulator's own bound, and the classes with these times set to nothing."""
    bounds = predicted().prediction.bounds
    assert bounds.infinite_host_s == pytest.approx(predicted("no host").prediction.iteration_time_s, rel=1e-9)
    assert bounds.infinite_network_s == pytest.approx(predicted("no network").prediction.iteration_time_s, rel=1e-9)


def test_bounds_lie_below_the_prediction(predicted):
    prediction = predicted().prediction
    assert 0 < prediction.bounds.roofline_s <= prediction.bounds.infinite_host_s <= prediction.iteration_time_s
    assert prediction.bounds.infinite_network_s <= prediction.iteration_time_s


def test_twice_the_bandwidth_halves_the_bandwidth_part(predicted):
    """Latency stays: each exchange takes latency + bandwidth part / 2."""
    usual, fast = predicted(), predicted("nvlink x2")
    assert fast.prediction.iteration_time_s < usual.prediction.iteration_time_s
    assert fast.prediction.conditions == ("what if nvlink x2",)


def test_the_critical_path_sums_to_the_iteration_time(predicted):
    for run in (predicted(), predicted("no host"), predicted("all_reduce x0")):
        p = run.prediction
        assert sum(part.time_s for part in p.critical_path) == pytest.approx(p.iteration_time_s, rel=1e-12)
        assert p.breakdown.total_s == pytest.approx(p.iteration_time_s, rel=1e-12)
