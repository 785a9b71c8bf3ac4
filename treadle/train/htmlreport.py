"""A run as one HTML page: curves, samples, checkpoints, settings and environment.

The page is whole by itself: no script, no font and no picture of another file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from treadle import models
from treadle.config import Config, key_table, load_config, to_dict
from treadle.errors import ConfigError
from treadle.train.charts import STYLE, Series, chart, number
from treadle.train.curves import points, smoothed
from treadle.train.environment import read_environment
from treadle.train.metrics import JSONL_NAME, read_metrics
from treadle.train.registry import Listed, Registry
from treadle.train.report import duration, printable
from treadle.train.run import RUN_CONFIG
from treadle.train.samples import read_samples

Metrics = list[dict[str, Any]]

PAGE_STYLE = """
:root { color-scheme: light dark; --text: #1d2330; --muted: #667085; --line: #e4e7ec;
  --page: #fff; --card: #f8f9fb; --a: #2f6fdb; --b: #c2570c; --c: #d92d20; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8ec; --muted: #98a2b3; --line: #2c313a;
  --page: #14171c; --card: #1b1f26; --a: #6ea3ff; --b: #f0984a; --c: #ff7a70; } }
body { margin: 0 auto; max-width: 860px; padding: 24px 20px 60px; color: var(--text);
  background: var(--page); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 8px 0 2px; }
h2 { font-size: 18px; margin: 36px 0 10px; }
p.lead { color: var(--muted); margin: 0 0 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; }
.tile b { display: block; font-size: 19px; font-weight: 600; }
.tile span { color: var(--muted); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td:nth-child(2) { overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; margin: 6px 0 14px; }
.fault { color: var(--c); }
summary { cursor: pointer; color: var(--muted); }
"""


def page(run: Path) -> str:
    """The page of a run directory. ConfigError where it is none, CheckpointError for a damaged
    metrics file."""
    if not (run / RUN_CONFIG).is_file():
        raise ConfigError(f"{run}: not a run directory (it has no {RUN_CONFIG}); give one")
    config = load_config(run / RUN_CONFIG)
    metrics = read_metrics(run) if (run / JSONL_NAME).exists() else []
    name = run.resolve().name
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)}</title><style>{PAGE_STYLE}{STYLE}</style></head><body>",
        f"<h1>{escape(name)}</h1>",
        f'<p class="lead">{escape(_lead(config, metrics))}</p>',
        _tiles(config, metrics),
        *_curves(metrics),
        *_section("Samples", _samples(read_samples(run))),
        *_section("Checkpoints", _checkpoints(Registry(run).listed())),
        *_section("Settings", _settings(config)),
        *_section("Environment", _environment(read_environment(run))),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(title: str, content: str) -> list[str]:
    return [f"<h2>{title}</h2>", content] if content else []


# ---------------------------------------------------------------- the head


def _lead(config: Config, metrics: Metrics) -> str:
    sizes = config.model.model_dump(exclude={"architecture"})
    model = models.build(config.model.architecture, **sizes)
    done, steps = metrics[-1]["step"] if metrics else 0, config.train.steps or 0
    state = "finished" if done >= steps else f"at step {done:,} of {steps:,}"
    return (
        f"{config.model.architecture} of {model.n_parameters():,} parameters, {state}; "
        f"data: {config.data.path}"
    )


def _tiles(config: Config, metrics: Metrics) -> str:
    train, val = points(metrics, "loss"), points(metrics, "val_loss")
    done = metrics[-1]["step"] if metrics else 0
    tokens = done * (config.train.batch_size or 0) * config.window
    tiles = [("steps", f"{done:,}"), ("tokens trained on", f"{tokens:,}")]
    if train:
        tiles.append(("last training loss, mean", f"{smoothed(train)[-1][1]:.4f}"))
    if val:
        step, best = min(val, key=lambda point: (point[1], point[0]))
        tiles.append((f"lowest validation loss, step {step:,.0f}", f"{best:.4f}"))
    if metrics:
        seconds = sum(y for _, y in points(metrics, "step_ms")) / 1000
        tiles.append(("time in training steps", duration(seconds)))
    spikes, skipped = points(metrics, "spike"), points(metrics, "skipped")
    if spikes:
        tiles.append(("loss spikes", f"{len(spikes):,}"))
    if skipped:
        tiles.append(("updates left out", f"{skipped[-1][1]:,.0f}"))
    cells = (f'<div class="tile"><b>{escape(v)}</b><span>{k}</span></div>' for k, v in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


# ---------------------------------------------------------------- curves


def _curves(metrics: Metrics) -> list[str]:
    loss = points(metrics, "loss")
    charts = {
        "Loss, nats per token": [
            Series("", loss, "a", "band"),
            Series("training", smoothed(loss), "a"),
            Series("validation", points(metrics, "val_loss"), "b", "marks"),
            Series("spike", points(metrics, "spike"), "c", "flags"),
        ],
        "Learning rate": [Series("", points(metrics, "lr"))],
        "Norm of the gradient, before clipping": [
            Series("", points(metrics, "grad_norm"), "a", "band"),
            Series("", smoothed(points(metrics, "grad_norm"))),
        ],
        "Tokens a second": [Series("", points(metrics, "tokens_per_s"), "a", "band")],
    }
    return [
        part for title, series in charts.items() for part in _section(title, chart(title, series))
    ]


# ---------------------------------------------------------------- tables


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A table of cells that are HTML already; the first `numbers` columns stand to the right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = (
            f"<{tag}{' class=n' if i < numbers else ''}>{cell}</{tag}>"
            for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f"<table>\n{line('th', header)}\n{body}\n</table>" if body else ""


def _checkpoints(found: Sequence[Listed]) -> str:
    rows = []
    for row in found:
        losses = ("" if x is None else f"{x:.4f}" for x in (row.train_loss, row.val_loss))
        marks = [name for name in ("best", "latest") if getattr(row, name)]
        state = ", ".join(["intact", *marks])
        if row.fault is not None:
            state = f'<span class="fault">damaged: {escape(row.fault)}</span>'
        time = "" if row.time is None else f"{row.time:%Y-%m-%d %H:%M} UTC"
        rows.append((f"{row.step:,}", *losses, f"{row.size / 2**20:,.1f} MiB", time, state))
    header = ("step", "training loss", "validation loss", "size", "saved", "state")
    return _table(header, rows, numbers=4)


def _settings(config: Config) -> str:
    """The keys that are not as by default, and the others folded away."""
    values = {
        f"{section}.{name}": value
        for section, inside in to_dict(config).items()
        for name, value in inside.items()
    }
    rows: dict[bool, list[Sequence[str]]] = {True: [], False: []}
    for key in key_table():
        value, default = json.dumps(values[key.name]), json.dumps(key.default)
        row = f"<code>{key.name}</code>", escape(value), escape(key.description)
        rows[value == default].append(row)
    changed, same = (
        _table(("key", "value", "what it is"), rows[is_default]) for is_default in (False, True)
    )
    return f"{changed}<details><summary>keys with their default</summary>{same}</details>"


def _environment(found: Mapping[str, Any]) -> str:
    return _table(("", ""), [(escape(k), escape(str(v))) for k, v in found.items()])


def _samples(found: Sequence[tuple[int, str]]) -> str:
    blocks = [
        f"<p>at step {number(step)}</p><pre>{escape(printable(text))}</pre>" for step, text in found
    ]
    if not blocks:
        return ""
    earlier = "\n".join(blocks[-2::-1])
    more = f"<details><summary>{len(blocks) - 1} earlier</summary>{earlier}</details>"
    return blocks[-1] + (more if earlier else "")
