"""The command `kvpool`: its subcommands are imported when they are used, and its errors are one line.

Exit codes: 0 done; 1 the pool (or what was asked of it) says no; 2 the command line is wrong; 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
from typing import Any, NamedTuple, NoReturn

import click

from kvpool.bindings.errors import Error, SystemFailure
from kvpool.tools.console import fail

__all__ = ["main"]


class Lazy(NamedTuple):
    """Where a command lives, and what `--help` says of it before it is imported."""

    module: str
    summary: str
    extra: str = ""
    """Optional dependencies it needs, as named in `pip install 'kvpool[EXTRA]'`."""


COMMANDS = {
    "doctor": Lazy("doctor", "What this machine has for a pool, and what to type to use it."),
    "create": Lazy("inspect_pools", "Make a pool and back all its memory."),
    "ls": Lazy("inspect_pools", "List your pools in shared memory."),
    "stat": Lazy("inspect_state", "Shape, occupancy, counters and workers of a pool."),
    "top": Lazy("inspect_live", "Watch a pool: occupancy, hit rate, rates per worker."),
    "check": Lazy("inspect_state", "Walk every structure of a pool and name what is broken."),
    "hosts": Lazy("inspect_hosts", "The hosts of a pool: state, incarnation, silence, segments."),
    "give": Lazy("inspect_hosts", "Give segments of one host to another."),
    "fence": Lazy("inspect_hosts", "Adopt what a lost host owned, once its reset is confirmed."),
    "qualify": Lazy("qualify", "Test that hosts may share a device without coherence."),
    "rm": Lazy("inspect_pools", "Remove a pool for good."),
    "replay": Lazy("replay", "Drive a pool with a recorded trace and count its hits."),
    "demo": Lazy("demo", "A small real model whose workers share one pool.", extra="demo"),
    "bench": Lazy("bench", "Measure the pool on this machine."),
}


def load(name: str) -> click.Command:
    """The command of that name. Raises `SystemFailure` if it or an optional dependency is not installed."""
    lazy = COMMANDS[name]
    try:
        command = getattr(importlib.import_module(f"kvpool.tools.{lazy.module}"), name)
    except ImportError as error:
        cure = f": pip install 'kvpool[{lazy.extra}]'" if lazy.extra else ""
        raise SystemFailure(f"{name} cannot be loaded ({error}){cure}") from error
    assert isinstance(command, click.Command)
    return command


class Commands(click.Group):
    """A group that knows its commands by name and summary only, until one is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table, which is the order of a pool's life."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import it now; None if there is no such command."""
        return load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table: importing all of them would make `--help` slow, and impossible without the extras."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.summary) for name, lazy in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what it may raise by contract becomes one line and an exit code."""
        try:
            return super().invoke(ctx)
        except Error as error:
            fail(ctx, str(error), error.code)
        except KeyboardInterrupt:
            ctx.exit(130)
        except OSError as error:
            _system_failure(ctx, error)


def _system_failure(ctx: click.Context, error: OSError) -> NoReturn:
    if error.errno == errno.EPIPE:
        raise error  # the reader of our output has gone: click ends quietly
    where = f"{error.filename}: " if error.filename else ""
    fail(ctx, f"{where}{error.strerror or error}", SystemFailure.code)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvpool", prog_name="kvpool")
def main() -> None:
    """A shared-memory pool of KV-cache blocks: make it, look into it, replay traces on it.

    A pool is named by a URI: shm:NAME, file:PATH, memfd:PID/FD, hugetlb:2MiB or dax:/dev/daxX.Y.
    """


if __name__ == "__main__":
    main(prog_name="kvpool")
