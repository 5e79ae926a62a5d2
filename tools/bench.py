"""`kvpool bench`: what the pool costs on this machine, each number beside a bound measured in the same run."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from kvpool.tools.bench_picture import picture
from kvpool.tools.bench_suite import Effort, Report, merge
from kvpool.tools.bench_targets import judge
from kvpool.tools.console import emit, grid, json_option, stdout, table

__all__ = ["SUITES", "bench"]

CORE = "kvpool.tools.bench_suite_core"
SUITES = {
    "core": f"{CORE}:run",
    "index": f"{CORE}:index",
    "alloc": f"{CORE}:alloc",
    "copy": f"{CORE}:copy",
    "handoff": f"{CORE}:handoff",
    "recovery": f"{CORE}:recovery",
    "coherence": "kvpool.tools.bench_suite_coherence:run",
    "peers": "kvpool.tools.bench_suite_peers:run",
    "scale": "kvpool.tools.bench_suite_scale:run",
    "engines": "kvpool.tools.bench_suite_engines:run",
}
"""Name of a suite -> the function of an effort that measures it; imported only when asked for."""
ALL = ("index", "alloc", "copy", "handoff", "coherence", "recovery")
"""The suites that have the rows with targets."""
FEATURES = ("avx512f", "avx2", "clwb", "clflushopt", "sse4_2", "asimd", "sve")
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def load_suite(name: str) -> Callable[[Effort], Report]:
    """The function that runs a suite."""
    if name == "all":
        return run_all
    module, function = SUITES[name].split(":")
    run: Callable[[Effort], Report] = getattr(importlib.import_module(module), function)
    return run


def run_all(effort: Effort) -> Report:
    """Every row that has a target, of all suites."""
    whole = Report()
    for name in ALL:
        report = load_suite(name)(effort)
        whole.rows += [row for row in judge(report.rows) if row.target is not None]
        whole.notes += report.notes
        whole.about |= report.about
    return whole


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
    columns = ("row", "unit", "p10", "measured", "p99", "bound", "ratio", "target", "verdict")
    rows = table(f"{suite}: medians; ratio = measured / bound", *columns, left=2)
    for row in report.rows:
        values = (row.p10, row.measured, row.p99, row.bound, row.ratio, row.target)
        rows.add_row(row.name, row.unit, *("-" if value is None else number(value) for value in values), row.verdict)
    console = stdout()
    console.print(grid("", about))
    console.print(rows)
    for note in report.notes:
        console.print(f"left out: {note}")


@click.command()
@click.argument("suite", type=click.Choice([*SUITES, "all"]), default="core")
@json_option
@click.option("--quick", is_flag=True, help="A few seconds: fewer samples, more noise.")
@click.option("--repeat", type=click.IntRange(1, 100), default=1, show_default=True, help="Runs; medians are printed.")
@click.option("--picture", "drawing", type=click.Path(dir_okay=False, path_type=Path), help="Draw the ratios, as SVG.")
def bench(suite: str, as_json: bool, quick: bool, repeat: int, drawing: Path | None) -> None:
    """Measure this machine with a SUITE; `all`: what has a target, with its verdict.

    Each row stands beside a bound that was sampled in the same run, in turn with it: ratios can be compared between
    machines and days, times cannot.
    """
    run = load_suite(suite)
    about = machine()
    report = merge(run(Effort(quick)) for _ in range(repeat))
    report.rows = judge(report.rows)
    if drawing is not None:
        drawing.write_text(picture(suite, report.rows, f"{about['processor']}; load {about['load average']}"))
    if as_json:
        emit({"machine": about | report.about, "rows": [asdict(row) for row in report.rows], "left_out": report.notes})
    else:
        show(suite, about, report)
