"""Host overheads of a CUDA machine: what an operator, its backward, a launch and a synchronisation cost the host thread.

    launch           issue of the shortest kernel there is, without an operator around it / launches
    op dispatch      issue of a chain of small pointwise calls under autograd / calls, less a launch
    backward op      issue of the backward of such a chain / nodes, less a launch
    sync             waiting for an idle device
    launch latency   one launch to an idle device and waiting for it, less a launch and a synchronisation

as `perfmodel.db.HostCosts` means them: an operator's launches are counted apart. Batches stay below the driver's queue of
about a thousand launches, beyond which issuing waits for the device. The figures go to `<out>/host.yaml` beside the tables,
where predictions for this device find them (`perfmodel.db.host`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import yaml

from calibrate.measure_cuda import issued_s
from calibrate.session import replace_file
from perfmodel.db.host import HOST_FILE

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

    def round_trip_s(self) -> float:
        """Host seconds to launch a kernel to an idle device and wait for it."""
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

    def round_trip_s(self) -> float:
        """See Host."""
        import torch

        def there_and_back() -> None:
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # as in launch_s
            torch.cuda.synchronize()

        return issued_s(there_and_back)


def measure(host: Host) -> dict[str, float]:
    """Seconds of each figure, from medians over ROUNDS after one batch that nobody times."""
    launch_s = _median(lambda: host.launch_s(CHAIN) / CHAIN)
    sync_s = _median(host.sync_s)
    return {
        "op_dispatch_s": max(_median(lambda: host.op_s(CHAIN) / CHAIN) - launch_s, 0.0),
        "backward_op_s": max(_median(lambda: host.backward_s(CHAIN) / CHAIN) - launch_s, 0.0),
        "launch_s": launch_s,
        "launch_latency_s": max(_median(host.round_trip_s) - launch_s - sync_s, 0.0),
        "sync_s": sync_s,
    }


def _median(batch: Callable[[], float]) -> float:
    batch()
    return statistics.median(batch() for _ in range(ROUNDS))


def write(out: Path, figures: Mapping[str, float], facts: Mapping[str, str]) -> Path:
    """Writes figures and their provenance, whole or not at all."""
    body = {"host": {name: float(f"{value:.4g}") for name, value in figures.items()}, "provenance": dict(facts)}
    replace_file(out / HOST_FILE, yaml.safe_dump(body, sort_keys=False, width=120))
    return out / HOST_FILE
