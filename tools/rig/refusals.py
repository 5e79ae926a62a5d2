"""What must be refused on a device, with an error that says what to do: on guests that share a soft-reserved device."""

from __future__ import annotations

import json
from typing import Any

from kvpool.tools.rig.devices import MIB
from kvpool.tools.rig.guest import Guest, boot
from kvpool.tools.rig.shared import BLOCK, CHAIN, POOL, URI, Note, Rack, demand, whole

__all__ = ["cxl_region_gone", "device_gone", "one_maker", "other_content", "system_modes", "too_small"]

ROUNDS = 3
MADE: dict[str, Any] = {
    "size": POOL,
    "block": BLOCK,
    "workers": 4,
    "mode": "noncoherent",
    "hosts": 3,
    "lease": 4.0,
    "unqualified": True,
}
VERSION_AT, EXT4_AT = 8, 0x438
# A worker that has the pool open while its device is taken away, and then uses it.
VICTIM = """python3 -P -c '
import os, time
import kvpool
pool = kvpool.open("{uri}", host=0, unqualified=True)
print("open", flush=True)
while not os.path.exists("/tmp/gone"): time.sleep(0.1)
print("sum", int(pool.tensor().sum()), flush=True)
' >/tmp/victim 2>&1 & victim=$!
for i in $(seq 900); do grep -q open /tmp/victim && break; sleep 0.1; done
timeout 60 daxctl disable-device -f dax0.0 2>&1; echo "daxctl $?"
[ -e /sys/bus/dax/devices/dax0.0/driver ] && echo bound || echo unbound
touch /tmp/gone
for i in $(seq 900); do kill -0 $victim 2>/dev/null || break; sleep 0.1; done
kill -0 $victim 2>/dev/null && echo "ended never" || {{ wait $victim; echo "ended $?"; }}
"""


def refused(guest: Guest, kind: str, says: str, do: str, uri: str = URI, **options: Any) -> None:
    """A call must end in that error, and its text must say something."""
    got, text = guest.refusal(do, uri=uri, options=options)
    demand(got == kind and says in text, f"{do} {options} was to end in {kind} that says {says!r}", got, text)


def one_maker(rack: Rack, note: Note) -> None:
    """Two hosts make a pool at once: exactly one has it, and the other is told."""
    for _ in range(ROUNDS):
        rack.a.ask("clear", uri=URI)
        for host, guest in enumerate((rack.a, rack.b)):
            guest.send("create", uri=URI, options=MADE | {"host": host})
        answers = [guest.receive() for guest in (rack.a, rack.b)]
        made = ["ok" in answer for answer in answers]
        kinds = [answer.get("kind") for answer in answers]
        demand(sum(made) == 1, "of two hosts that make a pool one has it", answers)
        demand(set(kinds) <= {None, "Busy", "Exists"}, "the other one is told why", answers)
        winner = rack.a if made[0] else rack.b
        demand(winner.ask("publish", number=7, count=CHAIN) == CHAIN, "the winner's pool")
        winner.ask("close")
    note(f"two hosts make a pool at once, {ROUNDS} times: exactly one has it")


def too_small(rack: Rack, note: Note) -> None:
    """Sizes that do not fit: the device's, another pool's, another host's device."""
    a = rack.a
    a.ask("clear", uri=URI)
    rack.b.kill()
    small = rack.start(1, 32 * MIB)  # it boots meanwhile
    refused(a, "NoSpace", "missing", "create", **MADE | {"size": 1 << 30, "host": 0})
    a.ask("create", uri=URI, options=MADE | {"host": 0})
    a.ask("publish", number=8, count=CHAIN)
    refused(a, "Exists", "kvpool rm", "create", **MADE | {"size": 4 * MIB, "host": 0})
    refused(a, "Exists", "kvpool rm", "create", size=4 * MIB, block=BLOCK)
    refused(a, "NotFound", "holds a pool", "create", uri="dax:auto", **MADE | {"host": 0})
    boot(small)
    refused(small, "Truncated", "", "open", host=1, unqualified=True)
    demand(whole(a.ask("verify", number=8, count=CHAIN)), "the pool that all of this was about")
    a.ask("close")
    note("refused: a pool larger than the device, over a larger pool, over one of another mode, on a smaller device")
    small.ask("clear", uri=URI)
    small.ask("create", uri=URI, options=MADE | {"size": 24 * MIB, "host": 0})
    small.ask("publish", number=8, count=CHAIN)
    a.ask("open", uri=URI, options={"host": 1, "unqualified": True})
    demand(whole(a.ask("verify", number=8, count=CHAIN)), "a pool of a smaller device on a larger one")
    for guest in (a, small):
        guest.ask("close")
    note("a pool that was made where the device is smaller opens where it is larger")


def other_content(rack: Rack, note: Note) -> None:
    """A file system, a pool of another version, bytes that nobody knows."""
    a = rack.a
    rack.memory.write(VERSION_AT, (1).to_bytes(8, "little"))
    refused(a, "VersionMismatch", "", "open", host=0, unqualified=True)
    refused(a, "Exists", "another version", "create", **MADE | {"host": 0})
    a.ask("clear", uri=URI)
    rack.memory.write(EXT4_AT, b"\x53\xef")
    refused(a, "Foreign", "ext4", "create", **MADE | {"host": 0})
    refused(a, "NotFound", "holds something", "create", uri="dax:auto", **MADE | {"host": 0})
    demand(rack.memory.read(EXT4_AT, 2) == b"\x53\xef", "the file system was touched")
    a.ask("clear", uri=URI)
    demand(not any(rack.memory.read(EXT4_AT, 2)), "rm --force has not cleared the mark")
    rack.memory.write(8192, b"somebody's")
    refused(a, "NotFound", "no pool", "create", uri="dax:auto", **MADE | {"host": 0})
    rack.memory.write(4096, b"\xa5" * MIB)
    a.ask("create", uri=URI, options=MADE | {"host": 0})
    demand(a.ask("check")["clean"], "a pool on memory full of old bytes")
    a.ask("clear", uri=URI)
    a.ask("create", uri="dax:auto", options=MADE | {"host": 0})
    demand(a.ask("publish", number=9, count=CHAIN) == CHAIN, "the pool that dax:auto made")
    a.ask("close")
    note("refused: a file system, another version, unknown bytes; dax:auto takes the device once it is free")


def seen_by_doctor(guest: Guest) -> dict[str, str]:
    """Name and mode of each dax device."""
    return {device["name"]: device["mode"] for device in json.loads(guest.kvpool("doctor", "--json"))["dax"]}


def system_modes(rack: Rack, note: Note) -> None:
    """System RAM, disabled, and gone while it is used."""
    a = rack.a
    a.run("daxctl disable-device dax0.0")
    refused(a, "NotFound", "daxctl reconfigure-device", "open", host=0)
    demand(seen_by_doctor(a) == {"dax0.0": "disabled"}, "kvpool doctor", seen_by_doctor(a))
    a.run("modprobe kmem; daxctl reconfigure-device -m system-ram --no-online --force dax0.0")
    refused(a, "NotFound", "system-ram", "create", **MADE | {"host": 0})
    demand(seen_by_doctor(a) == {"dax0.0": "system-ram"}, "kvpool doctor", seen_by_doctor(a))
    a.run("daxctl reconfigure-device -m devdax --force dax0.0")
    a.ask("open", uri=URI, options={"host": 0, "unqualified": True})
    demand(whole(a.ask("verify", number=9, count=CHAIN)), "the pool, once its device is back")
    a.ask("close")
    note("refused: a device that is disabled, or system RAM; back as a device it has its pool")


def device_gone(rack: Rack, note: Note) -> None:
    """A device is taken away under a worker: that one ends, or keeps it; the next is told."""
    told = rack.a.run(VICTIM.format(uri=URI)).strip().splitlines()
    kept = "bound" in told and told[-1] == "ended 0"
    demand(kept or told[-1] in ("ended 135", "ended 1"), "a worker whose device goes", told)
    rack.a.run("daxctl disable-device dax0.0 || [ ! -e /sys/bus/dax/devices/dax0.0/driver ]")
    refused(rack.a, "NotFound", "kvpool doctor", "open", host=0)
    how = "the kernel keeps it until that one leaves" if kept else f"that one ends ({told[-1]})"
    note(f"a device taken away under a worker: {how}; the next is told")


def cxl_region_gone(rack: Rack, note: Note) -> None:
    """A region that was disabled: there is no device any more."""
    a = rack.a
    a.ask("close")
    a.run("daxctl disable-device dax0.0; cxl disable-region --force region0")
    refused(a, "NotFound", "region", "open", host=0)
    found = json.loads(a.kvpool("doctor", "--json"))
    demand(not found["dax"] and found["cxl"]["memories"] == 1, "kvpool doctor", found)
    demand(any("region0 is disabled" in line or "behind it" in line for line in found["advice"]), "its advice", found)
    note("refused: a region without backing")
