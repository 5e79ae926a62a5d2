"""What the commands share: one option, JSON on stdout, tables, a progress bar on stderr, and the way to fail."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from kvpool.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    from kvpool.pool import Pool

__all__ = [
    "emit", "fail", "grid", "host_option", "json_option", "look_at", "meter", "progress", "short", "size", "stdout",
    "table",
]  # fmt: skip

_JSON = "kvpool.tools.json"
_PLAIN_WIDTH = 200
Command = TypeVar("Command", bound=Callable[..., Any])
Advance = Callable[[int, int], None]
"""Called with (done, total), in any unit, from any thread."""


def json_option(command: Command) -> Command:
    """`--json` as the argument `as_json`; errors of the command then are JSON too."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[_JSON] = value
        return value

    text = "Print JSON, and nothing else, on standard output."
    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=remember, help=text)(command)


def host_option(command: Command) -> Command:
    """`--host`: which host of the pool to be while the command looks."""
    text = "Host to be while looking [default: KVPOOL_HOST, else one that is at work on this machine, else 0]"
    return click.option("--host", type=click.IntRange(0, 63), help=text)(command)


def look_at(uri: str, host: int | None) -> Pool:
    """Open a pool in order to look at it: also a device that is not qualified, and without waking a lost host."""
    from kvpool.pool import host_here, open

    if host is None and "KVPOOL_HOST" not in os.environ:
        host = host_here(uri)
    return open(uri, host=host, unqualified=True)


def emit(value: Any) -> None:
    """One JSON value on one line of stdout, flushed: another program may be waiting for it."""
    click.echo(json.dumps(value))


def fail(ctx: click.Context, message: str, code: int) -> NoReturn:
    """End the command with exit code 1: one line on stderr, or {"error", "code"} on stdout under `--json`."""
    if ctx.meta.get(_JSON):
        emit({"error": message, "code": code})
    else:
        click.echo(f"kvpool: {message}", err=True)
    ctx.exit(1)


def stdout() -> Console:
    """A console for tables; into a pipe or a file it is wide enough not to break lines."""
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else _PLAIN_WIDTH, markup=False, highlight=False, emoji=False)


def table(title: str, *columns: str, left: int = 1, header: bool = True) -> Table:
    """A table whose first `left` columns are text and whose others are numbers."""
    from rich import box
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", title_style="bold", show_header=header, pad_edge=False,
                 box=box.SIMPLE_HEAD if header else None)  # fmt: skip
    for at, column in enumerate(columns):
        made.add_column(column, justify="left" if at < left else "right", overflow="fold")
    return made


def grid(title: str, rows: dict[str, Any]) -> Table:
    """Names and values, one pair a line."""
    made = table(title, "", "", left=2, header=False)
    made.columns[0].style = "dim"
    for name, value in rows.items():
        made.add_row(name, str(value))
    return made


def meter(part: float) -> ProgressBar:
    """A bar for 0 (empty) to 1 (full)."""
    from rich.progress_bar import ProgressBar

    return ProgressBar(total=1.0, completed=part, width=24)


def size(count: int) -> str:
    """Bytes as people read them; 0 too."""
    return format_size(count) if count else "0"


def short(number: float) -> str:
    """A count or a rate, rounded to what is readable: 41234 -> '41.2k'."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return f"{number:.0f}"


@contextmanager
def progress(label: str) -> Iterator[Advance]:
    """A bar on stderr, gone when it is done; nothing at all where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
