"""A pool: made, opened, looked at, closed."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool import reports
from kvpool.arguments import numbers, seconds, whole
from kvpool.bindings import MODES, Core, core, ffi, lib, loaded
from kvpool.bindings.errors import (
    Busy,
    Exists,
    Foreign,
    InvalidArgument,
    NoSpace,
    NotFound,
    OutOfRange,
    PermissionDenied,
    Truncated,
    Unqualified,
)
from kvpool.bindings.views import class_array, class_torch, mapping_array
from kvpool.devices import free_dax
from kvpool.fencing import Answers, Fence
from kvpool.handles import Hit, Rows, shelves
from kvpool.namespace import Namespace
from kvpool.sizes import parse_size
from kvpool.stock import Stock

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from kvpool.keys import Identity

__all__ = ["POLICIES", "Pool", "create", "open", "remove"]

POLICIES = ("leaf", "lru", "fifo", "lfu")
BLOCK_BYTES_MIN, BLOCK_BYTES_MAX, BLOCK_BYTES_STEP = 4 << 10, 16 << 20, 64
_POPULATE_STEP = 256 << 20
LEASE_S_MAX = 4e6
Progress = Callable[[int, int], None]


class Pool:
    """One worker's handle of a pool. A context manager; made by `create` or `open`.

    Thread-safe: calls release the interpreter lock and take the handle's own lock only while they compute. After fork()
    the child's copy raises `Forked`. Closing gives back pins and reservations; views stay readable, unprotected.
    """

    def __init__(self, core: Core, handle: Any) -> None:
        self.core = core
        """The C core of the pool's mode. For `kvpool.bindings`; not part of the API."""
        self.handle = handle
        """The C handle (cdata). For `kvpool.bindings`; not part of the API."""
        self.uri: str = core.ffi.string(core.lib.kvp_pool_uri(handle)).decode()
        """What another process opens."""
        self._info = reports.pool_info(core, handle)
        self._memory = mapping_array(core, handle, self._info["bytes"])
        self._arrays: dict[Any, NDArray[Any]] = {}
        self.shelves = [
            shelves(core, handle, number, Rows(self.tensor(number))) for number in range(len(self._info["classes"]))
        ]
        """Of each class, by the bits of a hit's size. For `Hit`."""
        self._answers = Answers()

    # ---- life ----

    def close(self) -> None:
        """Leave the pool: pins, reservations and the worker slot are given back. Idempotent. The pool itself stays."""
        self.core.check(self.core.lib.kvp_pool_leave(self.handle))

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Pool {self.uri} worker {self.worker}>"

    # ---- shape ----

    @property
    def info(self) -> dict[str, Any]:
        """What does not change: uuid, sizes, classes, policy, mode, workers, this worker's slot (`self`)."""
        return self._info

    @property
    def worker(self) -> int:
        """Slot of this handle."""
        return int(self._info["self"])

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes a block, per class."""
        return tuple(part["block_bytes"] for part in self._info["classes"])

    def _class(self, block_class: int) -> dict[str, Any]:
        classes: list[dict[str, Any]] = self._info["classes"]
        if not 0 <= whole("block_class", block_class, -1 << 63) < len(classes):
            raise OutOfRange(f"class {block_class} does not exist: the pool has {len(classes)}")
        return classes[block_class]

    # ---- memory ----

    def writable(
        self, block_class: int, dtype: DTypeLike = np.uint8, shape: tuple[int, ...] | None = None
    ) -> NDArray[Any]:
        """As `tensor`, but writable: for the holder of a reservation, and for nobody else's blocks."""
        name = block_class, dtype, shape and tuple(shape)
        array = self._arrays.get(name)
        if array is None:
            part = self._class(block_class)
            array = class_array(
                self._memory, self._info["payload_offset"], part["block_bytes"], part["blocks"], dtype, shape
            )
            self._arrays[name] = array
        return array

    def tensor(
        self, block_class: int = 0, dtype: DTypeLike = np.uint8, shape: tuple[int, ...] | None = None
    ) -> NDArray[Any]:
        """All blocks of a class as one read-only array [blocks, *shape] over the pool's memory, by block number.

        `shape` defaults to one axis as long as a block. No copy; keeps the mapping alive; supports the buffer protocol
        and DLPack. Raises `InvalidArgument` if dtype and shape need more than a block, `OutOfRange`.
        """
        name = block_class, dtype, shape and tuple(shape), "read-only"
        array = self._arrays.get(name)
        if array is None:
            array = self.writable(block_class, dtype, shape).view()
            array.flags.writeable = False
            self._arrays[name] = array
        return array

    def torch(self, block_class: int = 0, dtype: DTypeLike = np.uint8, shape: tuple[int, ...] | None = None) -> Any:
        """As `tensor`, as a torch tensor (which cannot be read-only). Raises ImportError without torch."""
        return class_torch(self.writable(block_class, dtype, shape))

    # ---- blocks ----

    def namespace(self, identity: Identity, tenant: str = "", block_class: int = 0) -> Namespace:
        """The view of one identity and tenant, with blocks of one class."""
        self._class(block_class)
        return Namespace(self, identity, tenant, block_class)

    def pin(self, refs: Sequence[int] | NDArray[np.uint64]) -> Hit:
        """Pin blocks by reference (from `Hit.refs`, also another process's): all of them, until the Hit is released.

        Raises `Stale` if one was freed or reused since, `OutOfRange` if one names no block of this pool, `NoPins`;
        `InvalidArgument` if they are of several classes. Then none is pinned.
        """
        wanted = numbers("references", refs)
        classes = set(((wanted & np.uint64(0xFFFFFFFF)) >> np.uint64(29)).ravel().tolist())
        if len(classes) > 1 or wanted.ndim != 1:
            raise InvalidArgument("references of one call are one row, of one block class")
        block_class = classes.pop() if classes else 0
        self._class(block_class)
        hit = Hit.empty(self, block_class, len(wanted))
        pointer = ffi.from_buffer("uint64_t[]", wanted)
        return hit.hold(self.core.check(self.core.lib.kvp_hold_pin(hit.held, pointer, len(wanted))))

    def stock(self, block_class: int = 0) -> Stock:
        """Blocks by number, for an engine whose cache is this pool: see `Stock`."""
        self._class(block_class)
        return Stock(self, block_class)

    def evict(self, count: int, block_class: int = 0) -> int:
        """Evict up to `count` blocks of a class in policy order and free them. Returns how many could be."""
        self._class(block_class)
        most = min(whole("count", count), 0xFFFFFFFF)
        return self.core.check(self.core.lib.kvp_shrink(self.handle, block_class, most))

    # ---- hosts ----

    @property
    def host(self) -> int:
        """Number of the host that this process runs on; 0 where a pool has one."""
        return int(self._info["host"])

    def hosts(self) -> list[dict[str, Any]]:
        """Every host as this one sees it: `state` (free, present, lapsed, fenced, left), `incarnation`, `silent_ms`,
        `segments` owned, `wanted`.

        Silence is measured on this host's monotonic clock; a lease lapses after `info["lease_ms"]` of it.
        """
        return reports.pool_hosts(self.core, self.handle, self._info["hosts"])

    def follow(self) -> int:
        """Take notice of the other hosts now instead of at the next tick (100 ms): their logs, beats and offers.

        Returns how many records were applied. Lookups do this themselves when they miss.
        """
        return self.core.check(self.core.lib.kvp_pool_follow(self.handle))

    def give(self, host: int, segments: int = 1) -> int:
        """Offer up to `segments` of this host's segments to another: free ones, else the idlest, emptied.

        The other takes them at its next tick. Returns how many were offered: fewer where pins or reservations keep
        segments from being emptied. Raises `OutOfRange`.
        """
        which, many = whole("host", host, 0, 0xFFFF), whole("segments", segments, 0, 0xFFFFFFFF)
        return self.core.check(self.core.lib.kvp_pool_give(self.handle, which, many))

    def revoke(self) -> int:
        """Take back offers that nobody has taken. Returns how many segments are ours again."""
        return self.core.check(self.core.lib.kvp_pool_revoke(self.handle))

    def fence(self, host: int, incarnation: int) -> int:
        """The site's power or fabric control has *confirmed* that this incarnation of a host was reset, and names us.

        Its segments become this host's, with all that was published in them; its pins end. Never call it on a guess: a
        host that is alive would go on writing. Idempotent. Returns how many segments were adopted. Raises `OutOfRange`,
        `Busy` while the host's beat changes, `InvalidArgument` for another incarnation than the one that is there.
        """
        which, life = whole("host", host, 0, 0xFFFF), whole("incarnation", incarnation, 0, 0xFFFFFFFF)
        return self.core.check(self.core.lib.kvp_pool_fence(self.handle, which, life))

    def tend(self, fence: Fence) -> int:
        """One step of looking after lost hosts: ask the site about each that has lapsed, adopt where it names us.

        `fence` is asked once for each incarnation, again only while it answers None or fails, or if the adopter that it
        named was lost in turn. Returns how many segments this host adopted. See `kvpool.fencing` for what the hook
        must keep; `Tender` calls this regularly. Raises what `fence` raises, but not that a host has come back.
        """
        self.follow()
        return self._answers.tend(self, fence)

    def line_counts(self) -> dict[str, int]:
        """Mode sim: what this process has done with cache lines of its host: loads, lines written back, and so on.

        Raises `InvalidArgument` in other modes.
        """
        raw = self.core.ffi.new("struct kvp_sim_counts *")
        self.core.check(self.core.lib.kvp_pool_line_counts(self.handle, raw))
        return {name: int(getattr(raw, name)) for name, _ in self.core.ffi.typeof("struct kvp_sim_counts").fields}

    # ---- observation ----

    def stats(self) -> dict[str, Any]:
        """Plain numbers: shape, blocks per state and class, counters over all workers, huge-page bytes, each worker.

        Walks the words of all blocks (a million in about a millisecond); takes no lock.
        """
        stats = reports.pool_stats(self.core, self.handle, self.uri)
        stats["huge_bytes"] = huge_bytes(int(self.core.ffi.cast("uintptr_t", self.core.lib.kvp_pool_base(self.handle))))
        return stats

    def events(self) -> reports.EventStream:
        """A stream over the workers' logs, from the oldest events that are kept."""
        return reports.EventStream(self)

    def check(self) -> reports.CheckReport:
        """Walk every structure and name the first broken invariant. Safe while others use the pool."""
        return reports.pool_check(self.core, self.handle)


def huge_bytes(base: int) -> int:
    """Bytes of the mapping at `base` that this process maps with huge pages, from /proc/self/smaps."""
    total, inside = 0, False
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if "-" in name.split(" ", 1)[0]:
                inside = int(name.split("-", 1)[0], 16) == base
            elif inside and name in ("ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb"):
                total += int(rest.split()[0]) << 10
    return total


# Leave, but do not unmap: daemon threads may still be reading views while the interpreter ends.
def _leave_all() -> None:
    for each in loaded():
        each.lib.kvp_leave_all()


atexit.register(_leave_all)


def _strides(block: int | str | Sequence[int | str]) -> list[int]:
    if not isinstance(block, int | str | list | tuple):
        raise InvalidArgument(f"block={block!r} is not a size, such as '128KiB', or a list of sizes")
    blocks = [block] if isinstance(block, int | str) else list(block)
    strides = [parse_size(each) for each in blocks]
    for stride in strides:
        if stride % BLOCK_BYTES_STEP or not BLOCK_BYTES_MIN <= stride <= BLOCK_BYTES_MAX:
            raise InvalidArgument(
                f"a block of {stride} bytes: block sizes are {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX} bytes in steps of "
                f"{BLOCK_BYTES_STEP}, such as {max(stride // 64 * 64, BLOCK_BYTES_MIN)}"
            )
    if not 1 <= len(strides) <= lib.KVP_CLASSES_MAX or len(set(strides)) != len(strides):
        raise InvalidArgument(f"a pool has 1 to {lib.KVP_CLASSES_MAX} different block sizes, not {strides}")
    return strides


def _populate(core: Core, handle: Any, threads: int, progress: Progress | None) -> None:
    """Back all memory in steps, each with so many threads of the C core; between steps it can be interrupted."""
    total = core.lib.kvp_pool_mapped(handle)
    for offset in range(0, total, _POPULATE_STEP):
        core.check(core.lib.kvp_pool_populate(handle, offset, _POPULATE_STEP, threads))
        if progress:
            progress(min(offset + _POPULATE_STEP, total), total)


def _demand_numbers(**numbers: tuple[int, int]) -> None:
    """Each is a value and the least that it may be."""
    for what, (value, least) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 0xFFFF:
            raise InvalidArgument(f"{what}={value!r} is not a number from {least} on")


def _demand_backing(threads: int | None, progress: Any) -> int:
    """How many threads back the memory."""
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress={progress!r} cannot be called")
    return min(8, os.cpu_count() or 1) if threads is None else whole("threads", threads, 1, 64)


def _demand_no_device(uri: str) -> None:
    if str(uri).startswith(("dax:", "file:")) and os.environ.get("KVPOOL_UNQUALIFIED") != "1":
        raise Unqualified(
            f"{uri}: a new pool on a device is not tested yet: make it with unqualified=True (as 'kvpool create' does) "
            "and run 'kvpool qualify' on it"
        )


def create(
    uri: str,
    size: int | str | None = None,
    block: int | str | Sequence[int | str] = "128KiB",
    *,
    blocks: int | None = None,
    policy: str = "leaf",
    workers: int = 64,
    mode: str | None = None,
    hosts: int = 1,
    host: int = 0,
    lease: float = 3.0,
    quota: int = 0,
    unqualified: bool = False,
    replace: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Pool:
    """Make a pool and open it. All memory is backed before this returns.

    `uri`: sim:NAME (simulated hosts), shm:NAME, file:PATH, memfd:, hugetlb:2MiB or dax:/dev/daxX.Y, with ?mode=0660,
    ?node=N, ?interleave=0,1, ?hugepage=2M (2 MiB pages or an error); dax:auto takes the first devdax that is free.
    `size`: of everything, in bytes or as "4GiB"; or `blocks`: exactly so many, of one size. `block`: bytes a block, 4
    KiB to 16 MiB in steps of 64; several sizes make several classes. `policy`: leaf (least recently used, tail of a
    chain first), lru, fifo, lfu. `workers`: handles that may be open at once on each host, 1 to 64.

    `mode`: "coherent" (default: one machine, or hardware that keeps hosts coherent), "noncoherent" (hosts over memory
    that nothing keeps coherent), "sim" (default for sim:). With the latter two `hosts`, 1 to 64, share the pool, each
    with an equal part of its memory; `host` is this one. A host that is silent for `lease` seconds has lapsed. `quota`:
    segments that a host may own at most (0: no limit). On a device (dax:, file:) mode noncoherent needs
    `unqualified=True` (or KVPOOL_UNQUALIFIED=1): nobody can have tested a pool that is only being made.

    `replace`: remove a pool of this name that no live worker uses. `threads` back the memory (default: one per
    processor, at most 8); `progress(done, total)` bytes is called after every step of it.

    Raises `InvalidArgument`, `Exists`, `Busy` (replace, but in use), `NoSpace` (with the missing byte count),
    `PermissionDenied`, `SystemFailure`, `Unqualified`. On any exception, KeyboardInterrupt included, nothing is
    left behind.
    """
    strides = _strides(block)
    chosen = core(mode or ("sim" if str(uri).startswith("sim:") else "coherent"))
    if chosen.mode == "noncoherent" and not unqualified:
        _demand_no_device(uri)
    if (size is None) == (blocks is None):
        raise InvalidArgument("give either size (of the whole pool) or blocks (an exact number)")
    if blocks is not None and (isinstance(blocks, bool) or not isinstance(blocks, int) or not 0 < blocks < 1 << 40):
        raise InvalidArgument(f"{blocks!r} is not a number of blocks")
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 64:
        raise InvalidArgument(f"a pool has 1 to 64 workers, not {workers!r}")
    if policy not in POLICIES:
        raise InvalidArgument(f"no policy {policy!r}: {', '.join(POLICIES)} exist")
    _demand_numbers(hosts=(hosts, 1), host=(host, 0), quota=(quota, 0))
    threads = _demand_backing(threads, progress)
    request = chosen.ffi.new("struct kvp_request *")
    request.hosts, request.host, request.quota = hosts, host, quota
    request.lease_ms = round(seconds("lease", lease, 0.001, LEASE_S_MAX) * 1000)
    request.bytes = 0 if size is None else parse_size(size)
    request.blocks, request.workers, request.classes = blocks or 0, workers, len(strides)
    request.stride = strides + [0] * (8 - len(strides))
    workers_at_it = threads or min(8, os.cpu_count() or 1)
    if _text(uri).split(b"?")[0] == b"dax:auto":
        return _make_on_free_dax(
            uri, request.bytes, lambda at: _make(chosen, at, request, policy, workers_at_it, progress)
        )
    if replace:
        _remove_if_there(uri)
    return _make(chosen, uri, request, policy, workers_at_it, progress)


def _make(core: Core, uri: str, request: Any, policy: str, threads: int, progress: Progress | None) -> Pool:
    out = core.ffi.new("kvp_pool **")
    try:
        core.check(core.lib.kvp_pool_prepare(_text(uri), request, policy.encode(), out))
        _populate(core, out[0], threads, progress)
        core.check(core.lib.kvp_pool_commit(out[0]))
        return _adopt(core, out)
    except BaseException:
        core.lib.kvp_pool_free(out[0])
        raise


def _make_on_free_dax(uri: str, size: int, make: Callable[[str], Pool]) -> Pool:
    """On the first device that is free. Whether it is, `make` says last: another machine may take it meanwhile."""
    free, reasons = free_dax(size)
    for device in free:
        try:
            return make(uri.replace("dax:auto", f"dax:{device.path}", 1))
        except (Busy, Exists, Foreign, NoSpace, NotFound, PermissionDenied) as error:
            reasons[device.name] = str(error)
    told = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    raise NotFound(f"dax:auto: no device is free: {told}")


def _adopt(core: Core, out: Any) -> Pool:
    """From here on the garbage collector owns the C handle."""
    handle = core.ffi.gc(out[0], core.lib.kvp_pool_free)
    out[0] = core.ffi.NULL
    return Pool(core, handle)


def core_of(uri: str) -> Core:
    """The core that a pool was made for. Raises what `open` raises for a URI that leads nowhere."""
    if str(uri).startswith("sim:"):
        return core("sim")
    reader = core("coherent")
    return core(MODES[reader.check(reader.lib.kvp_pool_mode(_text(uri)))])


def host_here(uri: str) -> int:
    """Which host to be in order to look at a pool from this machine: one that has a live worker here, else one whose
    memory is here, else 0. So that looking neither wakes a lost host nor claims another machine's number.
    """
    chosen = core_of(uri)
    return chosen.check(chosen.lib.kvp_pool_here(_text(uri)))


def _text(uri: str) -> bytes:
    if not isinstance(uri, str) or "\0" in uri:
        raise InvalidArgument(
            f"{uri!r} is not a pool URI: shm:NAME, file:PATH, memfd:, hugetlb:2MiB or dax:/dev/daxX.Y"
        )
    return os.fsencode(uri)


def _remove_if_there(uri: str) -> None:
    try:
        remove(uri)
    except NotFound:
        pass
    except InvalidArgument:
        if not uri.startswith(("memfd:", "hugetlb:")):
            raise


def open(uri: str, *, host: int | None = None, mode: str | None = None, unqualified: bool = False) -> Pool:
    """Open a pool that exists, as a new worker.

    `host`: which host of the pool this machine is (default: the environment variable KVPOOL_HOST, else 0). `mode`
    insists on one; by default it is what the pool was made for. The first process of a host starts it, and may wait for
    one lease to learn whether the identity is free.

    In mode noncoherent a device (dax:, file:) must have been qualified (`kvpool qualify`), unless `unqualified`
    takes it as it is, or KVPOOL_UNQUALIFIED=1. shm: and memfd: are memory of one machine and need no qualification.

    Raises `NotFound`, `PermissionDenied`, `NoSlot`; for the image `NotReady`, `Foreign`, `VersionMismatch`,
    `LayoutMismatch`, `WrongMode`, `Corrupt`, `Truncated`, `Replaced`; `WrongHost` for an identity that does not exist
    or is another machine's; `Unqualified`; `InvalidArgument` for the URI.
    """
    number = os.environ.get("KVPOOL_HOST", "0") if host is None else host
    if isinstance(number, str):
        try:
            number = int(number)
        except ValueError as error:
            raise InvalidArgument(f"host {number!r} (of KVPOOL_HOST) is not the number of a host") from error
    number = whole("host", number, -1 << 63)
    chosen = core(mode) if mode else core_of(uri)
    if number and chosen.mode == "coherent" and host is None:
        number = 0
    out = chosen.ffi.new("kvp_pool **")
    try:
        which = number if 0 <= number <= 0xFFFF else 0xFFFFFFFF
        flags = chosen.lib.KVP_OPEN_UNQUALIFIED if unqualified else 0
        chosen.check(chosen.lib.kvp_pool_open_with(_text(uri), which, flags, out))
        return _adopt(chosen, out)
    except BaseException:
        chosen.lib.kvp_pool_free(out[0])
        raise


def remove(uri: str, *, force: bool = False) -> None:
    """Remove a pool for good: its name goes, and handles that are open raise `Replaced` from then on.

    Raises `Busy` while live workers (with many hosts: hosts whose beat changes) use it, unless `force`; `NotFound`;
    `Foreign` for a file that is no pool, unless `force`; `InvalidArgument` for memfd: and hugetlb:, which go with their
    last user.
    """
    try:
        chosen = core_of(uri)
    except Truncated:
        chosen = core("coherent")
    chosen.check(chosen.lib.kvp_pool_remove(_text(uri), force))
