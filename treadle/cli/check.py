"""`treadle check`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import typer

from treadle.backends import Backend, cpu, select
from treadle.cases import Case, Input, all_cases
from treadle.checks import Check, gradient, symmetry
from treadle.cli.options import DEVICE
from treadle.cli.tables import LiveTable
from treadle.errors import BackendError
from treadle.graph.op import Gpu

QUICK_ROWS = 3  # of each op, those of middle size
REFERENCE = "5M"  # of the models that `treadle profile` times
ORIGINAL = "the original project reached 467 tokens/s with this model, on a Vega 8 through OpenCL"


def command(
    device: str = DEVICE,
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
    in float64. On a GPU the kernels alone are checked, and a model is timed there and on the CPU.
    The exit code is 1 when a check fails.
    """
    backend, why = select(device, threads)
    print(f"checks on {backend.describe()} ({why})\n")
    if llmc_state is not None:
        from treadle.cli.llmc_state import compare

        if not compare(*llmc_state, backend):
            raise typer.Exit(1)
        return
    ok = _check(_cases_by_op(quick), backend)
    if isinstance(backend.target, Gpu) and not quick:
        _speed(device, threads)
    if not ok:
        raise typer.Exit(1)


def _check(ops: dict[str, list[Case]], backend: Backend) -> bool:
    """Print a row for each op and kind of check, and what failed; whether nothing did."""
    columns = (max(map(len, ops)), len("bfloat16"), 0, 0, 7, len("FAILED"))
    shown = LiveTable(("op", "check", "rows", "worst error", "limit", ""), columns, left=2)
    checks, failures = 0, []
    with _progress(sum(map(len, ops.values()))) as advance:
        for op, cases in ops.items():
            groups: dict[str, _Group] = {}
            for case in cases:
                for kind, check in _results(case, backend):
                    groups.setdefault(kind, _Group()).add(case.title, check)
                advance()
            for kind, g in groups.items():
                worst = f"{g.worst.error:.1e}", f"{g.worst.limit:.1e}"
                shown.add(op, kind, g.rows, *worst, g.verdict)
                checks += g.rows
                failures += [f"{kind} of {line}" for line in g.failures]
    if failures:
        print("\nfailed:")
        print("\n".join(failures))
        print(f"\n{len(failures)} of {checks} checks failed")
    else:
        print(f"\nall {checks} checks passed")
    return not failures


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """What moves a bar of `total` steps, which is drawn where stderr is a terminal."""
    from treadle.train.report import is_terminal

    if not is_terminal(sys.stderr):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(
        console=Console(file=sys.stderr),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task("checks", total=total)
        yield lambda: bar.advance(task)


@dataclass
class _Group:
    """The checks of one kind of one op. The worst is the one nearest to its limit, or past it."""

    rows: int = 0
    worst: Check = field(default_factory=lambda: Check(0.0, 0.0))
    failures: list[str] = field(default_factory=list)

    def add(self, title: str, check: Check | BackendError) -> None:
        self.rows += 1
        if isinstance(check, BackendError):
            self.worst = Check(float("inf"), 0.0)
            self.failures.append(f"{title}: {check}")
            return
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


def _results(case: Case, backend: Backend) -> Iterator[tuple[str, Check | BackendError]]:
    """(kind of check, result) for every check of a row; an error where the device cannot run it."""
    if case.gradient and not isinstance(backend.target, Gpu):  # no kernel takes part in it
        yield "gradient", gradient(case)
    for dtype in case.dtypes:
        try:
            yield dtype, symmetry(case, backend, dtype)
        except BackendError as error:
            yield dtype, error


# ---------------------------------------------------------------- speed


def _speed(device: str, threads: int | None, steps: int = 10) -> None:
    """Print what the reference model reaches on the device, and on the CPU beside it."""
    from treadle.cli.profile import LADDER
    from treadle.cli.trial import open_trial
    from treadle.config import Config, inherit, with_values

    sizes = LADDER[REFERENCE]
    print(f"\ntraining a GPT-2 of 5.3 million parameters, {sizes.train.batch_size} x "
          f"{sizes.model.block_size} tokens a step, on random tokens\n")  # fmt: skip
    shown = LiveTable(("device", "ms/step", "tokens/s"), (40, 9, 9))
    for name in dict.fromkeys((device, "cpu") if cpu.available() else (device,)):
        own = with_values(Config(), {"train.device": name, "train.threads": threads})
        trial = open_trial(inherit(own, sizes))
        seconds = trial.measure(steps)
        described = trial.session.backend.describe()
        shown.add(described, f"{1000 * seconds:,.2f}", f"{trial.tokens / seconds:,.0f}")
        trial.close()
    print(f"\n{ORIGINAL}")
