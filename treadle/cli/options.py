"""Flags that several commands share. Each stands for a configuration key and takes its help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from treadle.config import Config, key_table, load_config

_HELP = {key.name: key.description for key in key_table()}


def flag(key: str, *names: str) -> Any:
    """A typer option for a dotted configuration key; `--its-last-part` unless names are given."""
    names = names or ("--" + key.rpartition(".")[2].replace("_", "-"),)
    return typer.Option(None, *names, help=_HELP[key], show_default=False)


DEVICE = typer.Option("auto", help=_HELP["train.device"])
CONFIG = typer.Argument(
    None, metavar="[CONFIG.json]", help="A configuration file.", show_default=False
)
SET = typer.Option(
    None,
    "--set",
    metavar="KEY=VALUE",
    help="Set any configuration key, such as optimizer.weight_decay=0.1; may be repeated.",
    show_default=False,
)

# Parameter of the command's function: configuration key.
FLAGS = {
    "data": "data.path",
    "init_from": "train.init_from",
    "steps": "train.steps",
    "batch_size": "train.batch_size",
    "n_layer": "model.n_layer",
    "n_head": "model.n_head",
    "n_embd": "model.n_embd",
    "block_size": "model.block_size",
    "lr": "optimizer.lr",
    "device": "train.device",
    "threads": "train.threads",
    "seed": "train.seed",
    "precision": "train.precision",
    "recompute": "train.recompute",
    "tokenizer": "data.tokenizer",
    "vocab": "data.vocab_path",
    "merges": "data.merges_path",
}


def with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command taking (config: Config, name: str, **own) the shared flags.

    The wrapped command gets CONFIG, --set and every flag of FLAGS that it has not itself, and is
    called with the configuration they make and with the name that a run on it has.
    """
    own = {
        name: p
        for name, p in inspect.signature(function, eval_str=True).parameters.items()
        if name not in ("config", "name")
    }
    shared = {name: key for name, key in FLAGS.items() if name not in own}
    texts = ["data", "init_from", "device", "precision", "recompute"]
    texts += ["tokenizer", "vocab", "merges"]
    types = {"lr": float, **dict.fromkeys(texts, str)}
    parameters = [
        inspect.Parameter(
            "config_file", inspect.Parameter.KEYWORD_ONLY, default=CONFIG, annotation=str | None
        )
    ]
    for name, key in shared.items():
        kind = types.get(name, int)
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=flag(key, "--" + name.replace("_", "-")),
                annotation=kind | None,
            )
        )
    parameters.append(
        inspect.Parameter(
            "set_", inspect.Parameter.KEYWORD_ONLY, default=SET, annotation=list[str] | None
        )
    )
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.values()]

    def command(
        config_file: str | None = None, set_: list[str] | None = None, **values: Any
    ) -> None:
        flags = {key: values.pop(name) for name, key in shared.items()}
        given = {key: value for key, value in flags.items() if value is not None}
        config = load_config(config_file, set_ or [], given)
        function(config=config, name=run_name(config_file, config), **values)

    command.__doc__ = function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def run_name(config_file: str | None, config: Config) -> str:
    """What a run is called: by its configuration file, else by its data."""
    source = config_file or config.data.path or "run"
    return Path(source).resolve().stem or "run"
