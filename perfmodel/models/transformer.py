"""Transformers by architecture, their inputs and their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from perfmodel.config.transformer import TransformerSpec
from perfmodel.models.bert import Bert, BertClassifier
from perfmodel.models.blocks import masked_token_loss, next_token_loss
from perfmodel.models.built import CONVERTED, PARAMETER_DTYPE
from perfmodel.models.gpt2 import Gpt2
from perfmodel.models.llama import Llama
from perfmodel.models.megatron import MegatronGpt, ProfiledGpt, profiled_loss, vocabulary_loss
from perfmodel.models.megatron_llama import MegatronLlama
from perfmodel.models.opt import Opt

ARCHITECTURES: Mapping[str, Callable[[TransformerSpec], nn.Module]] = {
    "gpt2": Gpt2,
    "opt": Opt,
    "llama": Llama,
    "mixtral": Llama,
    "bert": lambda spec: BertClassifier(spec) if spec.head == "classification" else Bert(spec),
}

IMPLEMENTATIONS: Mapping[str, Mapping[str, Callable[[TransformerSpec], nn.Module]]] = {
    "huggingface": ARCHITECTURES,
    "megatron": {"gpt2": MegatronGpt, "llama": MegatronLlama},
    "vtrain": {"gpt2": ProfiledGpt},
}


def build_parts(spec: TransformerSpec, device: str, seed: int) -> dict[str, Any]:
    """BuiltModel fields of a transformer on a device; `seed` draws the tokens where the device holds values."""
    with torch.device(device):
        module = IMPLEMENTATIONS[spec.implementation][spec.architecture](spec)
        if spec.precision in CONVERTED:
            module = module.to(PARAMETER_DTYPE[spec.precision])
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, below: int) -> Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=torch.int64, device=device)
        return torch.randint(0, below, shape, generator=generator).to(device)

    tokens = draw(spec.batch_size, spec.tokens, below=spec.vocab_size)
    inputs: tuple[Tensor, ...] = (tokens,)
    if spec.architecture == "bert":
        inputs = (tokens, torch.zeros_like(tokens), torch.ones_like(tokens))
    predicted = spec.tokens if spec.predicted_tokens is None else spec.predicted_tokens
    if spec.predicted_tokens is not None:
        inputs = (*inputs, draw(spec.batch_size * predicted, below=spec.batch_size * spec.tokens))
    targets: tuple[Tensor, ...] = ()
    if spec.implementation == "vtrain":
        targets = (draw(spec.batch_size, spec.vocab_size, below=spec.tokens),)
    elif spec.head != "classification":
        targets = (draw(spec.batch_size, predicted, below=spec.vocab_size),)
    if spec.head != "lm":
        targets = (*targets, draw(spec.batch_size, below=2))
    return {
        "module": module,
        "args": inputs,
        "loss": partial(_LOSSES[_loss_of(spec)], *targets),
        "targets": targets,
        "checkpointing": spec.gradient_checkpointing,
    }


def _loss_of(spec: TransformerSpec) -> str:
    if spec.implementation != "huggingface":
        return "vocabulary" if spec.implementation == "megatron" else "profiled"
    return spec.head if spec.architecture == "bert" else "next_token"


def _pretraining_loss(labels: Tensor, sentence_labels: Tensor, logits: tuple[Tensor, Tensor]) -> Tensor:
    return masked_token_loss(labels, logits[0]) + fn.cross_entropy(logits[1].float(), sentence_labels)


def _classification_loss(labels: Tensor, logits: Tensor) -> Tensor:
    return fn.cross_entropy(logits.float(), labels)


_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "next_token": next_token_loss,
    "vocabulary": vocabulary_loss,
    "profiled": profiled_loss,
    "lm": masked_token_loss,
    "pretraining": _pretraining_loss,
    "classification": _classification_loss,
}
