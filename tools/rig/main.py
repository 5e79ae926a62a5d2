"""The command `kvpool-rig`: boots guests with emulated devices and runs the pool on each of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click

from kvpool.tools.console import stdout, table
from kvpool.tools.rig import alone, image, packages, refusals
from kvpool.tools.rig.devices import cxl, soft_reserved
from kvpool.tools.rig.guest import Machine, find_qemu
from kvpool.tools.rig.shared import Note, Rack, atomics_fail, atomics_hold, run

__all__ = ["main"]

Job = Callable[[Machine, Note], None]


def on_soft_reserved(machine: Machine, note: Note) -> None:
    """(a), and what must be refused on any device."""
    with ExitStack() as stack:
        rack = Rack(machine, "hmem", lambda memory, size, host: soft_reserved(memory, size), stack)
        note("two guests up")
        atomics_hold(rack, note)
        run(rack, 500, note)
        rack.a.ask("close")
        refusals.one_maker(rack, note)
        refusals.too_small(rack, note)
        refusals.other_content(rack, note)
        refusals.system_modes(rack, note)
        refusals.device_gone(rack, note)


def on_cxl(machine: Machine, note: Note) -> None:
    """(b)."""
    with ExitStack() as stack:
        rack = Rack(machine, "cxl", lambda memory, size, host: cxl(memory, size, host + 1), stack)
        note("two guests up")
        atomics_fail(rack, note)
        run(rack, 200, note)
        refusals.cxl_region_gone(rack, note)


JOBS: dict[str, tuple[str, Job]] = {
    "hmem": ("soft-reserved /dev/dax, two guests", on_soft_reserved),
    "cxl": ("CXL type-3, region by cxl, two guests", on_cxl),
    "pmem": ("persistent memory: ext4 dax=always, devdax, virtio-pmem", alone.on_pmem),
    "numa": ("a NUMA node without processors, with HMAT", alone.on_numa),
}

SHARED = ("hmem", "cxl")
"""Those that take two guests."""


def obstacle() -> str:
    """Why no guests can be had on this machine; empty if they can."""
    if os.uname().machine != "x86_64":
        return "the guests are x86-64"
    return packages.missing_tools()


class Parts(NamedTuple):
    """Folders with unpacked packages."""

    qemu: Path
    guest: Path
    kernel: Path


def fetch(folder: Path, mirror: str | None) -> Parts:
    """Fetch and unpack what is not there yet. Raises `Unavailable`."""
    why = obstacle()
    if why:
        raise packages.Unavailable(f"no guests here: {why}")
    folder.mkdir(parents=True, exist_ok=True)
    archive = packages.Archive(folder, mirror)
    archive.prepare()
    qemu = archive.root("machine", packages.MACHINE)
    guest = archive.root("guest", packages.GUEST, image.prepare_guest)
    return Parts(qemu, guest, archive.kernel_root())


def build(folder: Path, parts: Parts, wheel: Path) -> Machine:
    """The image with this wheel."""
    built = image.build(folder, parts.guest, parts.kernel, wheel)
    logs = folder / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    return Machine(find_qemu(parts.qemu), image.kernel_of(parts.kernel), built, logs)


def run_job(machine: Machine, name: str, started: float) -> dict[str, object]:
    """One device: what was shown, and what ended it."""
    shown: list[str] = []
    begun = time.monotonic()
    result: dict[str, object] = {"device": name, "what": JOBS[name][0], "shown": shown, "failed": None}

    def note(text: str) -> None:
        shown.append(text)
        click.echo(f"{time.monotonic() - started:6.1f} s  {name}: {text}", err=True)

    try:
        JOBS[name][1](machine, note)
    except click.ClickException as error:
        click.echo(f"{time.monotonic() - started:6.1f} s  {name}: FAILED: {error.message}", err=True)
        result["failed"] = error.message
    return result | {"seconds": round(time.monotonic() - begun, 1)}


def run_jobs(machine: Machine, names: tuple[str, ...], started: float) -> list[dict[str, object]]:
    """Two guests at a time: those that need one each run together."""
    shared = [run_job(machine, name, started) for name in names if name in SHARED]
    with ThreadPoolExecutor(2) as pool:
        return shared + list(
            pool.map(lambda name: run_job(machine, name, started), [n for n in names if n not in SHARED])
        )


def show(results: list[dict[str, object]]) -> None:
    """The table of what ran where."""
    shown = table("", "device", "what it is", "result", "s", "shown", left=5)
    for row in results:
        steps = row["shown"]
        assert isinstance(steps, list)
        verdict = "FAILED" if row["failed"] else "passed"
        shown.add_row(str(row["device"]), str(row["what"]), verdict, str(row["seconds"]), "\n".join(steps))
    stdout().print(shown)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("devices", nargs=-1, type=click.Choice(list(JOBS)))
@click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="The built wheel of kvpool, for this machine's Python or any later one.")  # fmt: skip
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default=Path("build/rig"),
              show_default=True, help="For packages, the image, and what guests print.")  # fmt: skip
@click.option("--mirror", help="A Debian archive [default: the one in this machine's apt sources].")
@click.option("--probe", is_flag=True, help="Only fetch what is needed, and say whether guests can be had here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@click.pass_context
def main(ctx: click.Context, devices: tuple[str, ...], wheel: Path | None, folder: Path, mirror: str | None,
         probe: bool, as_json: bool) -> None:  # fmt: skip
    """Run the pool on emulated DEVICES (default: all of them), in guests of QEMU.

    Needs x86-64, apt and the Debian archive; installs nothing. Exit codes: 0 all passed; 1 something failed; 2 the
    command line is wrong; 3 the guests cannot be had here.
    """
    if wheel is None and not probe:
        raise click.UsageError("give --wheel: make test-devices builds one")
    started = time.monotonic()
    parts = fetch(folder.resolve(), mirror)
    if probe or wheel is None:
        return
    click.echo(f"{time.monotonic() - started:6.1f} s  packages fetched and unpacked", err=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, in every thread; the guests end with it
    machine = build(folder.resolve(), parts, wheel)
    click.echo(f"{time.monotonic() - started:6.1f} s  image built", err=True)
    results = run_jobs(machine, devices or tuple(JOBS), started)
    if as_json:
        click.echo(json.dumps(results))
    else:
        show(results)
    ctx.exit(1 if any(row["failed"] for row in results) else 0)


if __name__ == "__main__":
    main(prog_name="kvpool-rig")
