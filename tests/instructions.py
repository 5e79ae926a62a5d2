"""Instructions of the C hot paths, counted by callgrind: no clock, no noise.

A pass is what two runs of different lengths differ by, so first touches are not in it.

python tests/instructions.py             prints them beside the recorded ones
python tests/instructions.py --record    writes them down: for a change that is meant
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import native_build as build

RECORD = Path(__file__).parent / "native" / "instructions.json"
PASSES = 4
BAND = 0.10
"""How far a count may be from the recorded one; below it, too: then it wants to be recorded."""
EDGE = re.compile(r"^cfn=count_(\w+)$")


def compiler() -> str:
    """Another compiler emits other instructions: counts are recorded for one."""
    return build.run(["gcc", "-dumpfullversion"]).strip() + " " + build.run(["gcc", "-dumpmachine"]).strip()


def _counts(program: Path, passes: int, folder: Path) -> dict[str, int]:
    out = folder / f"callgrind.{passes}"
    command = ["valgrind", "-q", "--tool=callgrind", "--compress-strings=no", "--compress-pos=no"]
    build.run([*command, f"--callgrind-out-file={out}", program, str(passes)])
    lines, totals = out.read_text().splitlines(), dict[str, int]()
    for i, line in enumerate(lines):
        edge = EDGE.match(line)
        if edge:  # then a line with the calls, and one whose last number is what they cost
            totals[edge[1]] = totals.get(edge[1], 0) + int(lines[i + 2].split()[-1])
    return totals


def measure() -> dict[str, int]:
    """Instructions of one pass of each path. Needs gcc and valgrind."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "counts"
        core = [path for path in build.SOURCES if path.suffix == ".c"]
        flags = ["-std=gnu11", "-O2", "-g", "-pthread", f"-I{build.ROOT}"]
        build.run(["gcc", *flags, Path(__file__).parent / "native" / "bench_counts.c", *core, "-o", program])
        few, many = _counts(program, 1, folder), _counts(program, 1 + PASSES, folder)
        return {path: (many[path] - few[path]) // PASSES for path in many}


def main() -> None:
    """Print or record."""
    counted, recorded = measure(), json.loads(RECORD.read_text())["counts"] if RECORD.exists() else {}
    for path, count in counted.items():
        print(f"{path:16} {count:10}  recorded {recorded.get(path, '-')}")
    if "--record" in sys.argv:
        RECORD.write_text(json.dumps({"compiler": compiler(), "counts": counted}, indent=1) + "\n")


if __name__ == "__main__":
    main()
