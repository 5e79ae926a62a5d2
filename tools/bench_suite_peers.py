"""The suite `peers`: the same work by others. A ratio below 1 says that this pool is faster.

Each peer runs in a process of its own, in the interpreter that has its packages: this one, that of build/peers (which
the suite makes in a source tree, from PyPI), that of build/engines (`make engines`), or one of those that KVPOOL_PEERS
names. Whoever is missing is named, with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np

from kvpool.tools import bench_peers_child
from kvpool.tools.bench_suite import Effort, Report, Row, Timed, in_turn, per_call_ns
from kvpool.tools.bench_suite_core import CALLS, COPY_BYTES, SAMPLES, Copies, elapsed_us, reserver
from kvpool.tools.bench_suite_driver import ROOT, TIMEOUT_S
from kvpool.tools.bench_suite_pool import CHAIN, STRIDE_MIN, World, make_pool, make_world

__all__ = ["run"]

BLOCKS = 100_000
SIZES = {"64 KiB": 64 << 10, "2 MiB": 2 << 20}
ALLOCATORS = {"tcmalloc": "tcmalloc_minimal", "jemalloc": "jemalloc", "mimalloc": "mimalloc"}
MODULES = {
    "iceoryx2": "iceoryx2",
    "redis": "redis",
    "LMCache L1": "lmcache",
    "Dynamo RadixTree": "dynamo",
    "vLLM BlockPool": "vllm",
}
"""Name of a peer -> the module that is its package; what the child calls it too."""
STORES = ("iceoryx2", "redis", "LMCache L1")
INDEXES = ("redis", "LMCache L1", "Dynamo RadixTree", "vLLM BlockPool")
PACKAGES = (["numpy"], ["iceoryx2"], ["redis"], ["--no-deps", "ai-dynamo-runtime"])  # those that need no torch
NOT_DRIVEN = {
    "Mooncake Store": "its data port listens on every interface of the machine",
    "LMCache's server": "the suite `engines` has it, behind an engine",
}
SOURCE = ROOT / "tests" / "native" / "bench_malloc.c"
SAMPLES_STORE, SAMPLES_INDEX, INSTALL_S, START_S = 200, 50, 600, 30.0


# ---- who is here ----


def install(folder: Path, notes: list[str]) -> None:
    """Make an environment with the peers that are small. What cannot be had is missing later."""
    try:
        venv.create(folder, with_pip=True)
        for packages in PACKAGES:
            command = [str(folder / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check", "install"]
            subprocess.run([*command, *packages], capture_output=True, timeout=INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        notes.append(f"build/peers cannot be made: {error}")


def interpreters(notes: list[str]) -> list[str]:
    """Where peers may be installed."""
    peers = ROOT / "build" / "peers"
    if SOURCE.is_file() and not peers.exists():
        install(peers, notes)
    built = [ROOT / "build" / name / "bin" / "python" for name in ("peers", "engines")]
    named = [Path(name) for name in os.environ.get("KVPOOL_PEERS", "").split(os.pathsep) if name]
    return [sys.executable, *(str(path) for path in [*built, *named] if path.exists())]


def find(pythons: list[str], notes: list[str]) -> dict[str, str]:
    """Name of a peer -> the first interpreter that has it."""
    found = {}
    for name, module in MODULES.items():
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        have = [python for python in pythons if subprocess.run([python, "-P", "-c", probe]).returncode == 0]
        if have:
            found[name] = have[0]
        else:
            notes.append(f"{name}: not installed in {', '.join(pythons)}")
    return found


class Peer:
    """A child that takes samples when it is asked to."""

    def __init__(self, python: str, *order: str) -> None:
        """Start it. Raises RuntimeError with its last words if it does not get ready."""
        script = Path(bench_peers_child.__file__)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the child
        self._process = subprocess.Popen(
            [python, "-P", str(script), *order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@@"):
                return line[2:]
        self._errors.seek(0)
        words = self._errors.read().strip().splitlines() or ["nothing"]
        self.close()
        raise RuntimeError(f"it ended, and said: {words[-1][:200]}")

    def sample(self) -> float:
        """Microseconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End it. Idempotent."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


@contextlib.contextmanager
def redis_server(notes: list[str]) -> Iterator[str]:
    """A server of ours on a socket of the file system, without a port; "" if it is not to be had."""
    program = shutil.which("redis-server")
    if program is None:
        notes.append("redis: redis-server is not installed")
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        socket = Path(folder) / "redis"
        words = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", folder]
        server = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        try:
            yield str(socket)
        finally:
            server.terminate()
            server.wait()


class Others:
    """The peers that are here."""

    def __init__(self, found: dict[str, str], socket: str, notes: list[str]) -> None:
        """`found`: where each is installed."""
        self._found, self._socket, self._notes = found, socket, notes

    def beside(self, name: str, verb: str, number: int, ours: Timed, samples: int) -> tuple[float, float] | None:
        """Ours and theirs, in turn; None, and a note, if they cannot."""
        if name not in self._found or (name == "redis" and not self._socket):
            return None
        try:
            peer = Peer(self._found[name], MODULES[name], verb, str(number), self._socket)
        except RuntimeError as error:
            self._notes.append(f"{name}, {verb}: {error}")
            return None
        try:
            spent, theirs = in_turn(samples, ours, peer.sample)
        finally:
            peer.close()
        return spent, theirs


# ---- index ----


def dict_lookup(world: World) -> Timed:
    """A Python dict of the same keys: the longest prefix."""
    table = {key: number for tokens in world.tokens for number, key in enumerate(world.space.keys(tokens))}

    def sample() -> float:
        keys = list(world.any_keys(CHAIN))

        def prefix() -> int:
            found = 0
            for key in keys:
                if table.get(key) is None:
                    break
                found += 1
            return found

        return elapsed_us(prefix)[0]

    return sample


def index_rows(effort: Effort, others: Others) -> Iterator[Row]:
    """A chain of 1,024 keys looked up."""
    world = make_world(BLOCKS)

    def ours() -> float:
        keys = world.any_keys(CHAIN)
        return elapsed_us(lambda: world.space.lookup(keys))[0]

    spent, theirs = in_turn(effort.samples(SAMPLES_STORE), ours, dict_lookup(world))
    yield Row.of("lookup of 1024 keys of 1e5, to dict", "us", spent, theirs)
    for name in INDEXES:
        both = others.beside(name, "lookup", BLOCKS, ours, effort.samples(SAMPLES_INDEX))
        if both is not None:
            yield Row.of(f"lookup of 1024 keys of 1e5, to {name}", "us", *both)
    world.pool.close()


# ---- allocation ----


def malloc_ns(program: Path, size: int, library: str | None) -> float:
    """A pair of the C library's allocator, or of the one preloaded."""
    environment = os.environ | ({"LD_PRELOAD": library} if library else {})
    done = subprocess.run([program, str(size)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    return float(done.stdout)


def alloc_rows(effort: Effort, notes: list[str]) -> Iterator[Row]:
    """A pair of calls in C; ours from Python has a row in the suite `alloc`."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not SOURCE.is_file():
        notes.append("allocators: they need a source tree and a C compiler")
        return
    pool = make_pool(1 << 16, STRIDE_MIN)
    ours = in_turn(effort.samples(SAMPLES), per_call_ns(reserver(pool, 64), CALLS))[0] / 64
    pool.close()
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        program = Path(folder) / "bench_malloc"
        subprocess.run([compiler, "-O2", str(SOURCE), "-o", str(program)], check=True, timeout=TIMEOUT_S)
        for name, file in {"the C library": "", **ALLOCATORS}.items():
            library = ctypes.util.find_library(file) if file else None
            if file and library is None:
                notes.append(f"{name}: the library is not installed here")
                continue
            for size_name, size in SIZES.items():
                theirs = malloc_ns(program, size, library)
                yield Row.of(
                    f"reserve+withdraw, 64 at once (Python), to {name} at {size_name}", "ns/block", ours, theirs
                )


# ---- copies ----


def shared_memory_put(stride: int, buffers: list[np.ndarray], segment: shared_memory.SharedMemory) -> Timed:
    """`multiprocessing.shared_memory`: a numpy copy to the oldest place, and no index."""
    rows = np.ndarray((len(buffers), stride), np.uint8, buffer=segment.buf)
    turn = iter(range(1 << 62))

    def sample() -> float:
        at = next(turn) % len(buffers)
        start = time.perf_counter_ns()
        rows[at] = buffers[at]
        return (time.perf_counter_ns() - start) / 1e3

    return sample


def copy_rows(effort: Effort, others: Others) -> Iterator[Row]:
    """A block in, and a block out."""
    for name, stride in COPY_BYTES.items():
        copies = Copies(stride)
        segment = shared_memory.SharedMemory(create=True, size=stride * copies.count)
        try:
            theirs = shared_memory_put(stride, copies.buffers, segment)
            for _ in range(copies.count):
                theirs()
            spent, bound = in_turn(effort.samples(SAMPLES_STORE), copies.put, theirs)
            yield Row.of(f"put, {name}, to multiprocessing.shared_memory without an index", "us", spent, bound)
            for peer in STORES:
                for verb, ours in (("put", copies.put), ("get", copies.get)):
                    both = others.beside(peer, verb, stride, ours, effort.samples(SAMPLES_STORE))
                    if both is not None:
                        what = "put" if verb == "put" else "get_into"
                        yield Row.of(f"{what}, {name}, to {peer}", "us", *both)
        finally:
            copies.close()
            del theirs
            segment.close()
            segment.unlink()


def run(effort: Effort) -> Report:
    """All rows of the suite."""
    notes = [f"{name}: {why}" for name, why in NOT_DRIVEN.items()]
    with redis_server(notes) as socket:
        others = Others(find(interpreters(notes), notes), socket, notes)
        rows = [*index_rows(effort, others), *alloc_rows(effort, notes), *copy_rows(effort, others)]
    return Report(rows, notes)
