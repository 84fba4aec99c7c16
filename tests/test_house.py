"""The plan of the house: which wing may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "loco_fsdp"

# What a module may import of loco_fsdp, by the wing that it stands in. Leaves know nothing but
# themselves and stand wherever they are needed.
LEAVES = {"config", "version", "wrappers"}
ALLOWED = {
    "codec": {"codec"},
    "reduction": {"reduction", "codec"},
    "gather": {"gather", "reduction", "codec"},
    "frontends": {"frontends", "gather", "reduction"},
    "planning": {"planning", "reduction", "codec"},
}
COMMANDS = {"plan", "probe"}


def imported(path: Path) -> set[str]:
    """Names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms(path: Path) -> set[str]:
    """Wings, and modules that stand in none, that a file imports of loco_fsdp."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("loco_fsdp.")}


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    wing = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if wing in ALLOWED:
        assert rooms(path) <= ALLOWED[wing] | LEAVES
    elif wing not in COMMANDS:
        assert "planning" not in rooms(path)


def test_reductions_and_gathers_know_no_framework() -> None:
    for path in [
        path for wing in ("reduction", "gather") for path in (PACKAGE / wing).glob("*.py")
    ]:
        names = imported(path)
        assert not any(
            name.startswith(("torch.distributed.fsdp", "torch.nn.parallel", "megatron"))
            for name in names
        ), path


def test_the_walls_stand_where_they_are_said_to() -> None:
    """Each wing has files, and each arrow that is allowed is there: else this tests nothing."""
    for wing, others in ALLOWED.items():
        found = set().union(*(rooms(path) for path in (PACKAGE / wing).glob("*.py")))
        assert others <= found | {wing}, wing
