"""The architecture: which module may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "treadle"

# Unit: the units that it may import, besides itself and errors.
ALLOWED = {
    "errors": set(),
    "files": set(),
    "safetensors_io": {"files"},
    "config": {"files"},
    "graph": set(),
    "ops": {"graph"},
    "passes": {"graph", "ops"},
    "models": {"config", "files", "ops", "graph"},
    "backends": {"graph"},
    "data": {"config", "files"},
    "cases": {"graph", "ops"},
    "checks": {"cases", "graph", "ops", "backends"},
    "measure": {"graph", "ops", "backends"},
    "generate": {"config", "data", "graph", "ops", "passes", "models", "backends", "files"},
    "train": {
        "config",
        "data",
        "graph",
        "ops",
        "passes",
        "models",
        "backends",
        "generate",
        "files",
        "interop",
        "safetensors_io",
    },
    "interop": {
        "config",
        "data",
        "graph",
        "ops",
        "passes",
        "models",
        "backends",
        "files",
        "safetensors_io",
    },
    "api": {"config", "data", "graph", "ops", "models", "backends", "generate", "train", "files"},
}


def imports_of(path: Path) -> set[str]:
    """First-level units of this package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
            if node.module == "treadle":
                names = [f"treadle.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("treadle.")}
    return found


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_table(path: Path) -> None:
    unit = unit_of(path)
    if unit in ("__init__", "__main__", "cli"):
        return
    extra = imports_of(path) - ALLOWED[unit] - {unit, "errors", "__version__"}
    assert not extra, f"{unit} must not import {', '.join(sorted(extra))}"


def test_nothing_imports_cli() -> None:
    guilty = [
        p for p in MODULES if unit_of(p) not in ("cli", "__main__") and "cli" in imports_of(p)
    ]
    assert not guilty


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, treadle\n"
        "heavy = {'numpy', 'pydantic', 'tokenizers', 'safetensors', 'rich', 'typer'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    import treadle

    for name in treadle.__all__:
        assert getattr(treadle, name) is not None
