"""What a guest boots: one initial RAM file system with its programs, its modules, the wheel and the agent."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["build", "kernel_of", "loader", "prepare_guest"]

DROP = (
    "etc/modprobe.d/nvdimm-security.conf", "usr/bin/perl*", "usr/lib/modprobe.d/nvdimm-security.conf",
    "usr/lib/python3/dist-packages/numpy/*/tests", "usr/lib/python3/dist-packages/numpy/f2py",
    "usr/lib/python3/dist-packages/pygments/lexers/[!_]*", "usr/lib/python3.13/test", "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/perl*", "usr/share/doc", "usr/share/i18n", "usr/share/info", "usr/share/locale",
    "usr/share/man", "usr/share/perl*", "usr/share/python-wheels", "usr/share/zoneinfo", "var/lib/dpkg",
)  # fmt: skip
PACKAGES = "usr/lib/python3/dist-packages"
MODULES = (
    "crypto", "drivers/acpi/apei", "drivers/acpi/nfit", "drivers/cxl", "drivers/dax", "drivers/nvdimm",
    "drivers/virtio", "fs/xfs", "lib", "mm",
)  # fmt: skip
# Without udev, modules are loaded by hand (see devices.py). The agent talks on the second serial line.
INIT = """#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/bb HOME=/tmp PYTHONDONTWRITEBYTECODE=1 COLUMNS=120
export LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu/blas:/usr/lib/x86_64-linux-gnu/lapack
busybox mount -t proc proc /proc; busybox mount -t sysfs sys /sys; busybox mount -t devtmpfs dev /dev
busybox mkdir -p /bb /tmp /dev/shm /mnt; busybox --install -s /bb
[ -e /bin/sh ] || busybox ln -s bash /bin/sh
busybox mount -t tmpfs shm /dev/shm; busybox mount -t tmpfs tmp /tmp
for word in $(cat /proc/cmdline); do case $word in machine=*) echo ${word#machine=} >/etc/machine-id;; esac; done
exec </dev/console >/dev/console 2>&1
python3 -P -m kvpool.tools.rig.agent /dev/ttyS1
echo "the agent has ended: $?"; echo o >/proc/sysrq-trigger; sleep 60
"""


def kernel_of(kernel_root: Path) -> Path:
    """The kernel itself."""
    return next((kernel_root / "boot").glob("vmlinuz-*"))


def loader(root: Path) -> list[str]:
    """What runs a program of an unpacked root on this machine, with the root's own libraries."""
    library = root / "usr/lib/x86_64-linux-gnu"
    return [str(root / "usr/lib64/ld-linux-x86-64.so.2"), "--library-path", str(library)]


def _trim(root: Path) -> None:
    for pattern in DROP:
        for path in root.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _compile(root: Path, *folders: str) -> None:
    """Bytecode of Python sources, by the guest's own Python: an emulated processor would take long to make it."""
    environment = {"PYTHONHOME": str(root / "usr"), "PATH": os.environ["PATH"]}
    command = [*loader(root), str(next((root / "usr/bin").glob("python3.[0-9]*[0-9]"))), "-P", "-m", "compileall", "-q"]
    command += ["--invalidation-mode", "unchecked-hash", "-s", str(root), *(str(root / each) for each in folders)]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)  # a file that cannot be: as it is


def prepare_guest(root: Path) -> None:
    """Once after unpacking: without what no guest needs, with bytecode."""
    _trim(root)
    _compile(root, "usr/lib")


def _add_modules(root: Path, kernel_root: Path) -> None:
    version = next((kernel_root / "usr/lib/modules").iterdir()).name
    source, target = (base / "usr/lib/modules" / version for base in (kernel_root, root))
    for each in MODULES:
        if (source / "kernel" / each).exists():
            shutil.copytree(source / "kernel" / each, target / "kernel" / each)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copy(source / name, target / name)
    packed = [str(path) for path in target.rglob("*.ko.xz")]
    if packed:
        subprocess.run(["xz", "-d", *packed], check=True)
    program, *libraries = loader(root)
    depmod = ["--argv0", "depmod", str(root / "usr/bin/kmod"), "-b", str(root), version]
    subprocess.run([program, *libraries, *depmod], check=True)


def _entries(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names.sort()
        for name in sorted(names + files):
            yield Path(folder) / name


def _write_entry(
    out: BinaryIO, number: int, name: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)
) -> None:
    label = name.encode() + b"\0"
    # magic, inode, mode, uid, gid, links, time, size, device (2), device of a node (2), length of the name, checksum
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(label), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields)
    out.write(head + label + b"\0" * (-(len(head) + len(label)) % 4))
    out.write(data + b"\0" * (-len(data) % 4))


def write_cpio(root: Path, out: BinaryIO) -> None:
    """A folder as the kernel unpacks it (format newc), owned by root, with a console."""
    number = 0
    for path in _entries(root):
        number += 1
        mode, name = path.lstat().st_mode, str(path.relative_to(root))
        if stat.S_ISLNK(mode):
            _write_entry(out, number, name, mode, os.fsencode(os.readlink(path)))
        elif stat.S_ISDIR(mode) or stat.S_ISREG(mode):
            _write_entry(out, number, name, mode, path.read_bytes() if stat.S_ISREG(mode) else b"")
    _write_entry(out, number + 1, "dev/console", stat.S_IFCHR | 0o600, b"", (5, 1))
    _write_entry(out, 0, "TRAILER!!!", 0, b"")


def build(folder: Path, guest_root: Path, kernel_root: Path, wheel: Path) -> Path:
    """The image, in `folder`."""
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(guest_root, root, symlinks=True)
    _add_modules(root, kernel_root)
    for name in ("dev", "proc", "sys", "tmp", "etc"):
        (root / name).mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(root / PACKAGES)
    _compile(root, f"{PACKAGES}/kvpool")
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    image = folder / "guest.cpio"
    with image.open("wb") as out:
        write_cpio(root, out)
    shutil.rmtree(root)
    return image
