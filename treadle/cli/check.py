"""`treadle check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import typer

from treadle.backends import Backend, select
from treadle.cases import all_cases
from treadle.checks import Check, gradient, symmetry
from treadle.cli.tables import table

QUICK_ROWS = 3  # of each op


def command(
    device: str = typer.Option("auto", help="Where to compute."),
    threads: int | None = typer.Option(None, min=1, help="CPU threads.", show_default=False),
    quick: bool = typer.Option(False, help=f"Only {QUICK_ROWS} rows of each op."),
) -> None:
    """Check gradients and kernels on this machine: every op, at many sizes.

    Gradients are compared with central differences in float64, kernels with the NumPy reference
    in float64. The exit code is 1 when a check fails.
    """
    backend, why = select(device, threads)
    print(f"checks on {backend.describe()} ({why})\n")
    groups: dict[tuple[str, str], _Group] = {}
    for op, kind, title, check in _results(backend, quick):
        groups.setdefault((op, kind), _Group()).add(title, check)
    rows = [
        (op, kind, g.rows, f"{g.worst.error:.1e}", f"{g.worst.limit:.1e}", g.verdict)
        for (op, kind), g in groups.items()
    ]
    print(table(rows, ("op", "check", "rows", "worst error", "limit", ""), left=2))
    failures = [f"{kind} of {line}" for (_, kind), g in groups.items() for line in g.failures]
    checks = sum(g.rows for g in groups.values())
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
        if self.rows == 1 or _distance(check) > _distance(self.worst):
            self.worst = check
        if not check.ok:
            self.failures.append(f"{title}: error {check.error:.2e}, limit {check.limit:.2e}")

    @property
    def verdict(self) -> str:
        return "FAILED" if self.failures else "ok"


def _distance(check: Check) -> float:
    if check.ok:
        return check.error / check.limit if check.limit else 0.0
    return float("inf")


def _results(backend: Backend, quick: bool) -> Iterator[tuple[str, str, str, Check]]:
    """(op, kind of check, row, result) for every check."""
    seen: dict[str, int] = {}
    for case in all_cases():
        name = case.op.name
        seen[name] = seen.get(name, 0) + 1
        if quick and seen[name] > QUICK_ROWS:
            continue
        if case.gradient:
            yield name, "gradient", case.title, gradient(case)
        for dtype in case.dtypes:
            yield name, dtype, case.title, symmetry(case, backend, dtype)
