"""`treadle plan`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import typer

from treadle.cli.options import with_flags
from treadle.cli.tables import counted, mebibytes, rate, table
from treadle.cli.trial import Trial, open_trial
from treadle.config import RECOMPUTE, Config
from treadle.errors import ConfigError
from treadle.graph.plan import Plan
from treadle.graph.value import ROLES
from treadle.train.report import duration
from treadle.train.saver import snapshot_bytes

MEASURED_STEPS = 5

# What a person calls the roles of buffers.
SMALL_BUFFERS = "inputs, outputs, scalars"
ROLE_LABELS = {
    "weight": "weights",
    "shadow": "weights in bf16",
    "grad": "gradients",
    "state": "optimizer state",
    "input": SMALL_BUFFERS,
    "output": SMALL_BUFFERS,
    "scalar": SMALL_BUFFERS,
    "cache": "caches",
}


@with_flags
def command(
    config: Config,
    name: str,
    draw: Path | None = typer.Option(
        None, metavar="FILE.svg", help="Draw a graph of the program.", show_default=False
    ),
    graph: str = typer.Option("micro_first", help="Which graph --draw and --print show."),
    print_: bool = typer.Option(
        False, "--print", help="Print the graph and its launches instead of the tables."
    ),
) -> None:
    """Show memory, FLOPs, tokens, epochs and time of a run, before anything runs.

    A few steps are timed on the data; no run directory is written. Without data the sizes of the
    model and the batch are enough.
    """
    trial = open_trial(config)
    if draw is not None:
        _draw(_chosen(trial, graph), draw)
    if print_:
        chosen = _chosen(trial, graph)
        print(f"{chosen.graph}\n\n{chosen}")
    else:
        print("\n\n".join(_tables(trial, name)))
    trial.close()


def _chosen(trial: Trial, graph: str) -> Plan:
    plans = trial.session.executable.plans
    if graph not in plans:
        raise ConfigError(f"--graph: there is no graph '{graph}'; one of {', '.join(plans)}")
    return plans[graph]


def _draw(plan: Plan, path: Path) -> None:
    from treadle.graph.draw import draw

    try:
        path.write_text(draw(plan.graph), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--draw: cannot write {path}: {error.strerror}") from None
    print(f"drew {path}\n")


# ---------------------------------------------------------------- the tables


def _tables(trial: Trial, name: str) -> list[str]:
    return [_head(trial, name), _memory(trial), _recompute(trial), _step(trial), _run(trial)]


def _head(trial: Trial, name: str) -> str:
    model, dataset = trial.session.model, trial.dataset
    rows = [
        ("plan of", name),
        ("device", f"{trial.session.backend.describe()} ({trial.why})"),
        ("model", f"{model.architecture}, {model.n_parameters():,} parameters"),
        ("data", str(dataset) if dataset else "none given: random tokens"),
        *(("note", note) for note in (dataset.notes if dataset else ())),
    ]
    return table(rows, left=2)


def _memory(trial: Trial) -> str:
    executable = trial.session.executable
    memory, program = executable.memory(), executable.program
    copied = snapshot_bytes(program)
    persistent: Counter[str] = Counter()
    for role in ROLES:
        persistent[ROLE_LABELS.get(role, role)] += program.persistent_bytes(role)
    rows = [(label, mebibytes(nbytes)) for label, nbytes in persistent.items() if nbytes]
    rows += [
        ("activations and other temporaries (arena)", mebibytes(memory.arena)),
        (f"scratch of {counted(executable.threads, 'thread')}", mebibytes(memory.scratch)),
        ("copy that is being saved", mebibytes(copied)),
        ("total", mebibytes(memory.total + copied)),
    ]
    return table(rows, ("memory", ""))


def _recompute(trial: Trial) -> str:
    """What each choice of train.recompute would need."""
    session, chosen = trial.session, trial.config.train.recompute
    copied, rows = snapshot_bytes(session.program), []
    for how in RECOMPUTE:
        memory, cost = session.planned(how)
        mark = "this run" if how == chosen else ""
        rows.append((how, mebibytes(memory.total + copied), f"{cost.flops / 1e9:,.3f}", mark))
    return table(rows, ("--recompute", "peak memory", "GFLOP a step", ""))


def _step(trial: Trial) -> str:
    plans, cost = trial.session.executable.plans, trial.session.cost()
    rows: list[tuple[object, ...]] = []
    for graph, count in trial.graphs().items():
        plan = plans[graph]
        rows.append(
            (
                graph,
                count,
                len(plan.graph.nodes),
                f"{plan.cost.flops * count / 1e9:,.3f}",
                f"{plan.cost.nbytes * count / 1e6:,.1f}",
            )
        )
    total = f"{cost.flops / 1e9:,.3f}", f"{cost.nbytes / 1e6:,.1f}"
    rows.append(("total", "", "", *total))
    return table(rows, ("graphs of a step", "runs", "nodes", "GFLOP", "MB moved"))


def _run(trial: Trial) -> str:
    train, cost = trial.config.train, trial.session.cost()
    seconds = trial.measure(MEASURED_STEPS)
    rows = [
        ("tokens a step", f"{trial.tokens:,}"),
        ("time of a step", f"{1000 * seconds:,.2f} ms"),
        ("tokens a second", f"{trial.tokens / seconds:,.0f}"),
        ("GFLOP/s", rate(cost.flops, seconds)),
        ("GB/s", rate(cost.nbytes, seconds)),
    ]
    if train.steps is not None:
        rows += [("steps", f"{train.steps:,}"), ("tokens", f"{train.steps * trial.tokens:,}")]
        if trial.dataset is not None:
            epochs = train.steps * trial.tokens / len(trial.dataset.train)
            rows.append(("epochs", f"{epochs:,.2f}"))
        training, evaluating = train.steps * seconds, _evaluating(trial)
        rows.append(("time of training", duration(training)))
        if evaluating:
            rows.append(("time of evaluations", duration(evaluating)))
            rows.append(("time in all", duration(training + evaluating)))
    return table(rows, ("the run", "estimate"))


def _evaluating(trial: Trial) -> float:
    """Seconds of all evaluations of the run: the periodic ones, and the whole split at the end."""
    train = trial.config.train
    seconds, whole = trial.evaluation()
    periodic = 0
    if train.eval_every and train.steps:
        periodic = (train.steps - 1) // train.eval_every
    return seconds * (periodic * min(train.eval_batches or whole, whole) + whole)
