"""The mutation matrix: each write-back, invalidate and fence removed in turn, by the running program.

python tests/explorer_matrix.py [--record] [--all] [NAME-PREFIX ...]

Prints for each site the scenario that notices, and how it is run: the one of the table tests/explorer/matrix.txt, else
the first that is found. --record writes the table. --all: also locked operations, which are done in two steps.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from os import cpu_count

import explorer_build as explorer
import native_build as build

TABLE = explorer.HERE / "matrix.txt"
# From cheap to thorough. Numbers of runs, not times, so that the outcome is the same on every machine.
STAGES: tuple[tuple[str, ...], ...] = (
    ("random=3000", "pb=99", "ev=99"),
    ("random=30000", "pb=99", "ev=99", "seed=2"),
    ("lazy", "random=30000", "pb=99", "ev=99", "seed=3"),
    ("pb=3", "ev=2", "prune", "ladder", "runs=500000"),
    ("random=300000", "pb=99", "ev=99", "seed=4"),
)
WORKERS = cpu_count() or 1
FUNCTION = re.compile(r"^(?:[a-z].*?\b)?(\w+)\([^;]*$")

Run = tuple[str, tuple[str, ...]]  # scenario, options


def names(kinds: Iterable[str]) -> dict[str, str]:
    """Name -> FILE:LINE:KIND of each site of these kinds.

    A name says FILE:FUNCTION:KIND, and which of those if there are several, so that it stays when lines move.
    """
    found: dict[str, str] = {}
    for site in sorted(explorer.compiled_sites(), key=lambda site: (site.split(":")[0], int(site.split(":")[1]))):
        file, line, kind = site.split(":")
        if kind not in kinds:
            continue
        before = (build.ROOT / file).read_text().splitlines()[: int(line)]
        function = next((m[1] for text in reversed(before) if (m := FUNCTION.match(text))), "")
        name = f"{file}:{function}:{kind}"
        same = sum(other == name or other.startswith(f"{name}#") for other in found)
        found[f"{name}#{same + 1}" if same else name] = site
    return found


def recorded() -> dict[str, Run]:
    """Name -> what notices, from the table."""
    lines = [line.split() for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    return {name: (scenario, tuple(options)) for name, scenario, *options in lines}


def record(table: dict[str, Run]) -> None:
    """Write the table."""
    width = max(len(name) for name in table)
    lines = [
        f"{name:{width}}  {scenario:16} {' '.join(options)}" for name, (scenario, options) in sorted(table.items())
    ]
    head = "# Without this line of code, this scenario fails, run so. Written by tests/explorer_matrix.py --record."
    TABLE.write_text("\n".join([head, *lines]) + "\n")


@functools.cache
def holds(run: Run) -> bool:
    """Without a mutation: what fails anyway notices nothing."""
    return not explorer.run(run[0], *run[1])["failed"]


def notices(run: Run, site: str) -> bool:
    """Does this scenario fail without the site, and only without it?"""
    return bool(explorer.run(run[0], *run[1], f"mutate={site}")["failed"]) and holds(run)


@functools.cache
def passed_by(scenario: str) -> frozenset[str]:
    """The sites that a scenario passes."""
    result = explorer.run(scenario, "random=2000", "passes")
    return frozenset(site.removeprefix("./") for site, count in result["passed"].items() if count)


def search(site: str, stages: Iterable[tuple[str, ...]] = STAGES) -> Run | None:
    """The first scenario that notices."""
    scenarios = [name for name in explorer.scenarios() if not name.startswith("kernel") and site in passed_by(name)]
    runs = ((name, stage) for stage in stages for name in scenarios)
    return next((run for run in runs if notices(run, site)), None)


def matrix(sites: dict[str, str], stages: Iterable[tuple[str, ...]] = STAGES) -> Iterator[tuple[str, Run | None]]:
    """Name of each site, and what notices that it is missing, as it is found."""
    known = recorded() if TABLE.exists() else {}

    def look(name: str, site: str) -> Run | None:
        run = known.get(name)
        return run if run and run[0] in explorer.scenarios() and notices(run, site) else search(site, stages)

    with ThreadPoolExecutor(WORKERS) as pool:
        asked = {pool.submit(look, name, site): name for name, site in sites.items()}
        for done in as_completed(asked):
            yield asked[done], done.result()


def main() -> None:
    """Print the matrix."""
    prefixes = tuple(word for word in sys.argv[1:] if not word.startswith("--")) or ("",)
    sites = names(explorer.KINDS if "--all" in sys.argv else explorer.NEEDED)
    table = {name: run for name, run in recorded().items() if name in sites} if TABLE.exists() else {}
    survivors = 0
    for name, run in matrix({name: site for name, site in sites.items() if name.startswith(prefixes)}):
        survivors += run is None
        print(f"{name:64} {run[0] + ' ' + ' '.join(run[1]) if run else 'NOT NOTICED'}", flush=True)
        if run:
            table[name] = run
        if "--record" in sys.argv and table:
            record(table)
    print(f"{survivors} survivors")


if __name__ == "__main__":
    main()
