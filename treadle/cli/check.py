"""`treadle check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import typer

from treadle.backends import Backend, select
from treadle.cases import Case, Input, all_cases
from treadle.checks import Check, gradient, symmetry
from treadle.cli.tables import LiveTable

QUICK_ROWS = 3  # of each op, those of middle size


def command(
    device: str = typer.Option("auto", help="Where to compute."),
    threads: int | None = typer.Option(None, min=1, help="CPU threads.", show_default=False),
    quick: bool = typer.Option(False, help=f"Only {QUICK_ROWS} rows of middle size of each op."),
    llmc_state: tuple[Path, Path] | None = typer.Option(
        None,
        metavar="MODEL STATE",
        help="Instead, compare a model of llm.c with its debug state, as its test_gpt2.c does.",
        show_default=False,
    ),
) -> None:
    """Check gradients and kernels on this machine: every op, at many sizes.

    Gradients are compared with central differences in float64, kernels with the NumPy reference
    in float64. The exit code is 1 when a check fails.
    """
    backend, why = select(device, threads)
    print(f"checks on {backend.describe()} ({why})\n")
    if llmc_state is not None:
        from treadle.cli.llmc_state import compare

        if not compare(*llmc_state, backend):
            raise typer.Exit(1)
        return
    ops = _cases_by_op(quick)
    columns = (max(map(len, ops)), len("bfloat16"), 0, 0, 7, len("FAILED"))
    shown = LiveTable(("op", "check", "rows", "worst error", "limit", ""), columns, left=2)
    checks, failures = 0, []
    for op, cases in ops.items():
        groups: dict[str, _Group] = {}
        for case in cases:
            for kind, check in _results(case, backend):
                groups.setdefault(kind, _Group()).add(case.title, check)
        for kind, g in groups.items():
            shown.add(op, kind, g.rows, f"{g.worst.error:.1e}", f"{g.worst.limit:.1e}", g.verdict)
            checks += g.rows
            failures += [f"{kind} of {line}" for line in g.failures]
    if failures:
        print("\nfailed:")
        print("\n".join(failures))
        print(f"\n{len(failures)} of {checks} checks failed")
        raise typer.Exit(1)
    print(f"\nall {checks} checks passed")


@dataclass
class _Group:
    """The checks of one kind of one op. The worst is the one nearest to its limit, or past it."""

    rows: int = 0
    worst: Check = field(default_factory=lambda: Check(0.0, 0.0))
    failures: list[str] = field(default_factory=list)

    def add(self, title: str, check: Check) -> None:
        self.rows += 1
        if self.rows == 1 or check.distance > self.worst.distance:
            self.worst = check
        if not check.ok:
            self.failures.append(f"{title}: error {check.error:.2e}, limit {check.limit:.2e}")

    @property
    def verdict(self) -> str:
        return "FAILED" if self.failures else "ok"


def _cases_by_op(quick: bool) -> dict[str, list[Case]]:
    ops: dict[str, list[Case]] = {}
    for case in all_cases():
        ops.setdefault(case.op.name, []).append(case)
    if quick:
        for op, cases in ops.items():
            first = max(0, (len(cases) - QUICK_ROWS) // 2)
            ops[op] = sorted(cases, key=_elements)[first : first + QUICK_ROWS]
    return ops


def _elements(case: Case) -> int:
    """Elements of all inputs of a row."""
    shapes = (x.shape if isinstance(x, Input) else x for x in case.inputs if x is not None)
    return sum(map(prod, shapes))


def _results(case: Case, backend: Backend) -> Iterator[tuple[str, Check]]:
    """(kind of check, result) for every check of a row."""
    if case.gradient:
        yield "gradient", gradient(case)
    for dtype in case.dtypes:
        yield dtype, symmetry(case, backend, dtype)
