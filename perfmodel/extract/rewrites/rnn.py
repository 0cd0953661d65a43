"""Recurrent nets as CUDA runs them: all layers and steps in one cuDNN call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perfmodel.extract.rewrites.routing import Route, active, declined, route

# cudnnRNNMode_t (cuDNN API reference)
MODES = {"rnn_relu.input": 0, "rnn_tanh.input": 1, "lstm.input": 2, "gru.input": 3}


def _recurrent(operator: str) -> Route:
    """`_cudnn_rnn` for padded input on tensors without storage (RNN.cpp, use_cudnn_rnn and _cudnn_impl).

    cuDNN's reserve space has an unknown size and is recorded as empty; so is the flat weight buffer, which on CUDA is
    the memory of the weights themselves (`flatten_parameters`).
    """

    def call(image: Tensor, state: Any, weights: Sequence[Tensor], *options: Any) -> Any:
        if active().values == "real":
            return declined(operator, image, state, weights, *options)
        active().used.add("rnn")
        _, num_layers, dropout, train, bidirectional, batch_first = options
        is_lstm = operator == "lstm.input"
        hidden, cell = state if is_lstm else (state, None)
        width = (hidden if cell is None else cell).size(-1)
        out, last, last_cell, _, _ = torch.ops.aten._cudnn_rnn(
            image,
            list(weights),
            len(weights) // (num_layers * (2 if bidirectional else 1)),
            weights[0].new_empty(0),
            hidden,
            cell,
            MODES[operator],
            width,
            0 if hidden.size(-1) == width else hidden.size(-1),
            num_layers,
            batch_first,
            dropout,
            train,
            bidirectional,
            [],
            None,
        )
        return (out, last, last_cell) if is_lstm else (out, last)

    return call


for _operator in MODES:
    route("cuda", _operator)(_recurrent(_operator))
