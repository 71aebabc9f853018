"""``autogemm doctor``: what is installed, and what to do about what is not."""

from __future__ import annotations

import typer

from ..doctor import examine
from . import options, render

TROUBLE = 1


def doctor(db: options.DbOption = None, as_json: options.JsonOption = False) -> None:
    """Say what is installed and usable here. Exit status 1 if something that tuning needs is missing."""
    items = examine(options.database(db))
    trouble = [item for item in items if item.needed and item.state != "ok"]
    if as_json:
        render.document({"usable": not trouble, "items": [item.to_json() for item in items]})
    else:
        render.items(items)
    if trouble:
        raise typer.Exit(TROUBLE)
