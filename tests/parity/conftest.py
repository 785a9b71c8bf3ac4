"""Tests against PyTorch and transformers; `make parity` runs them, `make test` leaves them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

_TABLES = pytest.StashKey[list[str]]()


@pytest.fixture
def show(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Shows a table at the end of the run."""
    return pytestconfig.stash.setdefault(_TABLES, []).append


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is one of `-m parity`."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("parity")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for table in config.stash.get(_TABLES, []):
        terminalreporter.write_line("")
        terminalreporter.write_line(table)
