"""The pool on devices of one guest: (c) persistent memory, (d) a NUMA node without processors."""

from __future__ import annotations

import json
from contextlib import ExitStack

from kvpool.tools.rig.devices import DAX, MIB, numa, pmem
from kvpool.tools.rig.guest import Guest, Machine, Memory, boot
from kvpool.tools.rig.shared import BLOCK, CHAIN, Note, demand, whole

__all__ = ["on_numa", "on_pmem"]

POOL = 32 * MIB
MADE = {"size": POOL, "block": BLOCK, "workers": 4}


def use(guest: Guest, uri: str) -> None:
    """Create, publish, leave, open, match, check, leave."""
    guest.ask("create", uri=uri, options=MADE)
    demand(guest.ask("publish", number=1, count=CHAIN) == CHAIN, f"{uri}: publish")
    guest.ask("close")
    again(guest, uri)


def again(guest: Guest, uri: str) -> None:
    """Open, match, check, leave."""
    guest.ask("open", uri=uri, options={})
    demand(whole(guest.ask("verify", number=1, count=CHAIN)), f"{uri}: match")
    report = guest.ask("check")
    demand(report["clean"], f"{uri}: check", report)
    guest.ask("close")


def file_system(guest: Guest, note: Note) -> None:
    """ext4 on persistent memory, mapped with MAP_SYNC; mounted anew the pool is there."""
    guest.run("ndctl create-namespace -e namespace0.0 -m fsdax -f")
    guest.run("mke2fs -q -t ext4 -b 4096 -m 0 /dev/pmem0 && mount -o dax=always /dev/pmem0 /mnt")
    use(guest, "file:/mnt/pool")
    refusal = guest.ask("sync", path="/mnt/pool")
    demand(refusal == "", "MAP_SYNC on ext4", refusal)
    guest.run("umount /mnt && mount -o dax=always /dev/pmem0 /mnt")
    again(guest, "file:/mnt/pool")
    guest.run("umount /mnt")
    note("ext4 dax=always: MAP_SYNC, published and matched, and again after a new mount")


def device(guest: Guest, note: Note) -> None:
    """The same memory as devdax; the pool outlives its disabling."""
    guest.run("ndctl create-namespace -e namespace0.0 -m devdax -f")
    guest.run(f"for i in $(seq 600); do [ -e {DAX} ] && exit 0; sleep 0.1; done; exit 1")
    kind, text = guest.refusal("create", uri=f"dax:{DAX}", options=MADE)
    demand(kind == "Foreign" and "ext4" in text, "what the file system has left", kind, text)
    guest.ask("clear", uri=f"dax:{DAX}")
    use(guest, f"dax:{DAX}")
    guest.run("ndctl disable-namespace namespace0.0 && ndctl enable-namespace namespace0.0")
    again(guest, f"dax:{DAX}")
    found = json.loads(guest.kvpool("doctor", "--json"))
    demand([each["kind"] for each in found["dax"]] == ["pmem"], "kvpool doctor", found["dax"])
    note("devdax: refused while it holds the old ext4; then published, matched, and again once enabled anew")


def without_sync(guest: Guest, note: Note) -> None:
    """A DAX file system that has no MAP_SYNC."""
    guest.run("modprobe virtio_pmem; for i in $(seq 600); do [ -e /dev/pmem1 ] && exit 0; sleep 0.1; done; exit 1")
    guest.run("mke2fs -q -t ext4 -b 4096 -m 0 /dev/pmem1 && mount -o dax=always /dev/pmem1 /mnt")
    kind, text = guest.refusal("create", uri="file:/mnt/pool", options=MADE)
    demand(
        kind == "InvalidArgument" and "MAP_SYNC" in text, "a DAX file without MAP_SYNC was to be refused", kind, text
    )
    left = guest.run("ls /mnt").split()
    demand(left in ([], ["lost+found"]), "what the refused pool has left", left)
    guest.run("umount /mnt && mount -o dax=never /dev/pmem1 /mnt")
    use(guest, "file:/mnt/pool")
    guest.run("umount /mnt")
    note("virtio-pmem: refused with dax (no MAP_SYNC), works without")


def on_pmem(machine: Machine, note: Note) -> None:
    """(c)."""
    with ExitStack() as stack:
        memory = stack.enter_context(Memory("pmem", 128 * MIB))
        guest = stack.enter_context(Guest(machine, "pmem", pmem(memory, 128 * MIB)))
        boot(guest)
        without_sync(guest, note)  # first: a later device may get the MAP_SYNC of one that has gone (Linux 6.12)
        file_system(guest, note)
        device(guest, note)


def placed(guest: Guest, uri: str) -> dict[str, int]:
    """Make a pool, publish, ask the kernel where its pages are; numa_maps must agree."""
    guest.ask("create", uri=uri, options=MADE)
    guest.ask("publish", number=1, count=CHAIN)
    demand(whole(guest.ask("verify", number=1, count=CHAIN)), f"{uri}: match")
    seen = guest.ask("placement")
    for node, count in seen["pages"].items():
        unit = 1 if "kernelpagesize_kB=4" in seen["numa_maps"] else 512
        demand(f" N{node}={count // unit} " in f"{seen['numa_maps']} ", "move_pages and numa_maps agree", seen)
    guest.ask("close")
    if uri.startswith("shm:"):
        guest.kvpool("rm", uri.split("?")[0])
    pages: dict[str, int] = seen["pages"]
    return pages


def on_numa(machine: Machine, note: Note) -> None:
    """(d)."""
    with Guest(machine, "numa", numa()) as guest:
        boot(guest)
        nodes = json.loads(guest.kvpool("doctor", "--json"))["nodes"]
        far = nodes[1]
        demand(far["cpus"] == "" and far["distance"] == 28 and far["read_latency"] == 250, "kvpool doctor", nodes)
        note("doctor: node 1 without processors, distance 28, read latency 250 ns of its HMAT")
        every = POOL // 4096
        for uri in ("shm:far?node=1", "memfd:?node=1", "shm:far?node=1&hugepage=2M"):
            pages = placed(guest, uri)
            demand(pages == {"1": every}, f"{uri}: pages by node", pages)
        for uri in ("shm:both?interleave=0,1", "memfd:?interleave=0-1"):
            pages = placed(guest, uri)
            demand(pages == {"0": every // 2, "1": every // 2}, f"{uri}: pages by node", pages)
        note("node=1 and interleave=0,1 on shm: and memfd:, every page where it should be (move_pages, numa_maps)")
        guest.run("echo 32 > /sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages")
        for uri in ("hugetlb:2MiB?node=1", "memfd:?hugepage=2M&node=1"):
            pages = placed(guest, uri)
            demand(pages == {"1": every}, f"{uri}: pages by node", pages)
        kind, text = guest.refusal("create", uri="shm:none?node=7", options=MADE)
        demand(kind == "InvalidArgument" and "node" in text, "a node that does not exist", kind, text)
        note("hugepage=2M and hugetlb: on node 1; a node that does not exist is refused")
