"""Imports point one way (docs/architecture.md, section 2). The checker itself is tested with code that breaks the rule."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A room may import rooms of a strictly lower level, itself, and the extra rooms named in ALSO.
LEVELS = [
    {"units", "errors", "heap"},
    {"graph", "estimate", "metrics"},
    {"config", "topology", "db"},
    {"kernels", "collectives", "plan"},
    {"sim"},
    {"pipeline"},
    {"sharding", "validate", "traces", "profiling"},
    {"utilisation"},
    {"diagnose"},
    {"report"},
    {"api"},
    {"autotune"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
ALSO = {
    "units": {"errors"},
    "topology": {"config"},  # a topology is built from its spec
    "db": {"config"},  # device.yaml has a schema
    "models": {"graph", "config", "errors", "units"},
    "extract": {"graph", "config", "errors", "units", "heap", "models"},
    "__init__": set(LEVEL) | {"api"},
}
ONLY = {"sim": {"errors", "units", "metrics"}}  # the simulator knows no tensors, devices or YAML
LAZY = {"models": {"pipeline", "validate", "api", "cli"}, "extract": {"pipeline", "validate", "api", "cli"}}
TORCH_ROOMS = {"models", "extract", "validate", "profiling"}


def imports_of(source: str) -> list[tuple[str, bool]]:
    """(dotted module, at module level) for every import in the source that runs (not under `if TYPE_CHECKING:`)."""
    tree = _Runtime().visit(ast.parse(source))
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"perfmodel.{a.name}" for a in node.names] if node.module == "perfmodel" else [node.module]
            found += [(name, id(node) in top) for name in names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
    return found


class _Runtime(ast.NodeTransformer):
    """Drops `if TYPE_CHECKING:` blocks."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)


def room_of(dotted: str) -> str:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def violations(room: str, source: str) -> list[str]:
    """What in a file of `room` breaks the one-way rule."""
    broken = []
    for module, at_top in imports_of(source):
        if module.split(".")[0] in {"torch", "torchvision"} and at_top and room not in {"models", "extract"}:
            broken.append(f"{room} imports {module} at module level")
        if module.split(".")[0] == "torch" and room not in TORCH_ROOMS:
            broken.append(f"{room} imports {module}; only {sorted(TORCH_ROOMS)} may")
        if module.split(".")[0] == "calibrate" and (room != "cli" or at_top):
            broken.append(f"{room} imports calibrate; only cli may, inside a function")
        if module.split(".")[0] == "perfmodel":
            broken += _room_violation(room, room_of(module), at_top)
    return broken


def _room_violation(room: str, target: str, at_top: bool) -> list[str]:
    if target in (room, "__init__") or target in ALSO.get(room, set()):
        return []
    if room in ONLY and target not in ONLY[room]:
        return [f"{room} imports {target}"]
    if target in LAZY:
        allowed = room in LAZY[target] and not at_top
        return [] if allowed else [f"{room} imports {target}, or does so at module level"]
    if room in LEVEL and target in LEVEL and LEVEL[target] < LEVEL[room]:
        return []
    return [f"{room} imports {target}"]


def files() -> list[Path]:
    return sorted((ROOT / "perfmodel").rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT / "perfmodel")
    room = relative.parts[0].removesuffix(".py")
    assert violations(room, path.read_text()) == []


def test_every_room_has_a_level() -> None:
    rooms = {p.relative_to(ROOT / "perfmodel").parts[0].removesuffix(".py") for p in files()}
    assert rooms - set(LEVEL) - {"models", "extract", "__init__"} == set()


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("sim", "from perfmodel.kernels import price"),
        ("kernels", "import torch"),
        ("kernels", "def f():\n    import torch"),
        ("kernels", "import perfmodel.pipeline.run"),
        ("graph", "from perfmodel.config import load_model"),
        ("pipeline", "from perfmodel.extract import trace"),
        ("sharding", "def f():\n    from perfmodel.extract import trace"),
        ("report", "from perfmodel import cli"),
        ("cli", "import calibrate"),
        ("validate", "def f():\n    import calibrate"),
    ],
)
def test_the_checker_sees_a_wrong_import(room: str, source: str) -> None:
    assert violations(room, source)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("pipeline", "def f():\n    from perfmodel.extract import trace"),
        ("cli", "def f():\n    import calibrate"),
        ("extract", "import torch\nfrom perfmodel.graph import Op"),
        ("sim", "import numpy\nfrom perfmodel.errors import PerfModelError"),
    ],
)
def test_the_checker_lets_right_imports_pass(room: str, source: str) -> None:
    assert violations(room, source) == []
