"""Lines of the C core that the explorer's scenarios pass, by gcov.

python tests/explorer_coverage.py [-v]    a table per file; -v lists the lines that were not passed
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import explorer_build as explorer
import native_build as build

RUNS = ("random=3000", "seconds=2")  # of each scenario: what they pass at all they pass soon
UNIT_FLAGS = ("-O1", "--coverage")


def measure() -> dict[str, dict[int, bool]]:
    """File -> line -> passed, of the C core: what the explorer runs of the folders of the layers."""
    program = explorer.explorer(*UNIT_FLAGS)
    for stale in program.parent.glob("*.gcda"):
        stale.unlink()
    for name in explorer.scenarios():
        explorer.run(name, *RUNS, program=program)
    lines: dict[str, dict[int, bool]] = {}
    for data in sorted(program.parent.glob("*.gcda")):
        subprocess.run(["gcov", "--json-format", data.name], cwd=program.parent, check=True, capture_output=True)
    for report in program.parent.glob("*.gcov.json.gz"):
        for file in json.loads(gzip.decompress(report.read_bytes()))["files"]:
            name = str(Path(file["file"].removeprefix(f"{build.ROOT}/")))
            if name.split("/")[0] in build.FOLDERS and name.endswith(".c"):
                passed = lines.setdefault(name, {})
                for line in file["lines"]:
                    number = line["line_number"]
                    passed[number] = passed.get(number, False) or line["count"] > 0
    return lines


def share(lines: dict[str, dict[int, bool]]) -> float:
    """Passed of all lines."""
    return sum(sum(of.values()) for of in lines.values()) / sum(len(of) for of in lines.values())


def main() -> None:
    """Print the table."""
    total = hit = 0
    for name, lines in sorted(measure().items()):
        passed = sum(lines.values())
        total, hit = total + len(lines), hit + passed
        missed = " ".join(str(number) for number, yes in sorted(lines.items()) if not yes) if "-v" in sys.argv else ""
        print(f"{name:28} {passed:4} of {len(lines):4} lines {100 * passed / len(lines):6.1f} %  {missed}")
    print(f"{'all':28} {hit:4} of {total:4} lines {100 * hit / total:6.1f} %")


if __name__ == "__main__":
    main()
