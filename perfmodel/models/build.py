"""Specs -> BuiltModel. `build` allocates nothing; `materialize` gives the same model with values on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from perfmodel.config.dlrm import DlrmSpec
from perfmodel.config.entrypoint import EntrypointSpec
from perfmodel.config.foreign import HuggingFaceSpec
from perfmodel.config.model import ModelSpec
from perfmodel.config.transformer import TransformerSpec
from perfmodel.errors import GraphError
from perfmodel.models import dlrm, huggingface, transformer, vision
from perfmodel.models.built import BuiltModel
from perfmodel.models.training import dense_arguments
from perfmodel.models.user import build_entrypoint


def build(spec: ModelSpec) -> BuiltModel:
    """The model of a spec on `meta` tensors, in training mode. Raises ConfigError where a user's factory fails."""
    return replace(_build(spec, "meta", 0), realize=partial(_build, spec, "cpu"))


def materialize(built: BuiltModel, seed: int = 0) -> BuiltModel:
    """The same model with CPU tensors and values drawn from `seed` (indices as the tables' distributions say).

    A module that was given from Python with values is returned as it is. Raises GraphError if it has none.
    """
    if built.realize is not None:
        return replace(built.realize(seed), realize=built.realize)
    tensors = (*built.module.parameters(), *built.module.buffers(), *built.input_tensors)
    if any(tensor.is_meta for tensor in tensors):
        raise GraphError(f"{built.name}: its tensors are on meta, so there are no values; give a module on the CPU")
    return built


def on_device(spec: ModelSpec, device: str, seed: int = 0) -> BuiltModel:
    """The model of a spec with values drawn from `seed`, its tensors on a device such as `cuda:0`."""
    return _build(spec, device, seed)


def _build(spec: ModelSpec, device: str, seed: int) -> BuiltModel:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        if isinstance(spec, EntrypointSpec):
            return build_entrypoint(spec, device)
        if isinstance(spec, DlrmSpec):
            parts = dlrm.build_parts(spec, device, seed)
        elif isinstance(spec, HuggingFaceSpec):
            parts = huggingface.build_parts(spec, device, seed)
        elif isinstance(spec, TransformerSpec):
            parts = transformer.build_parts(spec, device, seed)
        else:
            parts = vision.build_parts(spec, device, seed)
    parts["module"].train()
    loop = {
        "synchronizes": spec.loop.synchronize,
        "captures_optimizer": spec.loop.capture_optimizer,
        "copies_inputs": spec.loop.copy_inputs,
        "input_copies": spec.loop.input_copies,
    }
    whole = {"precision": spec.precision, **loop, **dense_arguments(spec.optimizer), **parts}
    return BuiltModel(name=spec.name, batch_size=spec.batch_size, **whole)
