"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# The same examples on every run; a loaded machine must not fail a test by its clock.
settings.register_profile("treadle", derandomize=True, deadline=None, database=None)
settings.load_profile("treadle")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with tinyshakespeare.txt, quijote.txt and gpt2-tokenizer.json."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        missing = f"{folder} is not there"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the tests away from the cache of the person who runs them."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):  # all workers share what they compile
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREADLE_CACHE", str(folder / "kernel-cache"))
        yield
