"""The pool on a device that two guests share: (a) and (b)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvpool.tools.rig.devices import DAX, MIB
from kvpool.tools.rig.guest import Failed, Guest, Machine, Memory, Shape, boot

__all__ = [
    "BLOCK", "CHAIN", "POOL", "URI", "Note", "Rack", "atomics_fail", "atomics_hold", "demand", "run", "whole",
]  # fmt: skip

URI = f"dax:{DAX}"
SIZE, POOL, BLOCK = 256 * MIB, 48 * MIB, 64 << 10
CHAIN = 12
COUNTS, ATTEMPTS = 100_000, 5
Sketch = Callable[[Memory, int, int], Shape]
"""A guest by its device's memory, how much of it, and its host."""
Note = Callable[[str], None]
"""Called with what was shown, when it was."""


def demand(holds: bool, what: str, *seen: Any) -> None:
    """Fail with what was seen unless it holds."""
    if not holds:
        raise Failed(f"{what}: {', '.join(map(repr, seen))}")


def whole(answer: dict[str, int], blocks: int = CHAIN) -> bool:
    """Were all blocks found, with all their bytes?"""
    return answer == {"found": blocks, "right": blocks}


class Rack:
    """Two guests on one memory, as hosts 0 and 1 of a pool for three; the third is the machine below."""

    def __init__(self, machine: Machine, name: str, shape: Sketch, stack: ExitStack) -> None:
        self.machine, self.name, self.shape = machine, name, shape
        self.memory = stack.enter_context(Memory(name, SIZE))
        self.stack = stack
        self.a, self.b = self.start(0), self.start(1)
        boot(self.a, self.b)

    def start(self, host: int, size: int = SIZE) -> Guest:
        """A guest, which still boots; it sees so much of the memory."""
        guest = Guest(self.machine, f"{self.name}{host}", self.shape(self.memory, size, host))
        self.stack.callback(guest.kill)
        return guest

    def below(self, *arguments: str, code: int = 0) -> str:
        """The command `kvpool` on the machine below, on the guests' memory."""
        command = [sys.executable, "-P", "-m", "kvpool.tools.main", arguments[0], self.memory.uri, *arguments[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        demand(done.returncode == code, f"kvpool {arguments[0]} below the guests", done.stdout + done.stderr)
        return done.stdout


def shared_pool(rack: Rack, note: Note) -> None:
    """Create, open, publish and match, both ways at once."""
    a, b = rack.a, rack.b
    made = {"size": POOL, "block": BLOCK, "workers": 4, "mode": "noncoherent", "hosts": 3, "host": 0, "lease": 4.0}
    a.ask("create", uri=URI, options=made | {"unqualified": True})
    kind, text = b.refusal("open", uri=URI, options={"host": 1})
    demand(kind == "Unqualified", "an unqualified device was opened", kind, text)
    b.ask("open", uri=URI, options={"host": 1, "unqualified": True})
    demand(a.ask("publish", number=1, count=CHAIN) == CHAIN, "not all was published")
    demand(whole(b.ask("verify", number=1, count=CHAIN)), "what one guest published is not right in the other")
    note("created in one guest, opened in the other, published and matched")
    a.send("converse", mine=100, theirs=200, rounds=20, count=6)
    b.send("converse", mine=200, theirs=100, rounds=20, count=6)
    for answer in (a.result(), b.result()):
        demand(whole(answer, 120), "publishing both ways at once", answer)
    note("240 blocks both ways at once, every byte right")


def qualify(rack: Rack, rounds: int, note: Note) -> None:
    """The litmus tests between the guests; afterwards the device is opened without a word."""
    arguments = ["qualify", URI, "--hosts", "0,1", "--rounds", str(rounds), "--patience", "600", "--json"]
    for host, guest in enumerate((rack.a, rack.b)):
        guest.send("command", arguments=[*arguments, "--host", str(host)])
    for guest in (rack.a, rack.b):
        done = guest.result()
        demand(done["code"] == 0, "the device is not qualified", done["out"] + done["err"])
        result = json.loads(done["out"])
    demand(result["qualified"], "the device is not qualified", result)
    rack.b.ask("close")
    rack.b.ask("open", uri=URI, options={"host": 1})
    note(f"noncoherent qualified: {rounds} rounds of each litmus, {result['stale']} stale reads")


def lost_host(rack: Rack, note: Note) -> None:
    """One guest is killed with blocks pinned and reserved; the other adopts; the killed one comes back."""
    a, b = rack.a, rack.b
    a.ask("publish", number=2, count=CHAIN)
    demand(a.ask("hold", number=2, count=CHAIN) == CHAIN, "not all was pinned")
    demand(whole(b.ask("verify", number=2, count=CHAIN)), "the chain that the killed host will leave")
    before = b.ask("hosts")[0]
    a.kill()
    rack.a = a = rack.start(0)  # it boots while the other one adopts
    demand(whole(b.ask("verify", number=2, count=CHAIN)), "what a killed host had published is gone")
    adopted = b.ask("fence", host=0, incarnation=before["incarnation"])
    demand(adopted == before["segments"], "segments adopted", adopted, before)
    demand(whole(b.ask("verify", number=2, count=CHAIN)), "what was adopted is not right")
    report = b.ask("check")
    demand(report["clean"] and report["leaked"] == 0, "after an adoption", report)
    note(f"one guest killed, its {adopted} segments adopted after the fence, all it had published still right")
    boot(a)
    a.ask("open", uri=URI, options={"host": 0})
    rows = a.ask("hosts")
    demand(rows[0]["incarnation"] == before["incarnation"] + 1, "the host that came back", rows)
    demand(whole(a.ask("verify", number=2, count=CHAIN)), "the host that came back does not find its former blocks")
    b.ask("publish", number=3, count=CHAIN)
    demand(whole(a.ask("verify", number=3, count=CHAIN)), "the host that came back does not see new blocks")
    b.send("command", arguments=["give", URI, "--host", "1", "--to", "0", "-n", "2", "--json"])
    demand(b.result()["code"] == 0, "giving segments to the host that came back")
    a.ask("publish", number=4, count=CHAIN)
    demand(whole(b.ask("verify", number=4, count=CHAIN)), "the host that came back cannot publish")
    note("rebooted, rejoined under a new incarnation, publishes again")


def check_from_all(rack: Rack, note: Note) -> None:
    """`check` in each guest and below them."""
    for guest in (rack.a, rack.b):
        report = guest.ask("check")
        demand(report["clean"], "kvpool check in a guest", report)
    known_here = Path(f"/dev/shm/kvpool.{os.getuid()}.host.{rack.a.ask('info')['uuid']}.2")
    rack.stack.callback(known_here.unlink, missing_ok=True)  # what a host knows outlives its workers
    seen = json.loads(rack.below("check", "--host", "2", "--json"))
    demand(seen["clean"], "kvpool check below the guests", seen)
    note("check clean in both guests and on the backing memory below them")


def coherent_refused(rack: Rack, note: Note) -> None:
    """A pool of mode coherent is one machine's: the other guest may neither open it nor qualify it."""
    for guest in (rack.b, rack.a):
        guest.ask("close")
    rack.b.ask("clear", uri=URI)
    rack.a.ask("create", uri=URI, options={"size": POOL, "block": BLOCK, "workers": 4})
    rack.a.ask("publish", number=5, count=CHAIN)
    for guest in (rack.a, rack.b):
        text = guest.kvpool("qualify", URI, "--host", "0", code=1)
        demand("coherent" in text, "qualify of a pool of mode coherent", text)
    kind, text = rack.b.refusal("open", uri=URI, options={})
    demand(kind == "WrongHost", "a pool of mode coherent was opened by a second machine", kind, text)
    demand(whole(rack.a.ask("verify", number=5, count=CHAIN)), "the first machine after that")
    note("coherent refused: by qualify in both guests, and by open in the second")


def count_together(rack: Rack) -> int:
    """Both guests add one to a word, by an atomic instruction, many times at once: how many counts are lost."""
    at = SIZE - 2 * MIB  # no pool of ours reaches so far
    rack.memory.write(at, bytes(8))
    for guest in (rack.a, rack.b):
        guest.send("count", path=DAX, at=at, times=COUNTS)
    for guest in (rack.a, rack.b):
        guest.result()
    return 2 * COUNTS - int.from_bytes(rack.memory.read(at, 8), "little")


def atomics_hold(rack: Rack, note: Note) -> None:
    """On memory that is the guests' own, atomic instructions are atomic between them."""
    lost = count_together(rack)
    demand(lost == 0, "atomic counts that are lost between guests", lost)
    note(f"atomics between the guests hold: {2 * COUNTS:,} counts, none lost")


def atomics_fail(rack: Rack, note: Note) -> None:
    """On a device whose atomic instructions end in the guest, the other one's counts are lost."""
    for attempt in range(1, ATTEMPTS + 1):
        if lost := count_together(rack):
            note(f"no atomics between the guests: {lost:,} of {2 * COUNTS:,} counts are lost")
            return
        note(f"could not be shown at attempt {attempt} of {ATTEMPTS}: that atomics between the guests lose counts")


def run(rack: Rack, rounds: int, note: Note) -> None:
    """All of it on one kind of device."""
    shared_pool(rack, note)
    qualify(rack, rounds, note)
    lost_host(rack, note)
    check_from_all(rack, note)
    coherent_refused(rack, note)
