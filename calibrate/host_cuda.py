"""Host overheads of a CUDA machine: what an operator, its backward, a launch and a synchronisation cost the host thread.

    op         issue of a chain of small pointwise calls under autograd / calls
    backward   issue of the backward of such a chain / nodes
    launch     issue of the shortest kernel there is, without an operator around it / launches
    sync       waiting for an idle device

Batches stay below the driver's queue of about a thousand launches, beyond which issuing waits for the device. The figures
go to `<out>/host.yaml` beside the tables; a person moves them to `host:` of device.yaml, for they belong to the machine and
not to the GPU model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import yaml

from calibrate.measure_cuda import issued_s
from calibrate.session import replace_file

FILE = "host.yaml"
CHAIN = 200  # calls of a batch
ROUNDS = 15
SMALL_ELEMS = 16  # of each tensor: the device is through with a call long before the host
STATISTIC = f"median of {ROUNDS} batches of {CHAIN} calls"


class Host(Protocol):
    """What the measuring needs of a machine; every function leaves the device idle."""

    def op_s(self, n_calls: int) -> float:
        """Host seconds to issue a chain of pointwise calls that autograd records."""
        ...

    def backward_s(self, n_nodes: int) -> float:
        """Host seconds of the backward of such a chain."""
        ...

    def launch_s(self, n_launches: int) -> float:
        """Host seconds to launch kernels without an operator around them."""
        ...

    def sync_s(self) -> float:
        """Host seconds to wait for an idle device."""
        ...


class CudaHost:
    """The current CUDA device and this process."""

    def op_s(self, n_calls: int) -> float:
        """See Host."""
        import torch

        x = torch.ones(SMALL_ELEMS, device="cuda", requires_grad=True)

        def chain() -> None:
            y = x
            for _ in range(n_calls):
                y = torch.relu(y)

        return issued_s(chain)

    def backward_s(self, n_nodes: int) -> float:
        """See Host."""
        import torch

        y = x = torch.ones(SMALL_ELEMS, device="cuda", requires_grad=True)
        for _ in range(n_nodes):
            y = torch.relu(y)
        gradient = torch.ones_like(x)
        return issued_s(lambda: torch.autograd.backward([y], [gradient]))

    def launch_s(self, n_launches: int) -> float:
        """See Host."""
        import torch

        def launches() -> None:
            for _ in range(n_launches):
                torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # a kernel that waits a clock: no tensor, no dispatcher

        return issued_s(launches)

    def sync_s(self) -> float:
        """See Host."""
        import torch

        torch.cuda.synchronize()
        return issued_s(torch.cuda.synchronize)


def measure(host: Host) -> dict[str, float]:
    """Seconds of each figure, medians over ROUNDS after one batch that nobody times."""
    batches: Mapping[str, Callable[[], float]] = {
        "op_dispatch_s": lambda: host.op_s(CHAIN) / CHAIN,
        "backward_op_s": lambda: host.backward_s(CHAIN) / CHAIN,
        "launch_s": lambda: host.launch_s(CHAIN) / CHAIN,
        "sync_s": host.sync_s,
    }
    found = {}
    for name, batch in batches.items():
        batch()
        found[name] = statistics.median(batch() for _ in range(ROUNDS))
    return found


def write(out: Path, figures: Mapping[str, float], facts: Mapping[str, str]) -> Path:
    """Writes figures and their provenance, whole or not at all."""
    body = {"host": {name: float(f"{value:.4g}") for name, value in figures.items()}, "provenance": dict(facts)}
    replace_file(out / FILE, yaml.safe_dump(body, sort_keys=False, width=120))
    return out / FILE
