"""Small training scripts with one thing wrong, and the same with it mended: `python -m perfmodel.profiling.live_cases CASE`.

With `--fixed` the change that the diagnosis recommends is made. They run until the profiler's window ends them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, WIDTH = 64, 1024
UNPACKINGS = 50
RARELY = 1000  # steps between what should not happen in each
EVALUATION_EVERY = 10
MAX_STEPS = 2000


def _model(width: int = WIDTH, layers: int = 4) -> Any:
    from torch import nn

    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))


def _train(
    model: Any, batches: Any, optimizer: Any, around: Callable[[int, Any], None] = lambda step, loss: None
) -> None:
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        around(step, loss)
        if step >= MAX_STEPS:
            return


def _same(width: int = WIDTH, dtype: Any = None) -> Any:
    import torch

    batch = torch.randn(BATCH, width, dtype=dtype)
    while True:
        yield batch


def _sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=1e-3)


def _packed_set() -> Any:
    """A data set whose items must be unpacked: several pieces of zlib data each."""
    import numpy as np
    import torch
    from torch.utils.data import Dataset

    rng = np.random.default_rng(0)
    packed = zlib.compress(rng.integers(0, 8, BATCH * WIDTH).astype(np.float32).tobytes(), 6)

    class Packed(Dataset):  # type: ignore[type-arg] # items are tensors
        def __len__(self) -> int:
            return MAX_STEPS + 1

        def __getitem__(self, index: int) -> Any:
            for _ in range(UNPACKINGS):  # as a sample of several fields has
                raw = zlib.decompress(packed)
            return torch.from_numpy(np.frombuffer(raw, dtype=np.float32).copy()).reshape(BATCH, WIDTH) / 8

    return Packed()


def data_loading(*, fixed: bool) -> None:
    """A data set that is unpacked in the training process, or by a worker."""
    from torch.utils.data import DataLoader

    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4} if fixed else {}
    model = _model()
    _train(model, DataLoader(_packed_set(), batch_size=None, **workers), _sgd(model))


def checkpointing(*, fixed: bool) -> None:
    """The model written after every step, or rarely."""
    import torch

    model = _model()
    with tempfile.TemporaryDirectory() as folder:

        def save(step: int, loss: Any) -> None:
            if not fixed or step % RARELY == 0:
                torch.save(model.state_dict(), Path(folder) / "model.pt")

        _train(model, _same(), _sgd(model), save)


def evaluation(*, fixed: bool) -> None:
    """A pass over held-out data after every step, or after every tenth."""
    import torch
    from torch.profiler import record_function

    model, held_out = _model(), torch.randn(4 * BATCH, WIDTH)

    def evaluate(step: int, loss: Any) -> None:
        if not fixed or step % EVALUATION_EVERY == 0:
            with record_function("evaluate"), torch.no_grad():
                model(held_out).square().mean()

    _train(model, _same(), _sgd(model), evaluate)


def logging(*, fixed: bool) -> None:
    """Statistics of every gradient written as JSON after every step, or rarely."""
    from torch.profiler import record_function

    model = _model()
    with tempfile.TemporaryDirectory() as folder:

        def log(step: int, loss: Any) -> None:
            if not fixed or step % RARELY == 0:
                with record_function("log metrics"), (Path(folder) / "log").open("a", encoding="utf-8") as file:
                    rows = {name: p.grad.flatten()[:4096].tolist() for name, p in model.named_parameters()}
                    file.write(json.dumps(rows))

        _train(model, _same(), _sgd(model), log)


def host_optimizer(*, fixed: bool) -> None:
    """AdamW op by op, or fused."""
    import torch

    model = _model(layers=6)
    options: dict[str, Any] = {"fused": True} if fixed else {"foreach": False, "fused": False}
    _train(model, _same(), torch.optim.AdamW(model.parameters(), lr=1e-3, **options))


def recompute(*, fixed: bool) -> None:
    """Every block checkpointed, or none."""
    import torch
    from torch.utils.checkpoint import checkpoint

    model = _model(layers=6)

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(model[i : i + 2] for i in range(0, len(model), 2))

        def forward(self, batch: Any) -> Any:
            for block in self.blocks:
                batch = block(batch) if fixed else checkpoint(block, batch, use_reentrant=False)
            return batch

    whole = Checkpointed()
    _train(whole, _same(), _sgd(whole))


def wrong_precision(*, fixed: bool) -> None:
    """A model in float64, or in float32."""
    import torch

    dtype = torch.float32 if fixed else torch.float64
    model = _model().to(dtype)
    _train(model, _same(dtype=dtype), _sgd(model))


def preprocessing(*, fixed: bool) -> None:
    """Batches unpacked and scaled in the training loop, or in a worker of the data loader."""
    from torch.profiler import record_function
    from torch.utils.data import DataLoader

    packed, model = _packed_set(), _model()
    if fixed:
        loader = DataLoader(packed, batch_size=None, num_workers=1, persistent_workers=True, prefetch_factor=4)
        _train(model, loader, _sgd(model))
        return

    def batches() -> Any:
        for index in range(len(packed)):
            with record_function("preprocess"):
                batch = packed[index]
            yield batch

    _train(model, batches(), _sgd(model))


CASES: dict[str, Callable[..., None]] = {
    case.__name__: case
    for case in (
        data_loading, checkpointing, evaluation, logging, host_optimizer, recompute, wrong_precision, preprocessing
    )
}  # fmt: skip


def main() -> None:
    """Runs the case named on the command line on one thread."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    CASES[sys.argv[1]](fixed="--fixed" in sys.argv)


if __name__ == "__main__":
    main()
