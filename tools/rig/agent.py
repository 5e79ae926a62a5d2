"""Inside a guest: does what the rig asks over a serial line. One JSON request a line, one JSON answer a line.

A request is {"do": name of a function below, ...its arguments}; the answer {"ok": its result} or {"error": text,
"kind": class}. The pool that `create` or `open` gave stays open for the requests that follow.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import mmap
import os
import subprocess
import sys
import termios
import time
import traceback
import tty
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvpool
from kvpool.keys import Keys

__all__ = ["main"]

IDENTITY = kvpool.Identity(model="rig", revision="1", dtype="uint8", layout="bytes", block_tokens=1)
MAP_SHARED_VALIDATE, MAP_SYNC = 3, 0x80000
SYS_MOVE_PAGES = 279  # of x86-64
POLL_S, PATIENCE_S = 0.02, 600.0
LOCK_INC = bytes.fromhex("f048ff07 48ffce 75f7 c3")  # again: lock inc qword [rdi]; dec rsi; jnz again; ret

held: dict[str, Any] = {}


def pool() -> kvpool.Pool:
    """The pool that is open."""
    made: kvpool.Pool = held["pool"]
    return made


def chain(number: int, count: int) -> Keys:
    """Keys of a chain that every side can name by a number."""
    return pool().namespace(IDENTITY).keys(np.arange(number * 1000, number * 1000 + count))


def payload(number: int, position: int, size: int) -> NDArray[np.uint8]:
    """The bytes of a block: 64-bit words, each of which says where it belongs."""
    words = np.arange(size // 8, dtype=np.uint64) + np.uint64((number << 40) + (position << 24))
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


# ---- what can be asked ----


def shell(command: str) -> dict[str, Any]:
    """Run a command; its exit code and what it printed."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


def command(arguments: list[str]) -> dict[str, Any]:
    """Run the command `kvpool`; in this process, since an emulated processor takes seconds to start another Python."""
    from kvpool.tools.main import main as kvpool_command

    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            kvpool_command.main(arguments, prog_name="kvpool")
        except SystemExit as end:
            code = int(end.code or 0)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def create(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """Make a pool and keep it open."""
    held["pool"] = kvpool.create(uri, **options)
    return {name: pool().info[name] for name in ("bytes", "mode", "hosts", "host")}


def open_pool(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """Open a pool and keep it open."""
    held["pool"] = kvpool.open(uri, **options)
    return {name: pool().info[name] for name in ("bytes", "mode", "hosts", "host")}


def close() -> None:
    """Leave it, and let the mapping go: what is mapped cannot be unmounted."""
    pool().close()
    held.clear()
    gc.collect()


def clear(uri: str) -> None:
    """Make a device free, whatever is on it."""
    held.clear()
    kvpool.remove(uri, force=True)


def publish(number: int, count: int) -> int:
    """A chain, written in place; how many blocks of it were new."""
    space = pool().namespace(IDENTITY)
    with space.reserve(chain(number, count), timeout=PATIENCE_S) as new:
        for position, view in enumerate(new.views):
            view[:] = payload(number, position, view.nbytes)
        return int(new.publish())


def verify(number: int, count: int) -> dict[str, int]:
    """Pin a chain and compare every byte; polls until all of it is there. `right`: blocks with the right bytes."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with pool().namespace(IDENTITY).match(chain(number, count)) as hit:
            if len(hit) == count or time.monotonic() > deadline:
                views = enumerate(hit.views)
                right = sum(np.array_equal(view, payload(number, position, view.nbytes)) for position, view in views)
                return {"found": len(hit), "right": right}
        time.sleep(POLL_S)


def converse(mine: int, theirs: int, rounds: int, count: int) -> dict[str, int]:
    """Publish chains in turn with another side that does the same: each round waits for the other's chain."""
    seen = Counter[str]()
    for turn in range(rounds):
        publish(mine + turn, count)
        seen.update(verify(theirs + turn, count))
    return dict(seen)


def hold(number: int, count: int) -> int:
    """Pin a chain, and reserve as many blocks and fill them without publishing: what a lost host leaves."""
    space = pool().namespace(IDENTITY)
    held["hit"] = space.match(chain(number, count))
    held["new"] = space.reserve(count, timeout=PATIENCE_S)
    for view in held["new"].views:
        view[:] = 0xEE
    return len(held["hit"])


def hosts() -> list[dict[str, Any]]:
    """As this host sees them."""
    pool().follow()
    return pool().hosts()


def fence(host: int, incarnation: int) -> int:
    """Adopt what a host owned that the rig has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return pool().fence(host, incarnation)
        except kvpool.Busy:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def check() -> dict[str, Any]:
    """Walk every structure."""
    report = pool().check()
    return {"clean": report.clean, "problems": report.problems, "leaked": report.leaked, "blocks": dict(report.blocks)}


def info() -> dict[str, Any]:
    """Of the pool that is open."""
    stats = pool().stats()
    return {name: stats[name] for name in ("bytes", "huge_bytes", "mode", "hosts", "uuid")}


def sync(path: str) -> str:
    """Can the file be mapped with MAP_SYNC? Empty, or why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    descriptor = os.open(path, os.O_RDWR)
    try:
        flags = MAP_SHARED_VALIDATE | MAP_SYNC
        at = libc.mmap(None, ctypes.c_size_t(2 << 20), mmap.PROT_READ, flags, descriptor, ctypes.c_long(0))
    finally:
        os.close(descriptor)
    if at == ctypes.c_void_p(-1).value:
        return os.strerror(ctypes.get_errno())
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(2 << 20))
    return ""


def placement() -> dict[str, Any]:
    """On which NUMA nodes the pool's pages are, by move_pages and by numa_maps; negative nodes are errno."""
    base, size = (
        int(pool().core.ffi.cast("uintptr_t", pool().core.lib.kvp_pool_base(pool().handle))),
        pool().info["bytes"],
    )
    count = size // mmap.PAGESIZE
    pages = (np.arange(count, dtype=np.uint64) * np.uint64(mmap.PAGESIZE) + np.uint64(base)).ctypes
    status = np.full(count, -1000, np.int32)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(SYS_MOVE_PAGES, 0, ctypes.c_ulong(count), ctypes.c_void_p(pages.data), None,
                          ctypes.c_void_p(status.ctypes.data), 0)  # fmt: skip
    if result:
        raise OSError(ctypes.get_errno(), "move_pages")
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    nodes, counts = np.unique(status, return_counts=True)
    return {
        "pages": dict(zip(map(str, nodes.tolist()), counts.tolist(), strict=True)),
        "numa_maps": next((line for line in lines if line.startswith(f"{base:x} ")), ""),
    }


def count(path: str, at: int, times: int) -> None:
    """Add one to the word at an offset of a device, so many times, by an atomic instruction."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(LOCK_INC)
    descriptor = os.open(path, os.O_RDWR)
    try:
        device = mmap.mmap(descriptor, 2 << 20, offset=at)
    finally:
        os.close(descriptor)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(code))
    loop = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)(begin)
    loop(ctypes.addressof(ctypes.c_char.from_buffer(device)), times)


DO: dict[str, Callable[..., Any]] = {
    "check": check, "clear": clear, "close": close, "command": command, "converse": converse, "count": count,
    "create": create, "fence": fence, "hold": hold, "hosts": hosts, "info": info, "open": open_pool,
    "placement": placement, "publish": publish, "shell": shell, "sync": sync, "verify": verify,
}  # fmt: skip


def answer(line: bytes) -> dict[str, Any]:
    """Do what a request asks."""
    try:
        request = json.loads(line)
        return {"ok": DO[request.pop("do")](**request)}
    except kvpool.Error as error:
        return {"error": str(error), "kind": type(error).__name__}
    except Exception:  # the rig prints it: nobody else can see into a guest
        return {"error": traceback.format_exc(), "kind": "crash"}


def main() -> None:
    """Serve one line until it is closed."""
    descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
    tty.setraw(descriptor, termios.TCSANOW)
    with os.fdopen(descriptor, "r+b", buffering=0) as link:
        link.write(b'{"ok": "ready"}\n')
        pending = b""
        while data := link.read(4096):
            pending += data
            while b"\n" in pending:
                line, pending = pending.split(b"\n", 1)
                link.write(json.dumps(answer(line)).encode() + b"\n")


if __name__ == "__main__":
    main()
