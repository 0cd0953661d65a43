"""Where a GPU's host waits for a tensor though no operator says so: moved to host memory, read by Python, used as a mask."""

import pytest
import torch
from torch import nn

from perfmodel.extract import trace
from perfmodel.models import from_module


class Reading(nn.Module):
    def __init__(self, read) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x):
        out = self.layer(x)
        return self.read(out)


def masked(out):
    return out[out.detach() > -100.0].sum()


READS = {
    "cpu": lambda out: out.mean() + 0.0 * float(out.detach().cpu().shape[0]),
    "to cpu": lambda out: out.mean() + 0.0 * float(out.detach().to("cpu").shape[0]),
    "to device": lambda out: out.mean() + 0.0 * float(out.detach().to(device=torch.device("cpu")).shape[0]),
    "tolist": lambda out: out.mean() + 0.0 * len(out.detach().tolist()),
    "numpy": lambda out: out.mean() + 0.0 * len(out.detach().numpy()),
}


def syncs(read, target):
    built = from_module(Reading(read), torch.ones(2, 4), lambda out: out)
    return [op.name for op in trace(built, values="real", target=target).ops if op.host_sync]


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_tensor_moved_to_the_host_is_waited_for_on_a_gpu_alone(read) -> None:
    assert syncs(read, "cuda") == ["perfmodel.synchronize"]
    assert syncs(read, "cpu") == []


def test_a_mask_as_an_index_makes_the_host_wait() -> None:
    assert "aten.index" in syncs(masked, "cuda")


@pytest.mark.parametrize(
    "read",
    [
        lambda out: out.to(torch.float64).mean(),
        lambda out: out.to("cpu", non_blocking=True).mean(),
        lambda out: out[0].mean(),
    ],
)
def test_what_moves_nothing_or_waits_for_nothing_is_no_sync(read) -> None:
    assert syncs(read, "cuda") == []
