"""One pool, once: stat and check."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

import kvpool
from kvpool.tools.console import emit, grid, host_option, json_option, look_at, meter, short, size, stdout, table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["check", "class_table", "stat"]

RATES = ("lookups", "hits", "published", "evicted")
BYTE_RATES = ("bytes_in", "bytes_out")
COUNTERS = (
    "lookups", "hits", "published", "duplicates", "evicted", "removed", "pinned", "full", "unindexed", "stale",
    "spared", "segments_moved", "recoveries", "recovered",
)  # fmt: skip
DAMAGED = (
    kvpool.Corrupt, kvpool.Foreign, kvpool.LayoutMismatch, kvpool.NotReady, kvpool.Truncated, kvpool.VersionMismatch,
)  # fmt: skip


# ---- stat ----


def class_table(classes: list[dict[str, Any]]) -> Table:
    """Blocks per state and class; the bar is the live share of the blocks that the class has now."""
    names = ("live", "free", "cached", "reserved", "evicting")
    shown = table("blocks", "class", "size", "blocks", *names, "live", "")
    for at, part in enumerate(classes):
        present = part["blocks"] - part["absent"]
        share = part["live"] / present if present else 0.0
        counts = [f"{part[name]:,}" for name in names]
        shown.add_row(str(at), size(part["block_bytes"]), f"{present:,}", *counts, f"{share:.1%}", meter(share))
    return shown


def _qualified(found: dict[str, Any] | None) -> str:
    """When, with what, and by whom."""
    if found is None:
        return "no (kvpool qualify)"
    when = datetime.fromtimestamp(found["when_ns"] / 1e9).isoformat(" ", "seconds")
    hosts = ", ".join(map(str, found["hosts"]))
    return f"{when} by hosts {hosts}: {found['rounds']:,} rounds, {found['instructions']}, {found['cpu']}"


def _shape(stats: dict[str, Any]) -> Table:
    created = datetime.fromtimestamp(stats["created_ns"] / 1e9).isoformat(" ", "seconds")
    rows = {"uuid": stats["uuid"], "created": created, "policy": stats["policy"], "mode": stats["mode"]}
    rows |= {"mapped": size(stats["bytes"]), "metadata": size(stats["metadata_bytes"])}
    rows |= {"payload": size(stats["payload_bytes"]), "in huge pages": size(stats["huge_bytes"])}
    rows |= {"segments": f"{stats['segments']:,} of {size(stats['segment_bytes'])}"}
    if stats["mode"] != "coherent":
        rows |= {"host": f"{stats['host']} of {stats['hosts']}, owns {stats['owned']} segments"}
        rows |= {"lease": f"{stats['lease_ms']} ms", "qualified": _qualified(stats["qualification"])}
    rows |= {"worker slots": stats["workers"], "pin slots": f"{stats['pin_slots']:,} a worker"}
    return grid(stats["uri"], rows)


def _counters(stats: dict[str, Any]) -> Table:
    rows = {name.replace("_", " "): f"{stats[name]:,}" for name in COUNTERS}
    rows |= {"hit ratio": f"{stats['hit_ratio']:.2%}"}
    rows |= {"copied in": size(stats["bytes_in"]), "copied out": size(stats["bytes_out"])}
    return grid("counters", {name: value for name, value in rows.items() if value != "0"})


def _counts(worker: dict[str, Any]) -> list[str]:
    """Totals, with the rate since it joined where that is known: the counters of a slot outlive its worker, so only
    those of its first one can be divided by time.
    """
    totals = [short(worker[name]) for name in (*RATES, *BYTE_RATES)]
    if worker["state"] != "alive" or worker["incarnation"] != 1:
        return totals
    seconds = max((time.time_ns() - worker["joined_ns"]) / 1e9, 1e-9)
    rates = [short(worker[name] / seconds) for name in (*RATES, *BYTE_RATES)]
    return [f"{total} ({rate}/s)" for total, rate in zip(totals, rates, strict=True)]


def _workers(stats: dict[str, Any]) -> Table:
    title = "workers (of all uses of the slot; rates since the first one joined)"
    shown = table(title, "slot", "state", "pid", "command", "joined", *RATES, "bytes in", "bytes out", left=4)
    for worker in stats["worker_list"]:
        mine = " (this)" if worker["slot"] == stats["self"] else ""
        joined = datetime.fromtimestamp(worker["joined_ns"] / 1e9).isoformat(" ", "seconds")[5:]
        who = (str(worker["slot"]), worker["state"] + mine, str(worker["pid"]), worker["command"] or "")
        shown.add_row(*who, joined, *_counts(worker))
    return shown


@click.command()
@click.argument("uri")
@host_option
@json_option
def stat(uri: str, host: int | None, as_json: bool) -> None:
    """Show the shape, the occupancy, the counters and the workers of the pool URI.

    Of a pool of many hosts: the workers, counters and directory of one host, and all blocks as it sees them.
    """
    with look_at(uri, host) as pool:
        stats = pool.stats()
    if as_json:
        return emit(stats)
    screen = stdout()
    for part in (_shape(stats), class_table(stats["classes"]), _counters(stats), _workers(stats)):
        screen.print(part)


# ---- check ----


def _examine(uri: str, host: int | None) -> dict[str, Any]:
    """A pool that cannot be opened because of what its memory holds is a finding, not a failure of the command."""
    try:
        with look_at(uri, host) as pool:
            report = pool.check()
    except DAMAGED as error:
        nothing = dict.fromkeys(("blocks", "leaked", "pins", "entries"))
        return {"clean": False, "problems": [str(error)], "code": error.code, **nothing}
    names = ("clean", "problems", "blocks", "leaked", "pins", "unlinked", "entries")
    return {name: getattr(report, name) for name in names}


@click.command()
@click.argument("uri")
@host_option
@json_option
@click.pass_context
def check(ctx: click.Context, uri: str, host: int | None, as_json: bool) -> None:
    """Walk every structure of the pool URI. Exit code 0 if it is clean, 1 if not. Safe while it is in use."""
    found = _examine(uri, host)
    if as_json:
        emit(found)
    else:
        click.echo(f"{uri}: {'clean' if found['clean'] else 'NOT clean'}")
        for problem in found["problems"]:
            click.echo(f"  {problem}")
        if found["blocks"] is not None:
            rows = found["blocks"] | {name: found[name] for name in ("leaked", "pins", "entries")}
            stdout().print(grid("", {name: f"{value:,}" for name, value in rows.items()}))
    ctx.exit(0 if found["clean"] else 1)
