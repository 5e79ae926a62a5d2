"""The hosts of a pool: hosts, give, fence."""

from __future__ import annotations

import time
from typing import Any

import click

import kvpool
from kvpool.tools.console import emit, host_option, json_option, look_at, stdout, table

__all__ = ["fence", "give", "hosts"]

TAKEN_S, PAUSE_S = 5.0, 0.02
HOST = click.IntRange(0, 63)


def _settled(pool: kvpool.Pool) -> list[dict[str, Any]]:
    """The hosts, after they have been watched for longer than a lease: only then is silence known as such.

    A host that this machine has just started to watch counts as present until a lease has passed.
    """
    deadline = time.monotonic() + pool.info["lease_ms"] / 1000 + 0.3
    while True:
        rows = pool.hosts()
        unsure = [
            row for row in rows if row["state"] == "present" and row["host"] != pool.host and row["silent_ms"] > 200
        ]
        if not unsure or time.monotonic() > deadline:
            return rows
        time.sleep(PAUSE_S)


@click.command()
@click.argument("uri")
@host_option
@json_option
def hosts(uri: str, host: int | None, as_json: bool) -> None:
    """Show the hosts of the pool URI as one of them sees them.

    States: free (never was there), present (its beat changes), lapsed (silent for longer than the lease: its blocks are
    readable, none is reused), fenced (what it owned is another's), left (in order).
    """
    with look_at(uri, host) as pool:
        pool.follow()
        time.sleep(0.25 if pool.info["hosts"] > 1 else 0)  # two beats: who is silent for longer may have lapsed
        rows, info, seer = _settled(pool), pool.info, pool.host
    if as_json:
        return emit({"uri": uri, "mode": info["mode"], "lease_ms": info["lease_ms"], "host": seer, "hosts": rows})
    title = f"{uri}: {info['mode']}, lease {info['lease_ms']} ms, {info['segments']} segments, seen by host {seer}"
    shown = table(title, "host", "state", "incarnation", "fenced", "silent ms", "segments", "wanted", left=2)
    for row in rows:
        numbers = [f"{row[name]:,}" for name in ("incarnation", "fenced", "silent_ms", "segments", "wanted")]
        shown.add_row(str(row["host"]), row["state"], *numbers)
    stdout().print(shown)


@click.command()
@click.argument("uri")
@click.option("--host", "giver", type=HOST, required=True, help="The host that gives: this machine is it.")
@click.option("--to", "taker", type=HOST, required=True, help="The host that gets them.")
@click.option("-n", "count", type=click.IntRange(1), default=1, show_default=True, help="Segments.")
@json_option
def give(uri: str, giver: int, taker: int, count: int, as_json: bool) -> None:
    """Give segments of one host to another: free ones first, then the idlest, emptied.

    What is not taken within five seconds, because nobody runs on the other host, is taken back.
    """
    with kvpool.open(uri, host=giver, unqualified=True) as pool:
        before = pool.hosts()[taker]["segments"] if taker < pool.info["hosts"] else 0
        offered = pool.give(taker, count)
        deadline = time.monotonic() + TAKEN_S
        while pool.hosts()[taker]["segments"] < before + offered and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
            pool.follow()
        revoked = pool.revoke()
    result = {"offered": offered, "taken": offered - revoked, "from": giver, "to": taker}
    if as_json:
        return emit(result)
    click.echo(f"{result['taken']} of {count} segments of host {giver} are host {taker}'s now")
    if offered < count:
        click.echo(
            f"kvpool: no more than {offered} could be emptied: the rest is pinned, reserved or not there", err=True
        )


@click.command()
@click.argument("uri")
@click.argument("lost", metavar="HOST", type=HOST)
@click.option("--incarnation", type=click.IntRange(0), required=True, help="Which start of it was reset: kvpool hosts.")
@click.option("--as-host", "adopter", type=HOST, required=True, help="The host that adopts: this machine is it.")
@click.option("--confirmed", is_flag=True, help="Its reset is confirmed: nothing that it wrote can arrive any more.")
@json_option
def fence(uri: str, lost: int, incarnation: int, adopter: int, confirmed: bool, as_json: bool) -> None:
    """Adopt what the lost HOST owned. Name one adopter only, and only after the reset was confirmed.

    A host that is merely silent may wake up and go on writing into blocks that are another's by then. So this asks for
    --confirmed, and refuses a host whose beat changes.
    """
    if not confirmed:
        raise click.UsageError(
            f"host {lost} must have been reset, and the reset confirmed (power or fabric control): then add --confirmed"
        )
    with kvpool.open(uri, host=adopter, unqualified=True) as pool:
        adopted = _fence(pool, lost, incarnation)
    if as_json:
        return emit({"fenced": lost, "incarnation": incarnation, "adopter": adopter, "segments": adopted})
    click.echo(f"host {adopter} has adopted {adopted} segments of host {lost}")


def _fence(pool: kvpool.Pool, lost: int, incarnation: int) -> int:
    """A handle that is new here has to watch for a lease before it knows that the other one is silent."""
    deadline = time.monotonic() + 2 * pool.info["lease_ms"] / 1000 + 1
    while True:
        try:
            return pool.fence(lost, incarnation)
        except kvpool.Busy:
            if time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_S)
