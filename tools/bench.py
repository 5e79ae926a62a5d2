"""`kvpool bench`: what the pool costs on this machine, each number beside a bound measured in the same run."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from kvpool.tools.bench_suite import Effort, Report, merge
from kvpool.tools.console import emit, grid, json_option, stdout, table

__all__ = ["SUITES", "bench"]

SUITES = {
    "core": "kvpool.tools.bench_suite_core",
    "coherence": "kvpool.tools.bench_suite_coherence",
    "engines": "kvpool.tools.bench_suite_engines",
}
"""Name of a suite -> the module whose `run(effort)` measures it; imported only when asked for."""
FEATURES = ("avx512f", "avx2", "clwb", "clflushopt", "sse4_2", "asimd", "sve")
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def load_suite(name: str) -> Callable[[Effort], Report]:
    """The function that runs a suite."""
    run: Callable[[Effort], Report] = importlib.import_module(SUITES[name]).run
    return run


def processor() -> tuple[str, list[str]]:
    """Model of the processor, and those of its features that the pool cares about."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    model = fields.get("model name") or platform.machine()
    family = f" (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else ""
    return model + family, [name for name in FEATURES if name in flags]


def page_kind() -> str:
    """Which pages a pool in shared memory gets here: a small one is made and looked at."""
    import kvpool

    with kvpool.create("memfd:", "8MiB", "64KiB", workers=1) as pool:
        stats = pool.stats()
    setting = SHMEM_HUGE.read_text().strip() if SHMEM_HUGE.exists() else "unknown"
    return f"{'2 MiB' if stats['huge_bytes'] else '4 KiB'} (transparent huge pages for shmem: {setting})"


def machine() -> dict[str, str]:
    """What a reader must know of the machine to judge the numbers."""
    model, features = processor()
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return {
        "processor": f"{model}, {os.cpu_count()} online",
        "features": " ".join(features),
        "kernel": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "pages": page_kind(),
        "load average": load,
    }


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def show(suite: str, about: dict[str, str], report: Report) -> None:
    """Print machine, rows and what was left out."""
    about = about | report.about
    rows = table(f"{suite}: medians; ratio = measured / bound", "row", "unit", "measured", "bound", "ratio", "target",
                 "verdict", left=2)  # fmt: skip
    for row in report.rows:
        target = "-" if row.target is None else number(row.target)
        numbers = [number(value) for value in (row.measured, row.bound, row.ratio)]
        rows.add_row(row.name, row.unit, *numbers, target, row.verdict)
    console = stdout()
    console.print(grid("", about))
    console.print(rows)
    for note in report.notes:
        console.print(f"left out: {note}")


@click.command()
@click.argument("suite", type=click.Choice(sorted(SUITES)), default="core")
@json_option
@click.option("--quick", is_flag=True, help="A few seconds: fewer samples, more noise.")
@click.option("--repeat", type=click.IntRange(1, 100), default=1, show_default=True, help="Runs; medians are printed.")
def bench(suite: str, as_json: bool, quick: bool, repeat: int) -> None:
    """Measure this machine with a SUITE.

    Each row stands beside a bound that was sampled in the same run, in turn with it: ratios can be compared between
    machines and days, times cannot.
    """
    run = load_suite(suite)
    about = {} if as_json and suite == "core" else machine()
    report = merge(run(Effort(quick)) for _ in range(repeat))
    rows = [asdict(row) for row in report.rows]
    if as_json:
        emit({"machine": about | report.about, "rows": rows} if report.about else rows)
    else:
        show(suite, about, report)
