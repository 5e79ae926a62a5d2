"""The bottom of the modes with many hosts: the simulator, the cache instructions, the memory of one host."""

from __future__ import annotations

import os

import native_build as build
import pytest

SECONDS = float(os.environ.get("KVPOOL_STRESS_SECONDS", "4"))
SEED = os.environ.get("KVPOOL_STRESS_SEED", "1")


@pytest.mark.parametrize("flavour", [build.SIM, build.SIM_ASAN], ids=lambda f: f.name)
def test_simulated_lines(flavour):
    """What is stale, what is written, what is counted, what a lost host leaves."""
    output = build.run([build.program(flavour, "native/sim_lines.c")])
    print(output)
    assert "simulated: 11 tests passed" in output


def test_simulated_kills():
    """Killed after single instructions and at random moments: no torn line, no stuck lock, no lost store."""
    output = build.run([build.program(build.SIM, "native/sim_kill.c"), str(SECONDS), SEED, "5"])
    print(output)
    assert "deaths at random" in output


def test_cache_instructions():
    """Every set of instructions that this CPU has."""
    output = build.run([build.program(build.NONCOHERENT, "native/lines.c")])
    print(output)
    assert "sets ran" in output


def test_cache_instructions_of_the_other_cpu():
    program = build.program(build.NONCOHERENT_ARM, "native/lines.c")
    build.need("qemu-aarch64-static")
    assert "dc cvac+dc civac chosen, 1 sets ran" in build.run(["qemu-aarch64-static", program])


@pytest.mark.parametrize("flavour", [build.NONCOHERENT, build.SIM], ids=lambda f: f.name)
def test_host_memory(flavour):
    """Made once, backed whole, locked while somebody initialises it, removed, made again."""
    assert "4 tests passed" in build.run([build.program(flavour, "native/hostmem.c")])
