"""What this machine has for a pool: dax devices, NUMA nodes, huge pages. Read from /proc and /sys, below any root.

`dax:auto` is resolved here: the first devdax that is large enough and holds nothing.
"""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvpool.bindings.errors import NotFound

__all__ = ["CxlRegion", "DaxDevice", "Node", "cxl_regions", "dax_devices", "free_dax", "nodes"]

ROOT = Path("/")
LOOKED_AT = 128 << 10
"""Bytes from the start: file systems and pools have their marks there."""
DRIVERS = {"device_dax": "devdax", "kmem": "system-ram", "fsdev_dax": "famfs"}
KINDS = {"/hmem": "soft-reserved", "/ndbus": "pmem", "/root": "cxl"}


def _text(path: Path, default: str = "") -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return default


def _number(path: Path, default: int = 0) -> int:
    try:
        return int(_text(path), 0)
    except ValueError:
        return default


@dataclass(frozen=True)
class DaxDevice:
    """A device of /sys/bus/dax."""

    name: str
    path: str
    size: int
    align: int
    mode: str
    """devdax, system-ram, famfs or disabled."""
    node: int
    """The NUMA node it is, or becomes in mode system-ram; -1 if none is known."""
    kind: str
    """cxl, soft-reserved, pmem or other: what is behind it."""


@dataclass(frozen=True)
class CxlRegion:
    """A region of /sys/bus/cxl."""

    name: str
    size: int
    mode: str
    committed: bool
    """Is there memory behind it?"""
    enabled: bool


@dataclass(frozen=True)
class Node:
    """A NUMA node. Latency (ns) and bandwidth (MB/s) from the nearest processors as the firmware says; 0: unknown."""

    number: int
    size: int
    free: int
    cpus: str
    distance: int
    """From node 0; 10 is itself."""
    read_latency: int
    read_bandwidth: int


def _driver(device: Path) -> str:
    link = device / "driver"
    return DRIVERS.get(link.resolve().name, "other") if link.exists() else "disabled"


def dax_devices(root: Path = ROOT) -> list[DaxDevice]:
    """All of them, by name."""
    found = []
    for device in sorted((root / "sys/bus/dax/devices").glob("dax*")):
        real = str(device.resolve())
        kind = next((kind for part, kind in KINDS.items() if part in real), "other")
        numbers = _number(device / "size"), _number(device / "align", 2 << 20)
        node = _number(device / "target_node", -1)
        found.append(DaxDevice(device.name, f"/dev/{device.name}", *numbers, _driver(device), node, kind))
    return found


def cxl_regions(root: Path = ROOT) -> list[CxlRegion]:
    """All of them, by name."""
    regions = sorted((root / "sys/bus/cxl/devices").glob("region*"))
    return [
        CxlRegion(at.name, _number(at / "size"), _text(at / "mode", "?"), _number(at / "commit") == 1,
                  (at / "driver").exists()) for at in regions
    ]  # fmt: skip


def _node(at: Path) -> Node:
    number = int(at.name.removeprefix("node"))
    sizes = {name: int(value) << 10 for name, value in re.findall(r"(\w+):\s+(\d+) kB", _text(at / "meminfo"))}
    near = at / "access0/initiators"
    distances = _text(at.parent / "node0/distance", "10").split()
    distance = int(distances[number]) if number < len(distances) else 0
    return Node(
        number, sizes.get("MemTotal", 0), sizes.get("MemFree", 0), _text(at / "cpulist"), distance,
        _number(near / "read_latency"), _number(near / "read_bandwidth"),
    )  # fmt: skip


def nodes(root: Path = ROOT) -> list[Node]:
    """All that are online, by number."""
    found = (root / "sys/devices/system/node").glob("node[0-9]*")
    return sorted((_node(at) for at in found), key=lambda node: node.number)


def holds_something(path: Path, align: int) -> str:
    """Why a device that holds no pool is not free: unknown content; "" if its start is all zero, or a pool's."""
    length = -(-LOOKED_AT // align) * align
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(descriptor, length, prot=mmap.PROT_READ) as memory:
            head = memory[:LOOKED_AT]
    finally:
        os.close(descriptor)
    if not any(head) or head.startswith(b"KVPOOL"):
        return ""
    return "it holds something that is no pool: name the device itself if that may go"


def unfit(device: DaxDevice, size: int, root: Path = ROOT) -> str:
    """Why a device cannot be taken unasked; "" if it can."""
    if device.mode != "devdax":
        return f"it is {device.mode}: daxctl reconfigure-device --mode=devdax --force {device.name}"
    if size > device.size // device.align * device.align:
        return f"it has {device.size} bytes, {size} are wanted"
    try:
        return holds_something(root / device.path.lstrip("/"), device.align)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def free_dax(size: int, root: Path = ROOT) -> tuple[list[DaxDevice], dict[str, str]]:
    """Devices that `dax:auto` may take, in order, and why each other one is not among them.

    Raises `NotFound` if there is none at all.
    """
    found = dax_devices(root)
    if not found:
        raise NotFound("dax:auto: there is no dax device: kvpool doctor says what this machine has")
    reasons = {device.name: unfit(device, size, root) for device in found}
    return [device for device in found if not reasons[device.name]], {k: why for k, why in reasons.items() if why}
