"""Models as plain modules, built from specs on tensors without storage. This room knows nothing about time."""

from perfmodel.models.build import build, materialize
from perfmodel.models.built import BuiltModel
from perfmodel.models.training import make_optimizers
from perfmodel.models.user import from_module

__all__ = ["BuiltModel", "build", "from_module", "make_optimizers", "materialize"]
