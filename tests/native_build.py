"""How the native tests are compiled: the C core once per flavour, each program against it.

Objects are kept in build/native-tests/, named by a hash of every source and flag, so that an
unchanged tree compiles nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("coherence", "allocator", "native")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.c"))
HEADERS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.h"))
WARNINGS = ("-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Flavour:
    """A compiler and its flags."""

    name: str
    compiler: str
    flags: tuple[str, ...]
    link: tuple[str, ...] = ()
    folders: tuple[str, ...] = FOLDERS

    def command(self) -> list[str]:
        return [self.compiler, "-std=gnu11", f"-I{ROOT}", "-pthread", "-g", *WARNINGS, *self.flags]


PLAIN = Flavour("plain", "gcc", ("-O2",))
CRASH = Flavour("crash", "gcc", ("-O2", "-DKVP_CRASH_POINTS"))
CRASH_SIM = Flavour("crash-sim", "gcc", ("-O2", "-DKVP_CRASH_POINTS", "-DKVP_MODE=2"))
TSAN = Flavour("tsan", "clang", ("-O1", "-fsanitize=thread"))
ASAN = Flavour("asan", "gcc", ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))
CLANG = Flavour("clang", "clang", ("-O2", "-Watomic-alignment", "-Watomic-implicit-seq-cst"))
FUZZ = Flavour(
    "fuzz",
    "clang",
    ("-O1", "-DKVP_FUZZ", "-fsanitize=fuzzer-no-link,address,undefined", "-fno-sanitize-recover=all"),
    ("-fsanitize=fuzzer",),
)
ARM = Flavour("aarch64", "aarch64-linux-gnu-gcc", ("-O2", "-static"))
# The bottom layer by itself in the modes of many hosts.
BOTTOM = ("coherence",)
STRICT = ("-Wconversion", "-Wno-sign-conversion")
NONCOHERENT = Flavour("noncoherent", "gcc", ("-O2", "-DKVP_MODE=1", *STRICT), folders=BOTTOM)
NONCOHERENT_ARM = Flavour("noncoherent-aarch64", ARM.compiler, (*ARM.flags, "-DKVP_MODE=1"), folders=BOTTOM)
SIM = Flavour("sim", "gcc", ("-O2", "-DKVP_MODE=2", *STRICT), folders=BOTTOM)
SIM_ASAN = Flavour("sim-asan", "gcc", ("-DKVP_MODE=2", *ASAN.flags), folders=BOTTOM)


def need(tool: str) -> None:
    """Skip where a tool of the machine is absent: the only reason for a skip here."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")


def run(command: list[str | Path], *, timeout: float = 300, env: dict[str, str] | None = None) -> str:
    """Run a program; its output, or a failure that shows all of it."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        errors="replace",
        env={**os.environ, **(env or {})},
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"exit {done.returncode}: {' '.join(map(str, command))}\n{output[-6000:]}"
    return output


@functools.cache
def _tree_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(p for folder in (*FOLDERS, "tests") for p in (ROOT / folder).rglob("*.[ch]")):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _folder(flavour: Flavour) -> Path:
    flags = hashlib.sha256(repr(flavour).encode()).hexdigest()[:8]
    folder = ROOT / "build" / "native-tests" / f"{flavour.name}-{flags}-{_tree_hash()}"
    if not folder.exists():
        for old in folder.parent.glob(f"{flavour.name}-*"):
            if time.time() - old.stat().st_mtime > 3600:  # a younger one may be another run's
                shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Other test processes build there later; what is built already they find."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def core(flavour: Flavour) -> tuple[Path, ...]:
    """The objects of the C core."""
    need(flavour.compiler)
    folder = _folder(flavour)
    objects = []
    with alone(folder):
        for source in SOURCES:
            if source.parent.name not in flavour.folders:
                continue
            target = folder / f"{source.parent.name}-{source.stem}.o"
            if not target.exists():
                partial = target.with_suffix(".part")
                run([*flavour.command(), "-c", source, "-o", partial])
                partial.rename(target)
            objects.append(target)
    return tuple(objects)


@functools.cache
def program(flavour: Flavour, source: str, *flags: str) -> Path:
    """The program made of tests/<source> and the core."""
    objects = core(flavour)
    folder = _folder(flavour)
    target = folder / Path(source).stem
    with alone(folder):
        if not target.exists():
            partial = target.with_suffix(".part")
            run([*flavour.command(), *flavour.link, *flags, ROOT / "tests" / source, *objects, "-o", partial])
            partial.rename(target)
    return target
