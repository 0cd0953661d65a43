"""Loss scaling of fp16 training: what `torch.amp.GradScaler` runs round backward and the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perfmodel.extract import _torch
from perfmodel.extract.record import Recorder


class LossScale:
    """The scaler's state on the device and the operators of torch/amp/grad_scaler.py in their order."""

    def __init__(self, recorder: Recorder, device: str) -> None:
        self._recorder = recorder
        self._scale = torch.ones((), device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._found: list[Tensor] = []
        for tensor in (self._scale, self._growth):
            recorder.storages.number(tensor, kind="optimizer_state", born=-1)

    def scaled(self, loss: Tensor) -> Tensor:
        """`scaler.scale(loss)`."""
        return loss * self._scale

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divides gradients by the scale in one call a type, looks for infinities, and reads the answer on the host."""
        inverse = self._scale.double().reciprocal().float()
        found = torch.full((), 0.0, device=self._scale.device)
        gradients: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                values = _torch.sparse_parts(gradient)[1] if gradient.is_sparse else gradient
                gradients.setdefault(values.dtype, []).append(values)
        for group in gradients.values():
            _torch.unscale(group, found, inverse)
        self._recorder.emit("aten._local_scalar_dense", inputs=(found,), names=("self",))
        self._found.append(found)

    def update(self) -> None:
        """`scaler.update()`: one kernel; further optimizers' findings are added to the first's."""
        total = self._found[0]
        for other in self._found[1:]:
            total += other
        self._recorder.emit(
            "aten._amp_update_scale_",
            inputs=(self._scale, self._growth, total),
            names=("self", "growth_tracker", "found_inf"),
            outputs=(self._scale,),
        )
