"""The production C under a scheduler that enumerates interleavings, late write-backs, stale lines and deaths.

Each scenario of tests/explorer runs functions of allocator/, native/ and coherence/, compiled with KVP_MODE=3, and has
an oracle. The order of the search is fixed, so a number of runs is the same set of schedules on every machine.
"""

from __future__ import annotations

import json
import platform
import subprocess

import native_build as build
import pytest

HERE = build.ROOT / "tests" / "explorer"
FLAGS = ("-O2", "-DKVP_MODE=3", f"-I{HERE}", f"-fmacro-prefix-map={build.ROOT}/=", "-no-pie")
COMMAND = ["gcc", "-std=gnu11", f"-I{build.ROOT}", "-g", *build.WARNINGS, *build.STRICT, *FLAGS]
LEFT_OUT = {"qualify.c"}  # litmus tests of real memory
BOTTOM = ("log.c", "hosts.c")  # of coherence/; what the rest does is the explorer's own
RUNS = 100_000  # of a scenario that does not end by itself in a few seconds
SCHEDULES_MIN = 1_000_000

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the explorer switches x86-64 stacks")


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    build.need("gcc")
    folder = tmp_path_factory.mktemp("explorer")
    objects = []
    explored = [
        source
        for source in build.SOURCES
        if source.name not in LEFT_OUT and (source.parent.name != "coherence" or source.name in BOTTOM)
    ]
    for source in [*explored, *sorted(HERE.glob("*.c"))]:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        before = ["-include", HERE / "standins.h"] if source in explored else []
        build.run([*COMMAND, *before, "-c", source, "-o", target])
        objects.append(target)
    program = folder / "explorer"
    build.run(["gcc", "-no-pie", *objects, "-o", program])
    return program


def explore(explorer, scenario, *options):
    """What one exploration found; the program says by its exit code too whether a promise was broken."""
    command = [explorer, "run", scenario, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_every_scenario_holds(explorer):
    """No schedule that was tried breaks a promise; the kernels and others are tried out to the end."""
    names = [line.split()[0] for line in build.run([explorer, "list"]).splitlines()]
    results = [explore(explorer, name, f"runs={runs_of(name)}", "seconds=60") for name in names]
    for result in results:
        print(result)
        assert not result["failed"], result
    assert all(result["complete"] for result in results if result["scenario"].startswith("kernel"))
    assert sum(result["runs"] for result in results) >= SCHEDULES_MIN


def runs_of(name: str) -> int:
    """Those that come to their end soon have no limit that matters."""
    return RUNS * 20 if name.startswith(("kernel", "log")) or name in ENDING else RUNS


ENDING = {"ownership", "recoverers", "copy", "copy-after", "publish", "remove-again", "give"}


def test_the_instrument_works(explorer):
    """Evictors that read pins without dropping their old copies are noticed."""
    lines = (build.ROOT / "allocator" / "blocks.c").read_text().splitlines()
    at = next(i for i, line in enumerate(lines, 1) if "nc_invalidate(kvp_pins(arena, h, w)" in line)
    result = explore(
        explorer, "pin-after", "runs=20000", "seconds=60", f"mutate=allocator/blocks.c:{at}:invalidate", "quiet"
    )
    assert result["failed"]
