"""What `validate --live` trains: small models of every kind, none of them used to calibrate anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Two batches, two pooling factors, uniform and skewed indices; tables of 100 to 300 MB, far beyond a last-level cache.
_DLRM: Mapping[str, Any] = {
    "kind": "dlrm",
    "dense_features": 13,
    "bottom_mlp": [256, 64],
    "top_mlp": [256, 128, 1],
    "interaction": "dot",
    "embedding_dim": 64,
    "optimizer": "sgd",
    "sparse_optimizer": "sgd",
}
_TRANSFORMER: Mapping[str, Any] = {
    "kind": "transformer",
    "vocab_size": 8000,
    "hidden_size": 256,
    "layers": 4,
    "heads": 4,
    "max_positions": 128,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "optimizer": "adamw",
}
_VISION: Mapping[str, Any] = {
    "kind": "vision",
    "depth": 18,
    "classes": 100,
    "optimizer": {"name": "sgd", "momentum": 0.9},
}
_MLP: Mapping[str, Any] = {"kind": "entrypoint", "entrypoint": "perfmodel.validate.live_models:mlp"}
_OWN: Mapping[str, Any] = {"kind": "entrypoint", "entrypoint": "perfmodel.validate.live_models:autoencoder"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCase:
    """A model (as the mapping of a model file), and how it is spread over the ranks."""

    name: str
    model: Mapping[str, Any]
    plan: str = "ddp"


def _dlrm(name: str, *, batch: int, pooling: int, zipf: float = 0.0, n_tables: int = 8, **keys: Any) -> LiveCase:
    distribution: Any = {"zipf": zipf} if zipf else "uniform"
    table = {"rows": 150_000, "count": n_tables, "pooling_factor": pooling, "distribution": distribution}
    return LiveCase(name=name, model={**_DLRM, "name": name, "batch_size": batch, "tables": [table], **keys})


def _net(base: Mapping[str, Any], name: str, batch: int, **keys: Any) -> LiveCase:
    return LiveCase(name=name, model={**base, "name": name, "batch_size": batch, **keys})


def _own(base: Mapping[str, Any], name: str, optimizer: str, **arguments: Any) -> LiveCase:
    return LiveCase(name=name, model={**base, "name": name, "optimizer": optimizer, "arguments": arguments})


SINGLE: tuple[LiveCase, ...] = (
    _dlrm("dlrm-b256-p1", batch=256, pooling=1),
    _dlrm("dlrm-b2048-p1", batch=2048, pooling=1),
    _dlrm("dlrm-b512-p10", batch=512, pooling=10),
    _dlrm("dlrm-b2048-p20", batch=2048, pooling=20),
    _dlrm("dlrm-b512-p10-zipf", batch=512, pooling=10, zipf=1.05),
    _dlrm("dlrm-b2048-p20-zipf", batch=2048, pooling=20, zipf=1.05),
    _dlrm("dlrm-b512-p10-zipf0.8", batch=512, pooling=10, zipf=0.8),
    _dlrm("dlrm-b2048-p20-zipf0.8", batch=2048, pooling=20, zipf=0.8),
    _dlrm("dlrm-b512-p10-zipf1.3", batch=512, pooling=10, zipf=1.3),
    _dlrm("dlrm-b2048-p20-zipf1.3", batch=2048, pooling=20, zipf=1.3),
    _dlrm("dlrm-b1024-p5-adagrad", batch=1024, pooling=5, sparse_optimizer="adagrad", optimizer="adagrad"),
    _dlrm("dlrm-b1024-p5-cat", batch=1024, pooling=5, interaction="cat"),
    _own(_MLP, "mlp-b128-w512", "sgd", batch=128, width=512),
    _own(_MLP, "mlp-b1024-w512", "adam", batch=1024, width=512),
    _own(_MLP, "mlp-b256-w1536", "sgd", batch=256, width=1536),
    _own(_MLP, "mlp-b32-w256", "adamw", batch=32, width=256),
    _net(_TRANSFORMER, "gpt2-b4-eager", 4, architecture="gpt2", attention="eager"),
    _net(_TRANSFORMER, "gpt2-b8-sdpa", 8, architecture="gpt2", attention="sdpa"),
    _net(_TRANSFORMER, "gpt2-b2-l8-s64", 2, architecture="gpt2", layers=8, sequence_length=64, attention="eager"),
    _net(_TRANSFORMER, "opt-b4", 4, architecture="opt", attention="eager"),
    _net(
        {key: value for key, value in _TRANSFORMER.items() if key != "hidden_dropout"}, "llama-b4", 4,
        architecture="llama", kv_heads=2, attention="eager",
    ),
    _net(_TRANSFORMER, "bert-b8-s128", 8, architecture="bert", attention="eager"),
    _net(_TRANSFORMER, "bert-b16-s64-sdpa", 16, architecture="bert", sequence_length=64, attention="sdpa"),
    _net(_TRANSFORMER, "bert-b2-h512", 2, architecture="bert", hidden_size=512, heads=8, attention="eager"),
    _net(_VISION, "resnet18-b8-64px", 8, image_size=64),
    _net(_VISION, "resnet18-b32-64px", 32, image_size=64),
    _net(_VISION, "resnet18-b4-128px-nhwc", 4, image_size=128, channels_last=True),
    _net(_VISION, "resnet50-b8-64px", 8, depth=50, image_size=64),
    _own(_OWN, "autoencoder-b64", "adam", batch=64, channels=16),
    _own(_OWN, "autoencoder-b16-c48", "sgd", batch=16, channels=48),
)  # fmt: skip

SEVERAL: tuple[LiveCase, ...] = (
    _dlrm("dlrm-b256-p1-sharded", batch=256, pooling=1),
    _dlrm("dlrm-b1024-p5-sharded", batch=1024, pooling=5),
    _dlrm("dlrm-b512-p10-zipf-sharded", batch=512, pooling=10, zipf=1.05),
    _own(_MLP, "mlp-b128-w512-ddp", "sgd", batch=128, width=512),
    _own(_MLP, "mlp-b256-w1024-ddp", "adam", batch=256, width=1024),
    _net(_TRANSFORMER, "gpt2-b4-ddp", 4, architecture="gpt2", attention="eager"),
    _net(_TRANSFORMER, "bert-b4-ddp", 4, architecture="bert", attention="eager"),
    _net(_VISION, "resnet18-b4-64px-ddp", 4, image_size=64),
)


def live_cases(n_ranks: int) -> tuple[LiveCase, ...]:
    """The cases of one process, or of several."""
    return SINGLE if n_ranks == 1 else SEVERAL
