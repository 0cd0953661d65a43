"""Where a GPU's host waits for a tensor though no operator says so: moved to host memory, read by Python, used as a mask."""

import pytest
import torch
from torch import nn

from perfmodel.api import predict_run
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


def waited(wait):
    def read(out):
        wait()
        return out.mean()

    return read


def wait_for_device():
    torch.cuda.synchronize()  # looked up when called, as a module does


WAITS = {
    "device": wait_for_device,
    "device by number": lambda: torch.cuda.synchronize(0),
    "current stream": lambda: torch.cuda.current_stream().synchronize(),
    "default stream": lambda: torch.cuda.default_stream().synchronize(),
}


@pytest.mark.parametrize("values", ["meta", "real"])
@pytest.mark.parametrize("name", WAITS)
def test_a_module_that_waits_for_the_device_or_its_stream(name, values) -> None:
    """Behind the layer and ahead of what follows it, once in forward."""
    built = from_module(Reading(waited(WAITS[name])), torch.ones(2, 4), lambda out: out)
    ops = [op.name for op in trace(built, values=values, target="cuda").ops]
    assert ops.count("perfmodel.synchronize") == 1
    assert ops.index("aten.addmm") < ops.index("perfmodel.synchronize") < ops.index("aten.mean")


def test_a_wait_stands_in_the_predicted_step() -> None:
    """By the task that waits: the host goes on when the kernel before it has ended."""
    plain, waiting = (
        predict_run(Reading(read), "a100", inputs=(torch.ones(2, 4),), loss=lambda out: out, bounds=False)
        for read in (lambda out: out.mean(), waited(wait_for_device))
    )
    syncs = [sum(info.category == "sync" for info in run.classes[0].tasks) for run in (plain, waiting)]
    assert syncs == [0, 1]
    assert waiting.steady.iteration_ps > plain.steady.iteration_ps


def test_torch_is_as_it_was_after_a_trace() -> None:
    before = torch.cuda.synchronize, torch.cuda.current_stream, torch.cuda.default_stream
    syncs(waited(wait_for_device), "cuda")
    assert (torch.cuda.synchronize, torch.cuda.current_stream, torch.cuda.default_stream) == before


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
