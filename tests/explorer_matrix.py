"""The mutation matrix: each write-back, invalidate and fence removed in turn, by the running program.

python tests/explorer_matrix.py [--all] [SITE-PREFIX ...]    prints for each site the first scenario that notices
--all: locked operations, too, which are done in two steps
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from os import cpu_count

import explorer_build as explorer

# From cheap to thorough; the first that notices ends the search for a site. Numbers of runs, not times, so that the
# outcome is the same on every machine.
STAGES: tuple[tuple[str, ...], ...] = (
    ("random=3000",),
    ("random=30000", "seed=2"),
    ("arm", "random=30000", "seed=3"),
    ("pb=3", "ev=3", "prune", "ladder", "runs=500000"),
    ("random=300000", "seed=4"),
)
WORKERS = cpu_count() or 1


def passes() -> dict[str, dict[str, int]]:
    """Scenario -> site -> how often it was passed."""

    def passed(name: str) -> dict[str, int]:
        result = explorer.run(name, "random=2000", "passes")
        return {site.removeprefix("./"): count for site, count in result["passed"].items()}

    names = [name for name in explorer.scenarios() if not name.startswith("kernel")]
    with ThreadPoolExecutor(WORKERS) as pool:
        return dict(zip(names, pool.map(passed, names), strict=True))


@functools.cache
def holds(scenario: str, stage: tuple[str, ...]) -> bool:
    """Without a mutation: what fails anyway notices nothing."""
    return not explorer.run(scenario, *stage)["failed"]


def notice(site: str, candidates: Iterable[str]) -> dict[str, object] | None:
    """The first scenario that fails without the site, and how."""
    for stage in STAGES:
        for name in candidates:
            result = explorer.run(name, *stage, f"mutate={site}")
            if result["failed"] and holds(name, stage):
                return {"scenario": name, "options": stage, **result}
    return None


def matrix(kinds: Iterable[str], prefixes: tuple[str, ...] = ("",)) -> Iterator[tuple[str, dict[str, object] | None]]:
    """Each site of these kinds, and what notices that it is missing, as it is found."""
    passed = passes()
    sites = [
        site for site in explorer.compiled_sites() if site.startswith(prefixes) and site.rsplit(":", 1)[1] in kinds
    ]

    def look(site: str) -> dict[str, object] | None:
        names = [name for name in passed if passed[name].get(site)]
        return notice(site, sorted(names, key=lambda name: sum(passed[name].values())))

    with ThreadPoolExecutor(WORKERS) as pool:
        asked = {pool.submit(look, site): site for site in sites}
        for done in as_completed(asked):
            yield asked[done], done.result()


def main() -> None:
    """Print the matrix."""
    prefixes = tuple(word for word in sys.argv[1:] if not word.startswith("--")) or ("",)
    kinds = explorer.KINDS if "--all" in sys.argv else (*explorer.ORDERING, *explorer.BATCHED)
    survivors = 0
    for site, found in matrix(kinds, prefixes):
        survivors += found is None
        text = f"{found['scenario']} {' '.join(found['options'])}: {found['message']}" if found else "NOT NOTICED"
        print(f"{site:36} {text[:140]}", flush=True)
    print(f"{survivors} survivors")


if __name__ == "__main__":
    main()
