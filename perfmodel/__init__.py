"""Predict how fast a PyTorch model trains on many GPUs, before anyone rents them.

The front door: `predict`, `Prediction`, the errors. Importing it loads neither torch nor scikit-learn; names are resolved
when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.api import Predictor, extract_graph, predict, predict_run
    from perfmodel.autotune.front import search
    from perfmodel.autotune.sharding import rank_sharding
    from perfmodel.errors import ConfigError, GraphError, InfeasiblePlanError, PerfModelError
    from perfmodel.pipeline.prediction import Prediction

__all__ = [
    "ConfigError",
    "GraphError",
    "InfeasiblePlanError",
    "PerfModelError",
    "Prediction",
    "Predictor",
    "extract_graph",
    "predict",
    "predict_run",
    "rank_sharding",
    "search",
]

_HOMES = {
    "ConfigError": "perfmodel.errors",
    "GraphError": "perfmodel.errors",
    "InfeasiblePlanError": "perfmodel.errors",
    "PerfModelError": "perfmodel.errors",
    "Prediction": "perfmodel.pipeline.prediction",
    "Predictor": "perfmodel.api",
    "extract_graph": "perfmodel.api",
    "predict": "perfmodel.api",
    "predict_run": "perfmodel.api",
    "rank_sharding": "perfmodel.autotune.sharding",
    "search": "perfmodel.autotune.front",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'perfmodel' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
