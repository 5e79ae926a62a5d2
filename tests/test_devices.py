"""What the pool knows of a machine's devices, from trees of files as /proc and /sys have them; `kvpool doctor`."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import native_build as build
import pytest
from click.testing import CliRunner

import kvpool
from kvpool import devices
from kvpool.tools import doctor
from kvpool.tools.main import main as kvpool_command
from kvpool.tools.rig.image import write_cpio
from kvpool.tools.rig.main import main as rig_command

MIB = 1 << 20


class Tree:
    """A machine's /proc and /sys below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(f"{text}\n")

    def dax(self, name, behind, driver="device_dax", size=64 * MIB, node=1, content=b""):
        """A dax device: its place among the devices, its driver, and its first bytes."""
        real = f"sys/devices/{behind}/{name}"
        for leaf, value in {"size": size, "align": 2 * MIB, "target_node": node}.items():
            self.write(f"{real}/{leaf}", value)
        if driver:
            (self.root / f"sys/bus/dax/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            (self.root / real / "driver").symlink_to(self.root / f"sys/bus/dax/drivers/{driver}")
        listed = self.root / "sys/bus/dax/devices"
        listed.mkdir(parents=True, exist_ok=True)
        (listed / name).symlink_to(self.root / real)
        node_file = self.root / "dev" / name
        node_file.parent.mkdir(exist_ok=True)
        node_file.write_bytes(content.ljust(4 * MIB, b"\0"))

    def region(self, commit, driver=""):
        self.write("sys/bus/cxl/devices/region0/size", "0x10000000")
        self.write("sys/bus/cxl/devices/region0/commit", commit)
        if driver:
            self.write(f"sys/bus/cxl/devices/region0/driver/{driver}", "")

    def node(self, number, cpus, kib, distance="10 28", latency=0):
        at = f"sys/devices/system/node/node{number}"
        self.write(f"{at}/meminfo", f"Node {number} MemTotal: {kib} kB\nNode {number} MemFree:  {kib // 2} kB")
        self.write(f"{at}/cpulist", cpus)
        self.write(f"{at}/distance", distance)
        if latency:
            self.write(f"{at}/access0/initiators/read_latency", latency)
            self.write(f"{at}/access0/initiators/read_bandwidth", 30720)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


CXL = "platform/ACPI0017:00/root0/decoder0.0/region0/dax_region0"


def test_devices_by_what_is_behind_them(tree):
    tree.dax("dax0.0", CXL)
    tree.dax("dax1.0", "platform/hmem.0", driver="kmem", node=2)
    tree.dax("dax2.0", "LNXSYSTM:00/ndbus0/region1", driver=None, node=-1)
    found = devices.dax_devices(tree.root)
    assert [(each.kind, each.mode, each.node) for each in found] == [
        ("cxl", "devdax", 1),
        ("soft-reserved", "system-ram", 2),
        ("pmem", "disabled", -1),
    ]
    assert found[0].path == "/dev/dax0.0"
    assert found[0].size == 64 * MIB


def test_auto_takes_what_is_free_and_says_why_not(tree):
    tree.dax("dax0.0", CXL, content=b"\0" * 0x438 + b"\x53\xef")
    tree.dax("dax1.0", CXL, driver="kmem")
    tree.dax("dax2.0", CXL, size=2 * MIB)
    tree.dax("dax3.0", CXL)
    tree.dax("dax4.0", CXL, content=b"KVPOOL\0\0 removed, or not: the C core sees")
    tree.dax("dax5.0", CXL)
    (tree.root / "dev/dax5.0").unlink()
    free, reasons = devices.free_dax(4 * MIB, tree.root)
    assert [each.name for each in free] == ["dax3.0", "dax4.0"]
    assert "holds something" in reasons["dax0.0"]
    assert "daxctl reconfigure-device --mode=devdax --force dax1.0" in reasons["dax1.0"]
    assert f"has {2 * MIB} bytes" in reasons["dax2.0"]
    assert "cannot be read" in reasons["dax5.0"]
    assert set(reasons) == {"dax0.0", "dax1.0", "dax2.0", "dax5.0"}


def test_auto_without_devices(tmp_path):
    with pytest.raises(kvpool.NotFound, match="kvpool doctor"):
        devices.free_dax(0, tmp_path)


def test_auto_goes_on_to_the_next_device(monkeypatch):
    """Both devices look free; the core refuses them, each for a reason of its own."""
    rest = 1 << 30, 2 * MIB, "devdax", -1, "cxl"
    pair = [devices.DaxDevice(f"dax{n}.0", f"/dev/kvpool-none{n}", *rest) for n in (0, 1)]
    monkeypatch.setattr(kvpool.pool, "free_dax", lambda size: (pair, {"dax9.0": "it is disabled"}))
    with pytest.raises(kvpool.NotFound) as error:
        kvpool.create("dax:auto", "4MiB")
    assert all(part in str(error.value) for part in ("dax0.0: ", "dax1.0: ", "dax9.0: it is disabled"))


def test_a_device_that_does_not_exist_says_what_to_do():
    with pytest.raises(kvpool.NotFound, match="kvpool doctor"):
        kvpool.create("dax:/dev/dax99.99", "4MiB")
    with pytest.raises(kvpool.InvalidArgument, match="daxctl list"):
        kvpool.create("dax:/dev/null", "4MiB")


def test_nodes_with_latencies(tree):
    tree.node(0, "0-1", 1 << 20)
    tree.node(1, "", 1 << 18, distance="28 10", latency=250)
    near, far = devices.nodes(tree.root)
    assert (near.cpus, near.distance, near.size, near.free) == ("0-1", 10, 1 << 30, 1 << 29)
    assert (far.cpus, far.distance, far.read_latency, far.read_bandwidth) == ("", 28, 250, 30720)


def run_doctor(*arguments):
    result = CliRunner().invoke(kvpool_command, ["doctor", *map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_doctor_of_a_machine_with_everything(tree):
    tree.dax("dax0.0", CXL)
    tree.dax("dax1.0", CXL, driver="kmem", node=2)
    tree.node(0, "0-1", 1 << 20)
    tree.node(1, "", 1 << 18, latency=250)
    for leaf, value in {"size": "0x10000000", "mode": "ram", "commit": 1}.items():
        tree.write(f"sys/bus/cxl/devices/region0/{leaf}", value)
    tree.write("sys/bus/cxl/devices/region0/driver/bind", "")
    tree.write("sys/bus/cxl/devices/mem0/serial", 1)
    tree.write("sys/bus/nd/devices/namespace0.0/mode", "raw")
    for leaf in ("nr", "free"):
        tree.write(f"sys/kernel/mm/hugepages/hugepages-2048kB/{leaf}_hugepages", 4)
    tree.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    tree.write("proc/cpuinfo", "model name\t: Some CPU\nflags\t\t: fpu clflush clwb hypervisor")
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue")
    tree.write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t Some GPU\nIRQ: 7")
    found = json.loads(run_doctor("--root", tree.root, "--json"))
    assert found["processor"] == {"name": "Some CPU", "line_instructions": ["clwb", "clflush"], "virtual": True}
    assert found["cxl"] == {
        "memories": 1,
        "regions": [{"name": "region0", "size": 256 * MIB, "mode": "ram", "committed": True, "enabled": True}],
    }
    assert found["huge_pages"]["reserved"] == {"2048kB": {"nr": 4, "free": 4}}
    assert found["huge_pages"]["transparent"] == "madvise"
    assert (found["gpus"]["models"], found["gpus"]["driver"]) == (["Some GPU"], "550.54.15")
    advice = "\n".join(found["advice"])
    for part in ("kvpool create dax:/dev/dax0.0", "daxctl offline-memory dax1.0", "?node=1'", "?interleave=0,1'",
                 "hugetlb:2MiB"):  # fmt: skip
        assert part in advice
    shown = run_doctor("--root", tree.root)
    for part in ("/dev/dax0.0", "system-ram", "250", "Some GPU, driver 550.54.15"):
        assert part in shown


def test_doctor_of_a_machine_with_nothing(tmp_path):
    found = json.loads(run_doctor("--root", tmp_path, "--json"))
    assert (found["dax"], found["nodes"], found["cxl"]["regions"], found["gpus"]["models"]) == ([], [], [], [])
    assert any("modprobe" in line for line in found["advice"])
    assert any("noncoherent does not work" in line for line in found["advice"])


@pytest.mark.parametrize(
    ("tell", "says"),
    [
        (lambda tree: tree.write("sys/bus/cxl/devices/mem0/serial", 1), "cxl create-region"),
        (lambda tree: tree.write("sys/bus/nd/devices/namespace0.0/mode", "raw"), "ndctl create-namespace"),
        (lambda tree: tree.dax("dax0.0", CXL, driver=None), "dax0.0 is disabled"),
        (lambda tree: tree.region(commit=0), "cxl destroy-region --force region0"),
        (lambda tree: tree.region(commit=1), "cxl enable-region region0"),
        (lambda tree: tree.region(commit=1, driver="cxl_region"), "region0 without a dax device: modprobe"),
    ],
)
def test_doctor_says_the_next_step(tree, tell, says):
    tell(tree)
    assert any(says in line for line in doctor.advise(doctor.examine(tree.root)))


def test_doctor_of_this_machine():
    found = json.loads(run_doctor("--json"))
    assert found["nodes"][0]["size"] > 0
    assert found["shm"]["bytes"] > 0


# ---- what lies on a device ----

# As their own tools write them.
MADE_BY = {
    "an ext2, ext3 or ext4 file system": ["mke2fs", "-q", "-t", "ext4", "-b", "4096"],
    "swap space": ["mkswap"],
    "an XFS file system": ["mkfs.xfs", "-q"],
    "a btrfs file system": ["mkfs.btrfs", "-q"],
}
# As they are described: place and bytes.
MARKS = {
    "an XFS file system": (0, b"XFSB"),
    "a btrfs file system": (0x10040, b"_BHRfS_M"),
    "a famfs file system": (0, (0x87B282FF).to_bytes(8, "little")),
    "an encrypted volume (LUKS)": (0, b"LUKS\xba\xbe"),
    "a volume of LVM": (0x218, b"LVM2 001"),
    "a partition table": (0x200, b"EFI PART"),
    "a namespace of mode fsdax": (0x1000, b"NVDIMM_PFN_INFO"),
    "a namespace of mode devdax": (0x1000, b"NVDIMM_DAX_INFO"),
}


def content(path):
    """What the core takes a file for, as it is and once it was cleared."""
    return build.run([build.program(build.PLAIN, "native/content.c"), path]).splitlines()


@pytest.mark.parametrize("what", MADE_BY)
def test_what_tools_have_made_is_known_and_cleared(tmp_path, what):
    command = MADE_BY[what]
    tool = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if not tool:
        pytest.skip(f"{command[0]} is not installed")
    path = tmp_path / "device"
    with path.open("wb") as file:
        file.truncate(320 * MIB)  # XFS takes no less
    subprocess.run([tool, *command[1:], path], check=True, capture_output=True)
    assert content(path) == [what, "nothing"]


@pytest.mark.parametrize("what", MARKS)
def test_marks_are_known_and_cleared(tmp_path, what):
    at, mark = MARKS[what]
    path = tmp_path / "device"
    path.write_bytes((b"\0" * at + mark).ljust(MIB, b"\0"))
    assert content(path) == [what, "nothing"]


def test_a_device_too_small_for_a_mark(tmp_path):
    path = tmp_path / "device"
    path.write_bytes(b"\0" * 4096)
    assert content(path) == ["nothing", "nothing"]


# ---- options of URIs ----


def test_two_mebibyte_pages_or_an_error(uri):
    with pytest.raises(kvpool.NoSpace, match="hugepage=2M"):
        kvpool.create(f"{uri}?hugepage=2M", "1MiB", "64KiB")  # less than one of them
    try:
        pool = kvpool.create(f"{uri}?hugepage=2M", "8MiB", "64KiB")
    except kvpool.NoSpace:
        pytest.skip("this kernel gives none")
    with pool:
        assert pool.uri == uri
        assert pool.stats()["huge_bytes"] >= 8 * MIB


def test_reserved_pages_by_either_name():
    for uri in ("hugetlb:2MiB", "memfd:?hugepage=2M"):
        with pytest.raises(kvpool.NoSpace, match="nr_hugepages"):
            kvpool.create(uri, "4GiB", "64KiB")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("shm:x?hugepage=4K", "hugepage=2M"),
        ("hugetlb:2MiB?hugepage=2M", "says its size itself"),
        ("shm:x?hugepage=2M&interleave=0", "hugetlb:2MiB[?]interleave="),
        ("dax:/dev/null?hugepage=1G", "hugepage=2M"),
    ],
)
def test_options_that_do_not_fit(uri, says):
    with pytest.raises(kvpool.InvalidArgument, match=says):
        kvpool.create(uri, "4MiB")


def test_nodes_need_memory_that_comes_from_somewhere(tmp_path):
    with pytest.raises(kvpool.InvalidArgument, match="lies where it lies"):
        kvpool.create(f"file:{tmp_path}/pool?node=0", "1MiB", "4KiB")
    assert not list(tmp_path.iterdir())


def test_pages_that_are_spread_stay_so(uri):
    """What the kernel makes huge pages of it moves to one node: an interleaved pool is left alone."""
    with kvpool.create(f"{uri}?interleave=0", "8MiB", "64KiB") as pool:
        assert pool.stats()["huge_bytes"] == 0


# ---- the rig, as far as it goes without a guest ----


def run_rig(*arguments, code):
    result = CliRunner().invoke(rig_command, list(map(str, arguments)))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_the_rig_needs_a_wheel():
    assert "--wheel" in run_rig(code=2)


def test_the_rig_says_why_there_are_no_guests(monkeypatch, tmp_path):
    monkeypatch.setattr("kvpool.tools.rig.packages.missing_tools", lambda: "no apt-get")
    assert "no apt-get" in run_rig("--probe", "--folder", tmp_path / "rig", code=3)
    assert not (tmp_path / "rig").exists()


RIG_WITH_A_GUEST = """
import signal, sys
from pathlib import Path
from kvpool.tools.rig.guest import Guest, Machine, Memory, Shape
folder = Path(sys.argv[1])
qemu = ["sh", "-c", f"echo $$ >{folder}/part; mv {folder}/part {folder}/pid; exec sleep 1000"]
with Memory("device", 1 << 20) as memory, Guest(Machine(qemu, folder, folder, folder), "guest", Shape([memory.path])):
    signal.pause()
"""


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(what):
    for _ in range(4000):
        if what():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv, of util-linux")
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_guests_end_with_the_rig(tmp_path, by):
    """Nobody is left to end them: the kernel does."""
    rig = subprocess.Popen([sys.executable, "-P", "-c", RIG_WITH_A_GUEST, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        assert wait_until((tmp_path / "pid").exists)
        guest = int((tmp_path / "pid").read_text())
        assert is_running(guest)
    finally:
        rig.send_signal(by)
    rig.wait()
    assert wait_until(lambda: not is_running(guest))
    assert not list(Path("/dev/shm").glob("kvpool-rig*"))


def test_the_image_is_what_was_in_the_folder(tmp_path):
    """Sizes and names of a cpio archive, as the kernel reads them."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "name").write_text("kvpool")
    (tmp_path / "link").symlink_to("etc/name")
    out = io.BytesIO()
    write_cpio(tmp_path, out)
    data, at, found = out.getvalue(), 0, {}
    while data[at : at + 6] == b"070701":
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name_at, size = at + 110, fields[6]
        body = -(-(name_at + fields[11]) // 4) * 4
        found[data[name_at : name_at + fields[11] - 1].decode()] = data[body : body + size]
        at = -(-(body + size) // 4) * 4
    assert at == len(data)
    assert found == {"etc": b"", "etc/name": b"kvpool", "link": b"etc/name", "dev/console": b"", "TRAILER!!!": b""}
