"""Pools as things with a name: create, ls, rm."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import click

import kvpool
from kvpool.bindings import MODES
from kvpool.tools.console import emit, grid, json_option, look_at, progress, size, stdout, table

__all__ = ["create", "ls", "occupancy", "rm"]

SHM = Path("/dev/shm")
TEMPORARY = ("memfd:", "hugetlb:")


def occupancy(stats: dict[str, Any]) -> tuple[int, int, float]:
    """(blocks the pool has now, live ones, live share of the bytes of all blocks) over all classes of `Pool.stats`."""
    blocks = live = total_bytes = live_bytes = 0
    for part in stats["classes"]:
        present = part["blocks"] - part["absent"]
        blocks, live = blocks + present, live + part["live"]
        total_bytes += present * part["block_bytes"]
        live_bytes += part["live"] * part["block_bytes"]
    return blocks, live, live_bytes / total_bytes if total_bytes else 0.0


# ---- create ----


def _made(pool: kvpool.Pool, temporary: bool) -> dict[str, Any]:
    stats = pool.stats()
    names = ("uri", "bytes", "metadata_bytes", "payload_bytes", "huge_bytes", "policy", "workers", "mode", "hosts")
    made = {name: stats[name] for name in names}
    made["classes"] = [{name: part[name] for name in ("block_bytes", "blocks")} for part in stats["classes"]]
    return made | {"pid": os.getpid(), "temporary": temporary}


def _show_made(made: dict[str, Any]) -> None:
    shared = " at most" if len(made["classes"]) > 1 else ""
    rows = {f"blocks of {size(part['block_bytes'])}": f"{part['blocks']:,}{shared}" for part in made["classes"]}
    rows |= {name: size(made[f"{name}_bytes"]) for name in ("payload", "metadata")}
    rows |= {"mapped": size(made["bytes"]), "in huge pages": size(made["huge_bytes"])}
    rows |= {"policy": made["policy"], "workers": f"up to {made['workers']}"}
    if made["mode"] != "coherent":
        rows |= {"mode": made["mode"], "hosts": made["hosts"]}
    stdout().print(grid(made["uri"], rows))


def _hold(uri: str) -> None:
    """Keep the process, and with it the pool, until it is interrupted."""
    click.echo(f"{uri} lives only as long as a process holds it: this one does, until Ctrl-C", err=True)
    threading.Event().wait()


@click.command()
@click.argument("uri")
@click.option("--size", "bytes_", metavar="SIZE", help="Of the whole pool: 4GiB.")
@click.option("--blocks", type=int, help="Exactly so many blocks, instead of --size; one block size.")
@click.option("--block", multiple=True, metavar="SIZE", default=("128KiB",), show_default=True,
              help="Bytes a block, 4 KiB to 16 MiB in steps of 64; repeat it for several sizes.")  # fmt: skip
@click.option("--policy", type=click.Choice(kvpool.POLICIES), default="leaf", show_default=True)
@click.option("--workers", type=click.IntRange(1, 64), default=64, show_default=True, help="That may be open at once.")
@click.option("--mode", type=click.Choice(MODES), help="[default: sim for sim:, else coherent]")
@click.option("--hosts", type=click.IntRange(1, 64), default=1, show_default=True,
              help="That share it, in mode noncoherent or sim.")  # fmt: skip
@click.option("--host", type=click.IntRange(0, 63), default=0, show_default=True, help="Which of them makes it.")
@click.option("--lease", type=float, default=3.0, show_default=True,
              help="Seconds of silence after which a host has lapsed.")  # fmt: skip
@click.option("--quota", type=click.IntRange(0), default=0, show_default=True,
              help="Segments that a host may own at most; 0: no limit.")  # fmt: skip
@click.option("--replace", is_flag=True, help="Remove a pool of this name first, if no live worker uses it.")
@click.option("--threads", type=click.IntRange(1), help="That back memory at the same time.")
@json_option
def create(uri: str, bytes_: str | None, blocks: int | None, block: tuple[str, ...], as_json: bool,
           **options: Any) -> None:  # fmt: skip
    """Make the pool URI and back all of its memory.

    shm:, file: and dax: pools stay when this command ends. memfd: and hugetlb: pools live as long as a process holds
    them: this command then prints the URI for others, and stays until Ctrl-C. A device that hosts are to share without
    coherence (--mode noncoherent on dax: or file:) is opened by others only after `kvpool qualify`.
    """
    if (bytes_ is None) == (blocks is None):
        raise click.UsageError("give either --size (of the whole pool) or --blocks (an exact number)")
    with progress("backing memory") as advance:
        pool = kvpool.create(uri, bytes_, block, blocks=blocks, progress=advance, unqualified=True, **options)
    temporary = uri.startswith(TEMPORARY)
    try:
        made = _made(pool, temporary)
        if as_json:
            emit(made)
        else:
            _show_made(made)
        if temporary:
            _hold(pool.uri)
    except KeyboardInterrupt:
        if not temporary:  # nobody was told of it yet
            pool.close()
            kvpool.remove(pool.uri)
        raise
    pool.close()


# ---- ls ----


def _state(error: kvpool.Error) -> str:
    if isinstance(error, kvpool.Replaced):
        return "retired"
    if isinstance(error, kvpool.NoSlot):
        return "ok"
    if isinstance(error, kvpool.PermissionDenied | kvpool.SystemFailure | kvpool.InvalidArgument):
        return f"unreadable: {error}"
    return f"damaged: {error}"


def _describe(uri: str, path: Path) -> dict[str, Any]:
    """What can be said of one pool. Opening is the only way to look, and takes a worker slot for that moment."""
    row: dict[str, Any] = {"uri": uri, "bytes": path.stat().st_size, "state": "ok", "code": 0}
    row |= dict.fromkeys(("blocks", "live", "live_ratio", "workers", "policy", "mode", "hosts"))
    try:
        with look_at(uri, None) as pool:
            stats = pool.stats()
            alive = sum(worker["state"] == "alive" for worker in stats["worker_list"])
    except kvpool.Error as error:
        return row | {"state": _state(error), "code": error.code}
    blocks, live, ratio = occupancy(stats)
    found = {"blocks": blocks, "live": live, "live_ratio": ratio, "workers": alive - 1, "policy": stats["policy"]}
    found |= {"mode": stats["mode"], "hosts": stats["hosts"]}
    return row | {"bytes": stats["bytes"]} | found


def _uri_of(name: str) -> str | None:
    """The pool behind a file of ours in /dev/shm; None for the caches and the memory of hosts."""
    if name.startswith("host.") or (name.startswith("sim.") and ".cache" in name):
        return None
    return f"sim:{name.removeprefix('sim.')}" if name.startswith("sim.") else f"shm:{name}"


def _pools() -> list[dict[str, Any]]:
    prefix = f"kvpool.{os.getuid()}."
    rows = []
    for path in sorted(SHM.glob(f"{prefix}*")):
        uri = _uri_of(path.name.removeprefix(prefix))
        try:
            rows += [_describe(uri, path)] if uri else []
        except FileNotFoundError:
            continue  # removed while we looked
    return rows


@click.command()
@json_option
def ls(as_json: bool) -> None:
    """List your pools in /dev/shm. Pools behind file:, memfd: and dax: have no common place and are not listed."""
    rows = _pools()
    if as_json:
        return emit(rows)
    if not rows:
        return click.echo("no pools")
    shown = table("", "uri", "state", "policy", "mode", "size", "blocks", "live", "workers", left=4)
    for row in rows:
        known = row["blocks"] is not None
        numbers = (f"{row['blocks']:,}", f"{row['live_ratio']:.1%}", str(row["workers"])) if known else ("-",) * 3
        mode = f"{row['mode']}, {row['hosts']} hosts" if known and row["mode"] != "coherent" else row["mode"] or "-"
        shown.add_row(row["uri"], row["state"], row["policy"] or "-", mode, size(row["bytes"]), *numbers)
    stdout().print(shown)


# ---- rm ----


@click.command()
@click.argument("uri")
@click.option("--force", is_flag=True, help="Even if live workers use it, or the file is no pool.")
@json_option
def rm(uri: str, force: bool, as_json: bool) -> None:
    """Remove the pool URI for good. Workers that still have it open get an error from their next call on."""
    kvpool.remove(uri, force=force)
    if as_json:
        emit({"removed": uri})
    else:
        click.echo(f"removed {uri}")
