"""`kvpool doctor`: what this machine has for a pool, what a pool could use of it, and what to type to get there."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvpool import devices
from kvpool.tools.console import emit, grid, json_option, size, stdout, table

__all__ = ["doctor", "examine"]

LINE_FLAGS = ("clwb", "clflushopt", "clflush")
"""Instructions that write a line back, the best first; arm64 has them always."""
CXL_MODULES = "modprobe -a cxl_acpi cxl_pci cxl_mem cxl_port dax_cxl device_dax"


def _text(path: Path, default: str = "") -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return default


def _choice(path: Path) -> str:
    """The one in brackets: 'always [never]' -> never."""
    found = re.search(r"\[(\w+)\]", _text(path))
    return found[1] if found else "unknown"


def _huge_pages(root: Path) -> dict[str, Any]:
    reserved = {}
    for folder in sorted((root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        counts = {name: int(_text(folder / f"{name}_hugepages", "0") or 0) for name in ("nr", "free")}
        reserved[folder.name.removeprefix("hugepages-")] = counts
    base = root / "sys/kernel/mm/transparent_hugepage"
    return {"reserved": reserved, "transparent": _choice(base / "enabled"), "shared": _choice(base / "shmem_enabled")}


def _processor(root: Path) -> dict[str, Any]:
    text = _text(root / "proc/cpuinfo")
    flags = set((re.findall(r"^flags\s*:\s*(.*)$", text, re.MULTILINE) or [""])[0].split())
    name = (re.findall(r"^model name\s*:\s*(.*)$", text, re.MULTILINE) or ["unknown"])[0]
    is_arm = "CPU implementer" in text
    lines = ["dc cvac"] if is_arm else [flag for flag in LINE_FLAGS if flag in flags]
    return {"name": "arm64" if is_arm else name, "line_instructions": lines, "virtual": "hypervisor" in flags}


def _shm(root: Path) -> dict[str, int]:
    try:
        room = os.statvfs(root / "dev/shm")
    except OSError:
        return {"bytes": 0, "free": 0}
    return {"bytes": room.f_blocks * room.f_frsize, "free": room.f_bavail * room.f_frsize}


def _gpus(root: Path) -> dict[str, Any]:
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    models = [re.findall(r"^Model:\s*(.*)$", _text(at / "information"), re.MULTILINE) for at in folders]
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _text(root / "proc/driver/nvidia/version"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "models": [found[0] if found else "unknown" for found in models],
        "driver": version[1] if version else "",
        "locked_bytes_limit": None if soft == resource.RLIM_INFINITY else soft,
    }


def examine(root: Path) -> dict[str, Any]:
    """Everything, from /proc, /sys and /dev below `root`."""
    return {
        "processor": _processor(root),
        "nodes": [asdict(node) for node in devices.nodes(root)],
        "cxl": {
            "memories": len(list((root / "sys/bus/cxl/devices").glob("mem*"))),
            "regions": [asdict(region) for region in devices.cxl_regions(root)],
        },
        "pmem": sorted(at.name for at in (root / "sys/bus/nd/devices").glob("namespace*")),
        "dax": [
            asdict(device) | {"use": devices.unfit(device, 0, root) or "free"} for device in devices.dax_devices(root)
        ],
        "huge_pages": _huge_pages(root),
        "shm": _shm(root),
        "gpus": _gpus(root),
    }


def _advise_region(region: dict[str, Any]) -> str:
    if not region["committed"]:
        again = "cxl create-region -d decoder0.0 -t ram -m mem0"
        return f"{region['name']} has no memory behind it: cxl destroy-region --force {region['name']} && {again}"
    return "" if region["enabled"] else f"{region['name']} is disabled: cxl enable-region {region['name']}"


def _advise_dax(found: dict[str, Any]) -> list[str]:
    advice = []
    for device in found["dax"]:
        if device["mode"] == "devdax" and device["use"] == "free":
            advice.append(
                f"a pool of {size(device['size'])}: kvpool create dax:{device['path']} --size {device['size']}"
            )
        elif device["mode"] != "devdax":
            to = f"daxctl reconfigure-device --mode=devdax --force {device['name']}"
            first = f"daxctl offline-memory {device['name']} && " if device["mode"] == "system-ram" else ""
            advice.append(f"{device['name']} is {device['mode']}; as a device: {first}{to}")
    cxl = found["cxl"]
    if cxl["memories"] and not cxl["regions"]:
        advice.append("CXL memory without a region: cxl create-region -d decoder0.0 -t ram -m mem0")
    advice += [line for line in map(_advise_region, cxl["regions"]) if line]
    working = [region["name"] for region in cxl["regions"] if region["committed"] and region["enabled"]]
    if working and not found["dax"]:
        advice.append(f"{', '.join(working)} without a dax device: {CXL_MODULES}")
    if not cxl["memories"] and not found["dax"]:
        advice.append(f"no CXL memory and no dax device is known to the kernel; if there is a card: {CXL_MODULES}")
    if found["pmem"] and not found["dax"]:
        advice.append("persistent memory: ndctl create-namespace --force --mode=devdax --reconfig=namespace0.0")
    return advice


def advise(found: dict[str, Any]) -> list[str]:
    """What a pool could use, the nearest to hardware first, and what to type."""
    advice = _advise_dax(found)
    far = [node for node in found["nodes"] if not node["cpus"] and node["size"]]
    for node in far:
        advice.append(
            f"node {node['number']} has memory and no processors: kvpool create 'shm:NAME?node={node['number']}' ..."
        )
    if len(found["nodes"]) > 1:
        numbers = ",".join(str(node["number"]) for node in found["nodes"] if node["size"])
        advice.append(f"pages spread over all nodes: kvpool create 'shm:NAME?interleave={numbers}' ...")
    huge = found["huge_pages"]
    if huge["reserved"].get("2048kB", {}).get("free"):
        advice.append("reserved huge pages are free: kvpool create hugetlb:2MiB ...")
    elif huge["transparent"] != "never":
        advice.append(
            "2 MiB pages or none: kvpool create 'shm:NAME?hugepage=2M' ...; or reserve some: sysctl vm.nr_hugepages=N"
        )
    if found["shm"]["free"]:
        advice.append(f"a pool of this machine: kvpool create shm:NAME --size ... (up to {size(found['shm']['free'])})")
    if not found["processor"]["line_instructions"]:
        advice.append("no instruction that writes a line back: mode noncoherent does not work on this processor")
    limit = found["gpus"]["locked_bytes_limit"]
    if found["gpus"]["models"] and limit is not None:
        advice.append(f"a GPU's driver locks what is registered, and {size(limit)} may be locked: ulimit -l unlimited")
    return advice


def _show(found: dict[str, Any], advice: list[str]) -> None:
    screen = stdout()
    processor, huge, gpus = found["processor"], found["huge_pages"], found["gpus"]
    reserved = ", ".join(f"{count['free']} of {count['nr']} of {name} free" for name, count in huge["reserved"].items())
    limit = gpus["locked_bytes_limit"]
    rows = {
        "processor": processor["name"] + (" (virtual)" if processor["virtual"] else ""),
        "lines written back by": ", ".join(processor["line_instructions"]) or "nothing",
        "huge pages": f"{reserved or 'none'}; transparent: {huge['transparent']}, of shared memory: {huge['shared']}",
        "/dev/shm": f"{size(found['shm']['free'])} of {size(found['shm']['bytes'])} free",
        "CXL": f"{found['cxl']['memories']} memory devices, {len(found['cxl']['regions'])} regions",
        "persistent memory": ", ".join(found["pmem"]) or "none",
        "GPUs": ", ".join(gpus["models"]) + (f", driver {gpus['driver']}" if gpus["driver"] else "") or "none",
        "memory that may be locked": "no limit" if limit is None else size(limit),
    }
    screen.print(grid("this machine", rows))
    if found["dax"]:
        shown = table("dax devices", "device", "kind", "mode", "for a pool", "size", "node", left=4)
        for device in found["dax"]:
            node = str(device["node"]) if device["node"] >= 0 else "-"
            shown.add_row(device["path"], device["kind"], device["mode"], device["use"], size(device["size"]), node)
        screen.print(shown)
    shown = table("NUMA nodes", "node", "processors", "size", "free", "distance", "read ns", "read MB/s", left=2)
    for node in found["nodes"]:
        numbers = [str(node[name] or "-") for name in ("distance", "read_latency", "read_bandwidth")]
        shown.add_row(str(node["number"]), node["cpus"] or "none", size(node["size"]), size(node["free"]), *numbers)
    screen.print(shown)
    screen.print("what a pool could use:")
    for line in advice:
        click.echo(f"  {line}")


@click.command()
@click.option("--root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path("/"), hidden=True)
@json_option
def doctor(root: Path, as_json: bool) -> None:
    """Say what this machine has for a pool (CXL, dax, NUMA, huge pages, GPUs), and what to type to use it.

    Only looks: at /proc, /sys, and the first bytes of dax devices that it may read.
    """
    found = examine(root)
    advice = advise(found)
    if as_json:
        emit(found | {"advice": advice})
    else:
        _show(found, advice)
