"""`treadle config`."""

from __future__ import annotations

import json

import typer

from treadle.cli.tables import table
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
        rows = size_table()
        parts.append(table((list(row.values()) for row in rows), list(rows[0])))
    if schema:
        parts.append(json.dumps(json_schema(), indent=2))
    print("\n\n".join(parts))


def _keys() -> str:
    """Each key with its default and what it allows, and its description on the next line."""
    found = key_table()
    rows = [(key.name, json.dumps(key.default), key.type) for key in found]
    head, rule, *lines = table(rows, ("key", "default", "allowed"), left=3).split("\n")
    described = (f"{line}\n    {key.description}" for line, key in zip(lines, found, strict=True))
    return "\n".join([head, rule, *described])
