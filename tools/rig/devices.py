"""The devices: what QEMU and the guest's kernel are told, and what brings a device up in a guest.

Each recipe has its reason with it; together they took long to find.
"""

from __future__ import annotations

from kvpool.tools.rig.guest import Memory, Shape

__all__ = ["DAX", "MIB", "cxl", "numa", "pmem", "soft_reserved"]

MIB = 1 << 20
DAX = "/dev/dax0.0"
_LOAD = "modprobe -a {}"
_APPEARS = "for i in $(seq 600); do [ -e {} ] && exit 0; sleep 0.1; done; echo {} does not appear; exit 1"
_DEVDAX = "daxctl reconfigure-device -m devdax --force dax0.0 || [ -c /dev/dax0.0 ]"  # it is 'disabled' until then


def soft_reserved(memory: Memory, size: int) -> Shape:
    """(a) Memory that the firmware keeps for a driver, as it does for CXL: the file is the guest's node 1.

    The command line turns that range from RAM to soft-reserved. Guest memory proper: instructions work as on RAM, also
    atomics between guests (with two processors each: with one, QEMU leaves the lock prefix out).
    """
    low = 768 * MIB
    file = f"memory-backend-file,id=m1,share=on,mem-path={memory.path},size={size}"
    return Shape(
        arguments=[
            "-object", f"memory-backend-ram,id=m0,size={low}", "-object", file,
            "-numa", "node,nodeid=0,memdev=m0,cpus=0-1", "-numa", "node,nodeid=1,memdev=m1",
        ],
        board=f"q35,max-ram-below-4g={low}",
        memory=f"{(low + size) // MIB}M",
        words=f"memmap={size // MIB}M%0x100000000-1+0xefffffff",
        ready=[_LOAD.format("dax_hmem device_dax"), _APPEARS.format(DAX, DAX), _DEVDAX],
    )  # fmt: skip


def cxl(memory: Memory, size: int, serial: int) -> Shape:
    """(b) A CXL type-3 device behind a host bridge and a root port, and a region of it made by `cxl`.

    For QEMU this memory is input and output: plain loads and stores are those of the file, but an atomic instruction is
    atomic within one guest only, as on a pooled device without atomics between hosts. The kernel refuses regions under
    a hypervisor, since it could not flush all caches there: so the processor does not tell.
    """
    file = f"memory-backend-file,id=v,share=on,mem-path={memory.path},size={size}"
    listed = "cxl list -m mem0 -E 2>/dev/null | grep -q endpoint"
    return Shape(
        arguments=[
            "-object", file, "-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.1",
            "-device", "cxl-rp,port=0,bus=cxl.1,id=rp13,chassis=0,slot=2",
            "-device", f"cxl-type3,bus=rp13,volatile-memdev=v,id=cv,sn={serial}",
            "-M", "cxl-fmw.0.targets.0=cxl.1,cxl-fmw.0.size=4G",
        ],
        board="q35,cxl=on",
        processor="max,-hypervisor",
        ready=[
            _LOAD.format("cxl_acpi cxl_pci cxl_mem dax_cxl device_dax"),
            f"for i in $(seq 600); do {listed} && exit 0; sleep 0.1; done; echo no CXL memory; exit 1",
            "cxl create-region -d decoder0.0 -t ram -m mem0",
            _APPEARS.format(DAX, DAX), _DEVDAX,
        ],
    )  # fmt: skip


def pmem(memory: Memory, size: int) -> Shape:
    """(c) Persistent memory by the kernel's command line, in the guest's own RAM: ndctl makes fsdax or devdax of it.

    Besides, a virtio-pmem device, whose driver is loaded later: its file systems are DAX and have no MAP_SYNC.
    """
    file = f"memory-backend-file,id=vp,share=on,mem-path={memory.path},size={size}"
    return Shape(
        arguments=["-object", file, "-device", "virtio-pmem-pci,memdev=vp,id=nv"],
        memory="1G,slots=2,maxmem=4G",
        words="memmap=256M!512M",
        ready=[_LOAD.format("nd_e820 nd_pmem dax_pmem device_dax"), _APPEARS.format("/dev/pmem0", "/dev/pmem0")],
    )


def numa() -> Shape:
    """(d) A second node without processors, slower by its HMAT table: what CXL memory looks like as system RAM."""
    latency = "hmat-lb,initiator=0,target={},hierarchy=memory,data-type=access-latency,latency={}"
    bandwidth = "hmat-lb,initiator=0,target={},hierarchy=memory,data-type=access-bandwidth,bandwidth={}"
    return Shape(
        arguments=[
            "-object", "memory-backend-ram,id=m0,size=768M", "-object", "memory-backend-ram,id=m1,size=256M",
            "-numa", "node,nodeid=0,memdev=m0,cpus=0-1", "-numa", "node,nodeid=1,memdev=m1,initiator=0",
            "-numa", "dist,src=0,dst=1,val=28",
            "-numa", latency.format(0, 100), "-numa", bandwidth.format(0, "100G"),
            "-numa", latency.format(1, 250), "-numa", bandwidth.format(1, "30G"),
        ],
        board="q35,hmat=on",
    )  # fmt: skip
