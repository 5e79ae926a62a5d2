"""The production C under a scheduler that enumerates interleavings, late write-backs, stale lines and deaths.

Each scenario of tests/explorer runs functions of allocator/, native/ and coherence/, compiled with KVP_MODE=3, and has
an oracle. The order of the search is fixed, so a number of runs is the same set of schedules on every machine.
"""

from __future__ import annotations

import platform
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import explorer_build as explorer
import explorer_coverage as coverage
import explorer_matrix as matrix
import pytest

RUNS = 20_000  # of a scenario that does not come to its end in a few seconds
ENDING = {
    "log-lapped",
    "log-wrapped",
    "ownership",
    "recoverers",
    "publish",
    "remove-again",
    "give",
    "want",
    "beat",
    "kept",
}
ENDING |= {"remove-pool", "remove-used", "remove-silent", "cut-off", "watch-remote"}
ALONE = {"arguments", "pin-all", "lru", "fifo", "lfu", "leaf", "damage", "open-damaged", "plan"}  # one worker, one run
LONG = {"make", "remake", "class-lost", "class-lost-two", "class-moved", "class-race", "class-unpinned", "crowded"}
# Two threads that must stop at one place each: few preemptions, all of them.
NARROW = {"late-maker": ("pb=3", "ev=0", "prune", "ladder", "runs=20000")}
LONG_OPTIONS = ("random=5000", "pb=99", "ev=99")  # of runs of thousands of steps a search would see the ends only
SCHEDULES_MIN = 1_000_000
COVERAGE_MIN = 0.95  # of the lines of the C core

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the explorer switches x86-64 stacks")


def ends(name: str) -> bool:
    return name.startswith("kernel") or name in ENDING | ALONE


def options(name: str) -> tuple[str, ...]:
    if name in NARROW:
        return NARROW[name]
    return LONG_OPTIONS if name in LONG else (f"runs={2_000_000 if ends(name) else RUNS}",)


@pytest.mark.timeout(900)
def test_every_scenario_holds():
    """No schedule that was tried breaks a promise; the kernels and others are tried out to the end."""
    with ThreadPoolExecutor(matrix.WORKERS) as pool:
        results = list(pool.map(lambda name: explorer.run(name, *options(name)), explorer.scenarios()))
    for result in results:
        print({word: value for word, value in result.items() if word != "passed"})
        assert not result["failed"], result
    assert all(result["complete"] for result in results if ends(result["scenario"]))
    assert sum(result["runs"] for result in results) >= SCHEDULES_MIN


def test_every_site_can_be_taken_away():
    """Each write-back, invalidate and fence that stands in the sources is one that the explorer can leave out."""
    missing = set(explorer.source_sites()) - set(explorer.compiled_sites())
    assert not [site for site in missing if site.rsplit(":", 1)[1] in explorer.ORDERING]
    assert set(explorer.compiled_sites()) <= set(explorer.source_sites())


def test_the_kernels_need_what_they_say():
    """The instrument itself: of the operations of kernels.c each is noticed when it is missing, but for those whose
    comment says why not."""
    lines = (explorer.HERE / "kernels.c").read_text().splitlines()
    comments = {at: m for at, line in enumerate(lines, 1) if (m := re.search(r"/\* kernel: ([\w.]+)(:?)", line))}
    needed, noticed = {m[1]: not m[2] for m in comments.values()}, {}
    for at, m in comments.items():
        site = next(site for site in explorer.all_sites() if site.startswith(f"tests/explorer/kernels.c:{at}:"))
        scenario = "kernel-message" if m[1].startswith("message") else "kernel-pin"
        noticed[m[1]] = explorer.run(scenario, f"mutate={site}")["failed"]
    assert len(needed) > 20
    assert noticed == needed


@pytest.mark.timeout(900)
def test_the_scenarios_pass_nearly_every_line():
    """What is left are other modes' branches, and answers to what the stand-ins of the explorer never do."""
    if not shutil.which("gcov"):
        pytest.skip("gcov is not here")
    lines = coverage.measure()
    missed = {
        name: [number for number, passed in sorted(of.items()) if not passed] for name, of in sorted(lines.items())
    }
    print(missed)
    assert len(lines) >= 20
    assert coverage.share(lines) >= COVERAGE_MIN, missed


@pytest.mark.timeout(1800)
def test_no_write_back_invalidate_or_fence_can_go():
    """Without any of them the scenario that tests/explorer/matrix.txt names fails; with all of them it holds."""
    sites = matrix.names(explorer.NEEDED)
    table = matrix.recorded()
    assert set(table) == set(sites), "the code has changed: python tests/explorer_matrix.py --record"
    with ThreadPoolExecutor(matrix.WORKERS) as pool:
        noticed = dict(zip(sites, pool.map(lambda name: matrix.notices(table[name], sites[name]), sites), strict=True))
    assert [name for name in sites if not noticed[name]] == []
