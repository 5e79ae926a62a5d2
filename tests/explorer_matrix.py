"""The mutation matrix: each write-back, invalidate, fence and locked operation removed in turn, by the running program.

python tests/explorer_matrix.py [--stages=N] [SITE-PREFIX ...]    prints for each site the first scenario that notices
"""

from __future__ import annotations

import sys
import time

import explorer_build as explorer

# From cheap to thorough; the first that notices ends the search for a site.
STAGES: tuple[tuple[str, ...], ...] = (
    ("random=3000", "seconds=10"),
    ("random=30000", "seed=2", "seconds=20"),
    ("random=300000", "seed=3", "seconds=60"),
)


def passes(runs: int = 3_000) -> dict[str, dict[str, int]]:
    """Scenario -> site -> how often it was passed."""
    found = {}
    for name in explorer.scenarios():
        if not name.startswith("kernel"):
            result = explorer.run(name, f"runs={runs}", "seconds=20", "passes")
            found[name] = {site.removeprefix("./"): count for site, count in result["passed"].items()}
    return found


def notice(site: str, candidates: list[str], stages: int = len(STAGES), weak: bool = False) -> dict[str, object] | None:
    """The first scenario that fails without the site, and how."""
    for stage in STAGES[:stages]:
        for name in candidates:
            result = explorer.run(name, *stage, f"mutate={site}{':weak' if weak else ''}")
            if result["failed"]:
                return {"scenario": name, "options": stage, "message": result["message"], "seconds": result["seconds"]}
    return None


def candidates_of(site: str, passed: dict[str, dict[str, int]]) -> list[str]:
    """Scenarios that pass the site, those that are short first."""
    names = [name for name in passed if passed[name].get(site)]
    return sorted(names, key=lambda name: sum(passed[name].values()))


def main() -> None:
    """Print the matrix."""
    passed = passes()
    stages = next(
        (int(word.removeprefix("--stages=")) for word in sys.argv if word.startswith("--stages=")), len(STAGES)
    )
    wanted = [word for word in sys.argv[1:] if not word.startswith("--")]
    for site in explorer.compiled_sites():
        if wanted and not any(site.startswith(prefix) for prefix in wanted):
            continue
        names = candidates_of(site, passed)
        start = time.monotonic()
        found = notice(site, names, stages)
        text = (
            f"{found['scenario']} {' '.join(found['options'])}: {found['message'][:90]}"
            if found
            else f"NOT NOTICED by {names}"
        )
        print(f"{site:44} {time.monotonic() - start:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    main()
