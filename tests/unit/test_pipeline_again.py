"""A predictor that has seen a plan answers as one that has not: what it keeps of a plan's events is not in the answers."""

import pytest

from perfmodel.api import Predictor, as_topology

CASES = [
    ("dlrm", ("dgx", "dgx_h100"), ("ddp", "ddp,bucket_cap=50MiB")),
    ("gpt2", ("dgx", "dgx_a100_80gb"), ("ddp", "tp=2,pp=2,accumulate=3")),
]


@pytest.mark.parametrize(("model", "machines", "plans"), CASES)
@pytest.mark.parametrize(
    "options", [{}, {"mode": "cuda_graph", "input_copies": "prefetch"}, {"what_if": ["gemm x0.5"]}]
)
def test_asked_again_a_predictor_gives_the_same_bytes(model, machines, plans, options) -> None:
    asked = [(plan, as_topology(machine)) for plan in plans for machine in machines]
    warm = Predictor(model, asked[0][1], **options)
    first = [warm.predict(plan, topology=machine).to_json() for plan, machine in asked]
    again = [warm.predict(plan, topology=machine).to_json() for plan, machine in reversed(asked)]
    cold = [
        Predictor(model, asked[0][1], **options).predict(plan, topology=machine).to_json() for plan, machine in asked
    ]
    assert first == again[::-1] == cold
