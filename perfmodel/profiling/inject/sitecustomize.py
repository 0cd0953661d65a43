"""Found first on PYTHONPATH by the Python processes of a profiled script: waits for torch, then watches its optimizers.

Another `sitecustomize` that this one hides is run too.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_WATCHED = "torch.optim.optimizer"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the module of optimizers load as ever, then installs the hook."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that installs the hook behind it."""
        if fullname != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Installing(spec.loader)
        return spec


class _Installing(importlib.abc.Loader):
    """Another loader, and the hook once that has run the module."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the other loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the other loader; what the hook imports from the module is there by then."""
        self.loader.exec_module(module)
        from perfmodel.profiling.hook import install
        from perfmodel.profiling.settings import ENVIRONMENT_KEY, ProfileSettings

        install(ProfileSettings.from_text(os.environ[ENVIRONMENT_KEY]))


if os.environ.get("PERFMODEL_PROFILE"):
    sys.meta_path.insert(0, _AfterImport())

_here = os.path.dirname(os.path.abspath(__file__))
_others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    _hidden.loader.exec_module(_module)
