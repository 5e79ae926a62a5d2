"""The rows that only C can time: a driver compiled on demand, where the source tree and a compiler are there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvpool.tools.bench_suite import Effort, Report, Row, Spread

__all__ = ["DriverMissing", "build_driver", "driver_rows", "run_driver"]

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "native" / "bench_core.c"
LAYERS = ("coherence", "allocator", "native")
FLAGS = ("-std=gnu11", "-O2", "-pthread", f"-I{ROOT}")  # as the shipped build has them
SAMPLES, TIMEOUT_S = 48, 300


class DriverMissing(Exception):
    """The driver cannot be had here; the message says why."""


def build_driver(folder: Path, core_flags: tuple[str, ...] = ()) -> Path:
    """Compile the driver and the C core, the latter with `core_flags` too, into `folder`; the path of the program.

    Raises `DriverMissing` without a source tree or a compiler, or if that one refuses.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if not SOURCE.is_file():
        raise DriverMissing("the rows marked (C) need a source tree: this is an installed package")
    if compiler is None:
        raise DriverMissing("the rows marked (C) need a C compiler: install one, or name it in CC")
    core = [str(path) for layer in LAYERS for path in sorted((ROOT / layer).glob("*.c"))]
    objects = [str(folder / f"{Path(path).parent.name}_{Path(path).stem}.o") for path in core]
    program = folder / "bench_core"
    jobs = [
        [compiler, *FLAGS, *core_flags, "-c", source, "-o", made] for source, made in zip(core, objects, strict=True)
    ]
    jobs.append([compiler, *FLAGS, str(SOURCE), *objects, "-o", str(program)])
    for job in jobs:
        done = subprocess.run(job, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise DriverMissing(f"the rows marked (C) do not compile here: {done.stderr.strip()[:300]}")
    return program


def run_driver(program: Path, *arguments: str) -> list[list[str]]:
    """What the driver prints: lines of fields. Raises RuntimeError with its complaint if it fails."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return [line.split("\t") for line in done.stdout.splitlines()]


def driver_rows(effort: Effort, part: str = "rows") -> Report:
    """The rows marked (C), or the reason why there are none: all, or of alloc, index, handoff or recovery alone."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        try:
            program = build_driver(Path(folder))
        except DriverMissing as missing:
            return Report(notes=[str(missing)])
        lines = run_driver(program, part, str(effort.samples(SAMPLES)))
    rows = []
    for name, unit, *numbers in lines:
        measured, bound, p10, p99 = map(float, numbers)
        rows.append(Row.of(name, unit, Spread(measured, p10, p99), bound))
    alone = part in ("rows", "handoff") and not any(row.name.startswith("handoff") for row in rows)
    return Report(rows, ["handoff needs two processors"] if alone else [])
