"""Tests against PyTorch and transformers; `make parity` runs them, `make test` leaves them out."""

from __future__ import annotations

from collections.abc import Callable

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


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for table in config.stash.get(_TABLES, []):
        terminalreporter.write_line("")
        terminalreporter.write_line(table)
