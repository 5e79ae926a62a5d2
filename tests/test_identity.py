"""Who a host is, and what an image is for: claims that are not true, other machines, stepped clocks."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest
from conftest import fill
from hosts import holds
from native_build import need

import kvpool

SLOTS, SLOT_BYTES = 4096, 64 + 8 * 64  # of hosts: after the superblock; a line and a row of adoptions (coherence.h)
MACHINE, ADOPTED = 16, 64


def image_of(uri):
    kind, _, name = uri.partition(":")
    return Path(f"/dev/shm/kvpool.{os.getuid()}.{'sim.' if kind == 'sim' else ''}{name}")


def patch(uri, offset, value):
    with image_of(uri).open("r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<Q", value))


def slot(host, field):
    return SLOTS + host * SLOT_BYTES + field


def forget_memory(pool, host):
    """As if this machine had never been that host."""
    Path(f"/dev/shm/kvpool.{os.getuid()}.host.{pool.info['uuid']}.{host}").unlink()


# ---- hosts --------------------------------------------------------------------------------------------------------

IDLE = "fill(ns, chain(1)); say('there'); wait()"


@pytest.mark.parametrize("mode", ["sim", "noncoherent"])
@pytest.mark.parametrize("host", [2, 64, 70000, 1 << 40, -1])
def test_a_host_that_does_not_exist(make_hosts, mode, host):
    hosts = make_hosts(2, mode)
    with pytest.raises(kvpool.WrongHost, match="made for 2, numbered from 0"):
        kvpool.open(hosts.uri, host=host)
    assert fill(hosts.ns(1), hosts.chain(1)) == 8


def test_the_environment_names_the_host(make_hosts, monkeypatch):
    hosts = make_hosts(3)
    monkeypatch.setenv("KVPOOL_HOST", "2")
    with kvpool.open(hosts.uri) as pool:
        assert pool.host == 2
    for wrong in ("x", "", "1.5"):
        monkeypatch.setenv("KVPOOL_HOST", wrong)
        with pytest.raises(kvpool.InvalidArgument, match="KVPOOL_HOST"):
            kvpool.open(hosts.uri)


@pytest.mark.parametrize(
    "wrong", [{"hosts": 65}, {"hosts": 0}, {"hosts": 2, "host": 2}, {"lease": 0.01}, {"blocks": 8}]
)
def test_pools_that_cannot_be(uri, wrong):
    name = uri.replace("shm:", "sim:")
    with pytest.raises(kvpool.InvalidArgument):
        kvpool.create(name, block="4KiB", **({"blocks": 64, "hosts": 4} | wrong))
    assert not image_of(name).exists()
    with pytest.raises(kvpool.InvalidArgument, match="one host"):
        kvpool.create(uri, blocks=64, block="4KiB", hosts=2)


def test_two_machines_claim_one_identity(make_hosts):
    """The second is told while the first lives, and also while it is silent: only a fence makes the number free."""
    hosts = make_hosts(2, "noncoherent")
    child = hosts.child(1, IDLE)
    assert child.hears() == "there"
    patch(hosts.uri, slot(1, MACHINE), 12345)
    forget_memory(hosts.pools[0], 1)
    with pytest.raises(kvpool.WrongHost, match="present on another machine: give this one another number"):
        kvpool.open(hosts.uri, host=1)
    child.kill()
    with pytest.raises(kvpool.WrongHost, match="have it fenced and adopted first"):
        kvpool.open(hosts.uri, host=1)
    assert holds(hosts.ns(0), hosts.chain(1))
    assert hosts.becomes(1, "lapsed")
    assert hosts.pools[0].fence(1, 1) == 8
    with kvpool.open(hosts.uri, host=1) as pool:
        assert pool.info["owned"] == 0
        assert hosts.seen(1)["incarnation"] == 2
    assert holds(hosts.ns(0), hosts.chain(1))


def test_a_host_memory_that_was_removed(make_hosts):
    """A live host of this very machine is not doubled by removing its memory."""
    hosts = make_hosts(2, "noncoherent")
    child = hosts.child(1, IDLE)
    assert child.hears() == "there"
    forget_memory(hosts.pools[0], 1)
    with pytest.raises(kvpool.WrongHost, match="host memory that was removed"):
        kvpool.open(hosts.uri, host=1)
    child.kill()
    with kvpool.open(hosts.uri, host=1) as pool:  # waits for one lease
        assert pool.info["owned"] == 8
    assert hosts.seen(1)["incarnation"] == 2
    assert holds(hosts.ns(0), hosts.chain(1))


def test_leaving_in_order_frees_the_identity(make_hosts):
    hosts = make_hosts(2, "noncoherent")
    fill(hosts.ns(1), hosts.chain(1))
    hosts.pools.pop(1).close()
    assert hosts.seen(1)["state"] == "left"
    patch(hosts.uri, slot(1, MACHINE), 12345)
    forget_memory(hosts.pools[0], 1)
    assert holds(hosts.ns(1), hosts.chain(1))
    assert hosts.pools[1].info["owned"] == 8
    assert hosts.becomes(1, "present")


# ---- images -------------------------------------------------------------------------------------------------------


def test_an_image_of_another_mode(make_hosts, uri):
    sim, far = make_hosts(2, "sim"), make_hosts(2, "noncoherent")
    fill(sim.ns(0), sim.chain(1))
    with pytest.raises(kvpool.WrongMode, match=r"made for mode sim.*open it in its own mode"):
        kvpool.open(f"file:{image_of(sim.uri)}", mode="coherent")
    for mode in ("coherent", "noncoherent"):
        with pytest.raises((kvpool.WrongMode, kvpool.InvalidArgument), match="sim"):
            kvpool.open(sim.uri, mode=mode)
        with pytest.raises(kvpool.InvalidArgument, match="sim"):
            kvpool.create(sim.uri, blocks=8, mode=mode)
    with kvpool.create(uri, blocks=8) as pool:
        for mode in ("noncoherent", "sim"):
            with pytest.raises((kvpool.WrongMode, kvpool.InvalidArgument), match=r"mode coherent|sim:"):
                kvpool.open(uri, mode=mode)
        assert pool.check().clean
    with pytest.raises(kvpool.WrongMode, match="made for mode noncoherent"):
        kvpool.open(far.uri, mode="coherent")
    with pytest.raises(kvpool.InvalidArgument, match="no mode 'fast'"):
        kvpool.open(uri, mode="fast")
    assert holds(sim.ns(1), sim.chain(1))


def test_an_ordinary_image_is_no_simulated_device(uri):
    name = uri.replace("shm:", "sim:")
    kvpool.create(uri, blocks=8).close()
    image_of(name).write_bytes(image_of(uri).read_bytes())
    with pytest.raises(kvpool.Foreign, match="not a simulated device"):
        kvpool.open(name)
    kvpool.remove(name, force=True)


def fnv(data):
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = (digest ^ byte) * 0x100000001B3 % (1 << 64)
    return digest


@pytest.mark.parametrize("mode", ["sim", "noncoherent"])
def test_a_host_of_another_word_or_page_size(make_hosts, mode):
    """Such a build writes another fingerprint; its image is whole, but not for us. Nothing of it is touched."""
    hosts = make_hosts(2, mode)
    fill(hosts.ns(0), hosts.chain(1))
    image = image_of(hosts.uri).read_bytes()
    patch(hosts.uri, 16, 0x1234)
    with pytest.raises(kvpool.Corrupt, match="checksum"):
        kvpool.open(hosts.uri, host=1)
    covered = next(n for n in range(512, 1024, 8) if fnv(image[:n]) == struct.unpack_from("<Q", image, n)[0])
    patch(hosts.uri, covered, fnv(image[:16] + struct.pack("<Q", 0x1234) + image[24:covered]))
    with pytest.raises(kvpool.LayoutMismatch, match="word size, byte order or page size"):
        kvpool.open(hosts.uri, host=1)
    patch(hosts.uri, 16, struct.unpack_from("<Q", image, 16)[0])
    patch(hosts.uri, covered, struct.unpack_from("<Q", image, covered)[0])
    assert holds(hosts.ns(1), hosts.chain(1))


# ---- clocks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """A library for LD_PRELOAD that steps clocks."""
    need("gcc")
    library = tmp_path_factory.mktemp("shim") / "clock_steps.so"
    source = Path(__file__).parent / "native" / "clock_steps.c"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library)}


STEPS = """
import ctypes
step = ctypes.CDLL(None).step_clock; step.argtypes = ctypes.c_int, ctypes.c_longlong
HOUR, REALTIME, BOOTTIME = 3600 * 10**9, 0, 7
say("ready"); wait()
for hours in (24 * 365, -24 * 365 * 2):
    before = time.time(); step(REALTIME, hours * HOUR); assert abs(time.time() - before) > 1e6
    say(fill(ns, chain(100 + abs(hours))), holds(ns, chain(1))); wait()
step(BOOTTIME, HOUR)
try:
    say(fill(ns, chain(5)), holds(ns, chain(1)))
except kvpool.Fenced as error:
    say("Fenced")
wait()
"""


def test_clock_steps_and_suspends_change_nothing(make_hosts, shim):
    """A year forward, two back, an hour asleep: the host is there all the time and goes on."""
    hosts = make_hosts(2, "noncoherent", lease=60)
    fill(hosts.ns(0), hosts.chain(1))
    child = hosts.child(1, STEPS, env=shim)
    assert child.hears() == "ready"
    child.go_on()
    for _ in range(3):
        assert child.hears() == "8 True"
        assert hosts.seen(1)["state"] == "present"
        child.go_on()


def test_a_host_that_slept_looks_for_a_fence(make_hosts, shim):
    """While its beat is on time it does not look; the clock that counts sleep tells it that it is late."""
    hosts = make_hosts(3, "noncoherent", lease=60)
    fill(hosts.ns(0), hosts.chain(1))
    child = hosts.child(1, STEPS, env=shim)
    assert child.hears() == "ready"
    # Host 2 adopts incarnation 1 of host 1: decided. Nobody is host 2: one that runs would go on and take the blocks.
    patch(hosts.uri, slot(2, ADOPTED + 8 * 1), 1 << 2 | 2)
    child.go_on()
    for _ in range(2):
        assert child.hears() == "8 True"
        child.go_on()
    assert child.hears() == "Fenced"
    assert not hosts.ns(0).contains(hosts.chain(5)).any()
