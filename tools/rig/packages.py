"""Debian packages in a folder of our own: QEMU, the guests' kernel and what they run. Nothing is installed here.

apt resolves and fetches with state of its own (an empty list of installed packages), `dpkg-deb -x` unpacks. So the
machine keeps its packages, and what the guests get does not depend on them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import click

__all__ = ["GUEST", "MACHINE", "SUITE", "Archive", "Unavailable", "missing_tools"]

SUITE = "trixie"  # the first with cxl, and with a QEMU (10.0) whose CXL devices read back what was written
MACHINE = ("qemu-system-x86", "seabios")
GUEST = (
    "bash", "busybox-static", "cxl", "daxctl", "e2fsprogs", "kmod", "ndctl", "numactl", "python3", "python3-numpy",
    "python3-cffi-backend", "python3-click", "python3-psutil", "python3-rich", "python3-xxhash",
)  # fmt: skip
KERNEL = "linux-image-cloud-amd64"  # has every CXL, DAX and pmem driver; names the real package
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ARCHITECTURE = "amd64"


def missing_tools() -> str:
    """Why packages cannot be had on this machine; empty if they can."""
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if not shutil.which(tool):
            return f"{tool} is not there: the guests are made of Debian packages"
    for tool in ("setpriv", "xz"):
        if not shutil.which(tool):
            return f"{tool} is not there: install util-linux and xz-utils"
    if not KEYRING.exists():
        return f"{KEYRING} is not there: install debian-archive-keyring"
    return ""


def find_mirror() -> str:
    """The Debian archive that this machine uses already, by its apt sources."""
    folder = Path("/etc/apt")
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    text = "\n".join(path.read_text(errors="replace") for path in files if path.is_file())
    for line in re.findall(r"^(?:URIs:|deb\s).*$", text, re.MULTILINE):
        for uri in re.findall(r"(?:https?|file)://\S+?/debian/?(?=\s|$)", line):
            return str(uri)
    raise Unavailable("no Debian archive in /etc/apt/sources.list*: name one with --mirror")


class Unavailable(click.ClickException):
    """The guests cannot be had on this machine: nothing was tested."""

    exit_code = 3


class Archive:
    """A cache of packages of one suite, and folders into which they were unpacked."""

    def __init__(self, folder: Path, mirror: str | None) -> None:
        self.folder = folder
        self.debs = folder / "cache" / "archives"
        for part in (self.debs / "partial", folder / "lists" / "partial"):
            part.mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        source = f"deb [signed-by={KEYRING}] {mirror or find_mirror()} {SUITE} main\n"
        (folder / "sources.list").write_text(source)

    def apt(self, tool: str, *arguments: str, cwd: Path | None = None) -> str:
        """Run an apt tool with our state; returns what it printed."""
        at = self.folder
        options = {
            "Dir::Etc::SourceList": at / "sources.list", "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": at / "lists", "Dir::State::status": at / "status", "Dir::Cache": at / "cache",
            "APT::Sandbox::User": "root", "Acquire::Languages": "none", "APT::Architecture": ARCHITECTURE,
            "APT::Get::List-Cleanup": "false", "Acquire::Retries": "3",
        }  # fmt: skip
        settings = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        command = [tool, *settings, "-q", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
        if done.returncode:
            last = "\n".join(done.stderr.strip().splitlines()[-3:])
            raise Unavailable(f"{tool} {' '.join(arguments[:2])} failed: {last}")
        return done.stdout

    def kernel(self) -> str:
        """The real package behind the name that always means the newest kernel."""
        found = re.search(r"linux-image-[0-9]\S*", self.apt("apt-cache", "depends", KERNEL))
        if not found:
            raise click.ClickException(f"{KERNEL} depends on no kernel")
        return found[0]

    def fetch(self, packages: tuple[str, ...]) -> list[Path]:
        """Those packages and all they depend on, as files; what is in the cache is not fetched again."""
        install = ("--no-install-recommends", "install", *packages)
        (self.folder / "nothing" / "partial").mkdir(parents=True, exist_ok=True)
        empty = ("-o", f"Dir::Cache::archives={self.folder / 'nothing'}")  # else it would not name what it has already
        listed = self.apt("apt-get", "-y", *empty, "--print-uris", *install)
        self.apt("apt-get", "-y", "--download-only", *install)
        return [self.debs / name for name in re.findall(r"^'[^']*' (\S+\.deb) ", listed, re.MULTILINE)]

    def unpack(self, debs: list[Path], target: Path, finish: Callable[[Path], None] = lambda root: None) -> None:
        """Into a folder, which is whole or not there."""
        half = target.with_name(target.name + ".new")
        shutil.rmtree(half, ignore_errors=True)
        for name in ("usr/bin", "usr/lib", "usr/sbin", "usr/lib64"):
            (half / name).mkdir(parents=True)
        for name in ("bin", "lib", "sbin", "lib64"):
            (half / name).symlink_to(f"usr/{name}")
        for deb in debs:
            # `dpkg-deb -x` would replace the links to /usr by folders where a package still has them.
            tar = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "--keep-directory-symlink", "-C", half], stdin=tar.stdout, check=True)
            if tar.wait():
                raise click.ClickException(f"{deb} is damaged: remove it")
        finish(half)
        half.rename(target)

    def root(self, name: str, packages: tuple[str, ...], finish: Callable[[Path], None] = lambda root: None) -> Path:
        """A folder with those packages unpacked and finished, made once."""
        target = self.folder / name
        if not target.exists():
            self.unpack(self.fetch(packages), target, finish)
        return target

    def prepare(self) -> None:
        """Lists and packages, if any folder is still to be made."""
        if not all((self.folder / name).exists() for name in ("machine", "guest", "kernel")):
            self.apt("apt-get", "update")

    def kernel_root(self) -> Path:
        """A folder with the kernel and its modules, made once."""
        target = self.folder / "kernel"
        if not target.exists():
            name = self.kernel()
            self.apt("apt-get", "download", name, cwd=self.debs)
            self.unpack(sorted(self.debs.glob(f"{name}_*.deb"))[-1:], target)
        return target
