"""Which module an op belongs to: a stack of running modules in forward, the forward caller's path in backward."""

from __future__ import annotations

from typing import Any

from torch import nn

from perfmodel.extract._torch import backward_node_number, next_node_number


class ModulePaths:
    """Follows module calls and remembers under which path each autograd node was made.

    Modules outside the traced tree (a loss, a module made in `forward`) are named after their class below their caller.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names = {id(module): name for name, module in root.named_modules()}
        self._stack: list[str] = []
        self._by_node: dict[int, str] = {}
        self._last_backward = ""

    @property
    def depth(self) -> int:
        """Number of module calls that are running."""
        return len(self._stack)

    @property
    def innermost(self) -> str:
        """Path of the module that runs now, or an empty string."""
        return self._stack[-1] if self._stack else ""

    def enter(self, module: nn.Module, _args: Any) -> None:
        """Module hook: a call begins."""
        name = self._names.get(id(module))
        if name is None:
            kind = type(module).__name__
            name = f"{self.innermost}.{kind}" if self.innermost else kind
        self._stack.append(name)

    def leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Module hook: a call ended, by return or by error."""
        if self._stack:
            self._stack.pop()

    def of_forward(self) -> str:
        """Path of an op that autograd records; the node it made, if any, gets this path too."""
        path = self.innermost if self._stack else self._of_node()
        self._by_node.setdefault(next_node_number() - 1, path)
        return path

    def of_backward(self) -> str:
        """Path of the module whose forward made the node that runs now."""
        self._last_backward = self._of_node()
        return self._last_backward

    def _of_node(self) -> str:
        number = backward_node_number()
        return self._last_backward if number is None else self._by_node.get(number, self._last_backward)
