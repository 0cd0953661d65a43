"""Host figures of a trace, on a trace whose times are set by hand."""

import pytest

from calibrate.fit_host import CALL_S, EVENT_S, figures, held_out
from perfmodel.traces.kineto import HostSpan, KinetoTrace
from perfmodel.units import US_PER_S


def span(name, thread, start_us, length_us):
    return HostSpan(name=name, thread=thread, start_s=start_us / US_PER_S, end_s=(start_us + length_us) / US_PER_S)


def made(ops, calls):
    return KinetoTrace(
        path="made", rank=0, world_size=1, origin_us=0.0, ops=tuple(ops), calls=tuple(calls), device=(), steps=()
    )


def test_figures_by_hand():
    """Two adds of 20 us, 8 us apart, two engine nodes of 30 us (3 records each), 4 us apart; launches of 6 us.

    Forward: 20 + 8 - 1.2 (record) - 1.5 (call) - 4.5 (launch) = 20.8; backward: 30 + 4 - 3.6 - 1.5 - 4.5 = 24.4.
    """
    node = "autograd::engine::evaluate_function: ReluBackward0"
    ops = [span("annotation over all", "f", 0, 1000), span("aten::add", "f", 0, 20), span("aten::add", "f", 28, 20)]
    for start in (0, 34):
        ops += [span(node, "b", start, 30), span("ReluBackward0::apply", "b", start + 1, 28)]
        ops.append(span("aten::threshold_backward", "b", start + 2, 20))
    calls = [span("cudaLaunchKernel", thread, at, 6) for thread, at in (("f", 5), ("f", 33), ("b", 5), ("b", 39))]
    found = figures(made(ops, calls))
    assert (EVENT_S, CALL_S) == (1.2 / US_PER_S, 1.5 / US_PER_S)
    assert found.launch_s == pytest.approx(4.5 / US_PER_S)
    assert found.op_s == pytest.approx(20.8 / US_PER_S)
    assert found.backward_op_s == pytest.approx(24.4 / US_PER_S)
    assert found.n_ops == 4
    assert held_out({"one": found, "other": found}) == {"one": pytest.approx(0.0), "other": pytest.approx(0.0)}


def test_a_trace_without_plain_ops_is_refused():
    launch = [span("cudaLaunchKernel", "f", 0, 6)]
    with pytest.raises(ValueError, match="no plain op"):
        figures(made([span("aten::mm", "f", 0, 20)], launch))
