"""`kvpool qualify`: show that the memory behind a pool keeps what hosts without coherence rely on."""

from __future__ import annotations

from multiprocessing.connection import Connection, wait
from typing import Any

import click

import kvpool
from kvpool.reports import LITMUSES
from kvpool.tools.children import children
from kvpool.tools.console import emit, grid, json_option, progress, stdout, table
from kvpool.tools.qualify_side import DEFECTS, Advance, Task, run_side

__all__ = ["qualify", "run"]

MEANING = {
    "store": "a message: payload by ordinary stores and write-backs, then a flag",
    "stream": "a message: payload by non-temporal stores, then a flag",
    "pin": "both sides announce and look: never may both miss each other",
    "copy": "a copy under an unchanged word, while the payload is overwritten",
    "record": "records of a log are whole, while they are overwritten",
    "stale": "a line that was cached is current once it is invalidated",
}
NOTED = {"pin": "one side missed", "copy": "whole copies", "record": "whole records", "stale": "stale before"}
assert tuple(MEANING) == LITMUSES


def _work(task: Task, host: int, link: Connection) -> None:
    """A side in a process of its own: sends (done, total) and at last its result, or an error."""
    try:
        link.send(run_side(task, host, lambda done, total: link.send((done, total))))
    except kvpool.Error as error:
        link.send(error)
    except BrokenPipeError:
        pass  # whoever started us has gone


def run(task: Task, advance: Advance = lambda done, total: None) -> dict[str, Any]:
    """Run all sides of a task in processes of this machine; returns the leader's result.

    Raises the first error of a side; `SystemFailure` if one dies.
    """
    result: dict[str, Any] = {}
    with children(_work, [(task, host) for host in task.hosts]) as connections:
        links = dict(zip(connections, task.hosts, strict=True))
        open_links = set(links)
        while open_links:
            for link in [link for link in wait(list(open_links)) if isinstance(link, Connection)]:
                try:
                    message = link.recv()
                except (EOFError, ConnectionResetError):
                    raise kvpool.SystemFailure(f"the process of host {links[link]} died") from None
                if isinstance(message, kvpool.Error):
                    raise message
                if isinstance(message, dict):
                    open_links.discard(link)
                    if links[link] == task.hosts[0]:
                        result = message
                elif links[link] == task.hosts[0]:
                    advance(*message)
    return result


def _hosts(text: str) -> tuple[int, ...]:
    try:
        hosts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        hosts = []
    if len(hosts) < 2 or hosts[0] < 0:
        raise click.UsageError(f"--hosts {text}: two or more numbers of hosts, such as 0,1")
    return tuple(hosts)


def _show(result: dict[str, Any]) -> None:
    screen = stdout()
    rows = {name: result[name] for name in ("mode", "cpu", "instructions")}
    rows |= {"hosts": ", ".join(map(str, result["hosts"])), "rounds": f"{result['rounds']:,} of each test and pair"}
    rows |= {"stale reads": f"{result['stale']:,} (0 where the hardware keeps the caches coherent)"}
    screen.print(grid(result["uri"], rows))
    for pair in result.get("pairs", []):
        shown = table(
            f"hosts {pair['hosts'][0]} and {pair['hosts'][1]}", "test", "what", "failures", "noted", "", left=2
        )
        for name, test in pair["tests"].items():
            noted = (f"{test['noted']:,}", NOTED[name]) if name in NOTED else ("", "")
            failures = "no answer" if test["silent"] else f"{test['failures']:,}"
            shown.add_row(name, MEANING[name], failures, *noted)
        screen.print(shown)
    screen.print("qualified" if result["qualified"] else f"NOT qualified: {result['failures']:,} failures")


@click.command()
@click.argument("uri")
@click.option("--hosts", default="0,1", show_default=True, help="Which hosts of the pool take part, two or more.")
@click.option("--host", type=click.IntRange(0, 63),
              help="Be only this one of them; the others are started on their own machines.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 100_000_000), default=20_000, show_default=True,
              help="Of each test and pair of hosts.")  # fmt: skip
@click.option("--patience", type=click.FloatRange(0.1, 3600), default=60.0, show_default=True,
              help="Seconds to wait for another side.")  # fmt: skip
@click.option("--defect", type=click.Choice(list(DEFECTS)), default="none", hidden=True)
@json_option
@click.pass_context
def qualify(ctx: click.Context, uri: str, hosts: str, host: int | None, rounds: int, patience: float, defect: str,
            as_json: bool) -> None:  # fmt: skip
    """Run litmus tests between hosts on the memory of the pool URI, and record in it that they passed.

    Each host tests against each other one: messages by ordinary and by non-temporal stores, the two-sided
    announcement of pin and evict, copies and log records under overwriting, and what is seen of a line that was
    cached. The pool may be in use: the tests run in blocks that they reserve. Without --host all sides are processes
    of this machine. On a rack start the command with the same options and another --host on each machine. Exit code 1
    if a test fails: an earlier qualification is withdrawn then.
    """
    chosen = _hosts(hosts)
    if host is not None and host not in chosen:
        raise click.UsageError(f"--host {host} is none of --hosts {hosts}")
    task = Task(uri, chosen, rounds, defect, patience)
    with progress("qualifying") as advance:
        result = run(task, advance) if host is None else run_side(task, host, advance)
    if as_json:
        emit(result)
    else:
        _show(result)
    ctx.exit(0 if result["qualified"] else 1)
