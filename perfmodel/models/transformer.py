"""Transformers by architecture, their inputs and their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from perfmodel.config.transformer import TransformerSpec
from perfmodel.models.bert import Bert
from perfmodel.models.blocks import masked_token_loss, next_token_loss
from perfmodel.models.built import PARAMETER_DTYPE
from perfmodel.models.gpt2 import Gpt2
from perfmodel.models.llama import Llama
from perfmodel.models.opt import Opt

ARCHITECTURES: Mapping[str, Callable[[TransformerSpec], nn.Module]] = {
    "gpt2": Gpt2,
    "opt": Opt,
    "llama": Llama,
    "bert": Bert,
}


def build_parts(spec: TransformerSpec, device: str, seed: int) -> dict[str, Any]:
    """BuiltModel fields of a transformer on a device; `seed` draws the tokens where the device holds values."""
    with torch.device(device):
        module = ARCHITECTURES[spec.architecture](spec)
        if spec.precision == "bf16":
            module = module.to(PARAMETER_DTYPE["bf16"])
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (_tokens(spec, device, generator) for _ in range(2))
    inputs: tuple[Tensor, ...] = (tokens,)
    if spec.architecture == "bert":
        inputs = (tokens, torch.zeros_like(tokens), torch.ones_like(tokens))
    loss = masked_token_loss if spec.architecture == "bert" else next_token_loss
    return {
        "module": module,
        "args": inputs,
        "loss": partial(loss, labels),
        "targets": (labels,),
        "checkpointing": spec.gradient_checkpointing,
    }


def _tokens(spec: TransformerSpec, device: str, generator: torch.Generator) -> Tensor:
    shape = (spec.batch_size, spec.tokens)
    if device == "meta":
        return torch.empty(shape, dtype=torch.int64, device=device)
    return torch.randint(0, spec.vocab_size, shape, generator=generator).to(device)
