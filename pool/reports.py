"""What a pool says of itself: checks, events, statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.bindings import Core, lib

if TYPE_CHECKING:
    from kvpool.pool import Pool

__all__ = ["CheckReport", "Event", "EventStream", "pool_stats"]

COUNTERS = (
    "lookups",
    "hits",
    "published",
    "duplicates",
    "evicted",
    "removed",
    "bytes_in",
    "bytes_out",
    "pinned",
    "full",
    "recoveries",
    "recovered",
    "unindexed",
    "stale",
    "spared",
    "segments_moved",
    "recovery_ns",
    "replayed",
    "rescans",
    "doubted",
    "segments_handed_over",
)
STATES = ("absent", "free", "cached", "reserved", "live", "evicting")
KINDS = ("published", "evicted", "removed", "recovered", "remove_asked", "started", "used")
WORKER_STATES = ("free", "alive", "dead")
assert len(COUNTERS) == lib.KVP_COUNTS
assert len(STATES) == lib.KVP_STATES
assert len(KINDS) == lib.KVP_EVENT_USED + 1


@dataclass(frozen=True)
class CheckReport:
    """Result of walking every structure of a pool (`enum`-free: plain numbers and sentences)."""

    clean: bool
    """No invariant is broken."""
    problems: list[str]
    """The first broken invariant, and how many more there are."""
    blocks: dict[str, int]
    """Blocks per state, over all classes."""
    leaked: int
    """Blocks owned by no live worker (0 after recovery)."""
    pins: int
    """Pin slots in use, over all workers."""
    unlinked: int
    """Readable blocks whose key was removed while they were pinned: reused next."""
    entries: int
    """Entries of the prefix directory."""

    def __bool__(self) -> bool:
        return self.clean


def pool_check(core: Core, handle: Any) -> CheckReport:
    """Walk the pool. Safe while others use it: what live workers are in the middle of is not reported."""
    raw = core.ffi.new("struct kvp_check *")
    core.check(core.lib.kvp_pool_check(handle, raw))
    problems = [core.ffi.string(raw.first).decode(errors="replace")] if raw.problems else []
    if raw.problems > 1:
        problems.append(f"and {raw.problems - 1} more")
    return CheckReport(
        clean=raw.problems == 0,
        problems=problems,
        blocks={name: raw.states[i] for i, name in enumerate(STATES)},
        leaked=raw.leaked,
        pins=raw.pins,
        unlinked=raw.unlinked,
        entries=raw.entries,
    )


class Event(NamedTuple):
    """What happened to a key, or which worker was recovered."""

    kind: str
    """"published", "evicted", "removed", "recovered"; with many hosts also "remove_asked" (of another host's block),
    "started" (a host) and "used" (a sample of the uses of other hosts' blocks)."""
    worker: int
    """Slot of the worker that did it; with many hosts host x workers + slot."""
    sequence: int
    """Counts the worker's events from 1; order between workers is not recorded."""
    key: bytes
    """16 bytes; zeros for "recovered" and "started"."""
    ref: int
    """Reference of the publication; for "recovered" the slot of the dead worker."""


@dataclass
class EventStream:
    """Reads the workers' logs from where it stands. Not thread-safe; any number of streams may read.

    `lost` counts events that were overwritten before this stream read them: poll more often, or rebuild from the pool.
    """

    pool: Pool
    positions: dict[int, int] = field(default_factory=dict)
    lost: int = 0

    def poll(self, most: int = 4096) -> list[Event]:
        """Events since the last poll, per worker in order; at most about `most` per worker."""
        events: list[Event] = []
        core = self.pool.core
        raw = core.ffi.new("struct kvp_event[]", most)
        position, lost = core.ffi.new("uint64_t *"), core.ffi.new("uint64_t *")
        for worker in range(self.pool.info["workers"] * self.pool.info["hosts"]):
            position[0], lost[0] = self.positions.get(worker, 0), 0
            count = core.check(core.lib.kvp_events(self.pool.handle, worker, position, raw, most, lost))
            self.positions[worker] = position[0]
            self.lost += lost[0]
            events += [
                Event(KINDS[raw[i].kind], worker, raw[i].sequence, bytes(core.ffi.buffer(raw[i].key)), raw[i].ref)
                for i in range(count)
                if raw[i].kind < len(KINDS)
            ]
        return events


def pool_info(core: Core, handle: Any) -> dict[str, Any]:
    """What does not change during the life of a pool, and the segments each class holds."""
    ffi = core.ffi
    raw = ffi.new("struct kvp_info *")
    core.check(core.lib.kvp_pool_info(handle, raw))
    info = {
        name: getattr(raw, name)
        for name in (
            "incarnation",
            "bytes",
            "metadata_bytes",
            "payload_offset",
            "payload_bytes",
            "created_ns",
            "segments",
            "segment_bytes",
            "pin_slots",
            "log_records",
            "workers",
            "self",
            "hosts",
            "host",
            "owned",
            "lease_ms",
            "quota",
        )
    }
    info["uuid"] = bytes(raw.uuid).hex()
    info["policy"] = ffi.string(raw.policy).decode()
    info["mode"] = ffi.string(raw.mode).decode()
    info["classes"] = [
        {"block_bytes": raw.stride[i], "blocks": raw.blocks[i], "segments": raw.held[i]} for i in range(raw.classes)
    ]
    return info


LITMUSES = ("store", "stream", "pin", "copy", "record", "stale")
assert len(LITMUSES) == lib.KVP_LITMUSES


def pool_qualification(core: Core, handle: Any) -> dict[str, Any] | None:
    """What a qualification has recorded: when, where, by which hosts, which tests passed; None if nothing is."""
    raw = core.ffi.new("struct kvp_qualification *")
    if not core.check(core.lib.kvp_pool_qualification(handle, raw)):
        return None
    texts = {
        name: core.ffi.string(getattr(raw, name)).decode(errors="replace")
        for name in ("cpu", "instructions", "device", "features")
    }
    return {
        "when_ns": raw.when_ns,
        "hosts": [host for host in range(64) if raw.hosts >> host & 1],
        "tests": [name for i, name in enumerate(LITMUSES) if raw.tests >> i & 1],
        "rounds": raw.rounds,
        "stale": raw.stale,
        "line_bytes": raw.line_bytes,
        **texts,
    }


HOST_STATES = ("free", "present", "lapsed", "fenced", "left")


def pool_hosts(core: Core, handle: Any, count: int) -> list[dict[str, Any]]:
    """Every host of the pool as this one sees it: state, incarnation, silence, segments owned and asked for."""
    hosts = []
    raw = core.ffi.new("struct kvp_host_info *")
    for number in range(count):
        core.check(core.lib.kvp_pool_host(handle, number, raw))
        hosts.append(
            {
                "host": number,
                "state": HOST_STATES[raw.state],
                "incarnation": raw.incarnation,
                "fenced": raw.fenced,
                "silent_ms": raw.silent_ms,
                "segments": raw.segments,
                "wanted": raw.wanted,
            }
        )
    return hosts


def process_name(pid: int) -> str | None:
    """The command of a process, or None if it is gone or not to be seen from here (another PID namespace)."""
    import psutil  # on demand: importing it takes longer than all of this package

    try:
        return str(psutil.Process(pid).name())
    except (psutil.Error, ValueError):
        return None


def pool_workers(core: Core, handle: Any, slots: int) -> list[dict[str, Any]]:
    """Every slot that was ever used: state, pid and command of the process, incarnation, join time, counters."""
    workers = []
    raw = core.ffi.new("struct kvp_worker_info *")
    for slot in range(slots):
        core.check(core.lib.kvp_pool_worker(handle, slot, raw))
        if raw.incarnation == 0:
            continue
        counters = {name: raw.counter[i] for i, name in enumerate(COUNTERS)}
        workers.append(
            {
                "slot": slot,
                "state": WORKER_STATES[raw.state],
                "pid": raw.pid,
                "command": process_name(raw.pid) if raw.state == 1 else None,
                "incarnation": raw.incarnation,
                "joined_ns": raw.joined_ns,
                **counters,
            }
        )
    return workers


def pool_stats(core: Core, handle: Any, uri: str) -> dict[str, Any]:
    """Everything countable, as plain numbers: shape, occupancy per class, counters summed over workers, workers."""
    stats = {"uri": uri, **pool_info(core, handle), "qualification": pool_qualification(core, handle)}
    states = core.ffi.new("uint64_t[64]")
    core.check(core.lib.kvp_pool_states(handle, states))
    for i, part in enumerate(stats["classes"]):
        part |= {name: states[i * 8 + j] for j, name in enumerate(STATES)}
    workers = pool_workers(core, handle, stats["workers"])
    totals = {name: sum(worker[name] for worker in workers) for name in COUNTERS}
    stats |= totals
    stats["hit_ratio"] = totals["hits"] / totals["lookups"] if totals["lookups"] else 0.0
    stats["worker_list"] = workers
    return stats
