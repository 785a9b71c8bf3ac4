"""`treadle config`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable

import typer

from treadle.cli.tables import blocks, table, terminal_width
from treadle.config import json_schema, key_table, size_table


def command(
    keys: bool = typer.Option(False, "--keys", help="The keys; what is printed by default."),
    sizes: bool = typer.Option(False, "--sizes", help="What follows the corpus size where null."),
    schema: bool = typer.Option(False, "--schema", help="The JSON schema, for editors."),
) -> None:
    """Print the keys of a configuration, the table of sizes, or the JSON schema."""
    parts = []
    if keys or not (sizes or schema):
        parts.append(_keys())
    if sizes:
        header, *rows = zip(*(row.items() for row in size_table()), strict=True)
        parts.append(table((_turned(row) for row in rows), _turned(header)))
    if schema:
        parts.append(json.dumps(json_schema(), indent=2))
    print("\n\n".join(parts))


def _turned(row: Iterable[tuple[str, str]]) -> list[str]:
    """A column of the table of sizes as a row: the name that all cells have, and the cells."""
    names, cells = zip(*row, strict=True)
    return [names[0], *cells]


def _keys() -> str:
    """Each key with its default and what it allows, and its description on the next line."""
    found = key_table()
    rows = [(key.name, json.dumps(key.default), key.type) for key in found]
    head, rule, *lines = blocks(rows, ("key", "default", "allowed"), left=3)
    indent = " " * 4
    described = (
        f"{line}\n"
        + textwrap.fill(
            key.description,
            terminal_width() or 10_000,
            initial_indent=indent,
            subsequent_indent=indent,
        )
        for line, key in zip(lines, found, strict=True)
    )
    return "\n".join([head, rule, *described])
