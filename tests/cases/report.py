"""What became of each case of cases.toml: prints it, writes docs/cases.md, runs the tests that keep them.

python tests/cases/report.py            the verdicts, and their number by kind
python tests/cases/report.py --write    docs/cases.md
python tests/cases/report.py --run      the tests first; a case whose test fails or is skipped is told so
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REGISTRY, PAGE = ROOT / "tests/cases/cases.toml", ROOT / "docs/cases.md"
KINDS = {
    "L": "lifecycle",
    "C": "crash",
    "N": "concurrency",
    "K": "identity and keys",
    "I": "isolation",
    "P": "capacity",
    "Y": "layout and dtype",
    "M": "platform and mapping",
    "A": "misuse",
    "O": "observability",
    "E": "engine contract",
}
HEAD = """# Cases

What went wrong for others, told in public, and what becomes of it here. Each case is kept by tests, waits for something
that is not built, or does not apply. `make cases` runs those tests and prints this. `tests/cases/cases.toml` is where
it is written down; this page is made from it (`python tests/cases/report.py --write`). Cases whose number begins with X
are our own: what the reports suggest and nobody has written down. A test with its file stands in `tests/`, one without
in `tests/cases/`. Tests that need an engine are skipped where it is not installed: `make test-engines`.

"""


@dataclass
class Case:
    """One row of the registry, and what its tests said if they were run."""

    id: str
    title: str
    kept_by: list[str] = field(default_factory=list)
    waits_for: str = ""
    does_not_apply_because: str = ""
    note: str = ""
    result: str = ""

    @property
    def kind(self) -> str:
        """By its first letter."""
        return KINDS[self.id[0]]

    @property
    def is_ours(self) -> bool:
        """Not of the public reports."""
        return self.id[1] == "X"

    @property
    def verdict(self) -> str:
        """In a word."""
        return "kept" if self.kept_by else "waits" if self.waits_for else "does not apply"

    @property
    def sentence(self) -> str:
        """The verdict with its reason."""
        if self.kept_by:
            return "kept by " + ", ".join(short(test) for test in self.kept_by)
        if self.waits_for:
            return f"waits for {self.waits_for}"
        return f"does not apply because {self.does_not_apply_because}"


def short(test: str) -> str:
    """tests/cases/test_x.py::test_y -> test_y for those that carry the id, else file: test_y."""
    file, _, name = test.partition("::")
    return name if file.startswith("tests/cases/") else f"{file.removeprefix('tests/')}: {name}"


def cases() -> list[Case]:
    """All, in the order of the registry."""
    rows = tomllib.loads(REGISTRY.read_text())
    return [Case(id=name, **row) for name, row in rows.items()]


@cache
def functions(file: str) -> frozenset[str]:
    """Names of the tests in a file of this tree."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def named_tests() -> set[str]:
    """Every test in tests/cases whose name carries an id, as file::name."""
    found = set()
    for path in sorted((ROOT / "tests/cases").glob("test_*.py")):
        file = str(path.relative_to(ROOT))
        found |= {f"{file}::{name}" for name in functions(file) if id_of(name)}
    return found


def id_of(name: str) -> str:
    """The id that a test's name carries: test_L01_x -> L01."""
    part = name.removeprefix("test_").split("_")[0]
    return part if len(part) == 3 and part[0] in KINDS and part[1:].removeprefix("X").isdigit() else ""


def table(rows: list[Case]) -> list[str]:
    """The number by kind and verdict."""
    lines = ["| kind | cases | kept | wait | do not apply | our own |", "|---|---|---|---|---|---|"]
    public = [row for row in rows if not row.is_ours]
    for kind in [*KINDS.values(), ""]:
        mine = [row for row in public if kind in ("", row.kind)]
        count = Counter(row.verdict for row in mine)
        own = sum(row.is_ours and kind in ("", row.kind) for row in rows)
        numbers = (len(mine), count["kept"], count["waits"], count["does not apply"], own)
        lines.append(f"| {kind or 'all'} | " + " | ".join(map(str, numbers)) + " |")
    return lines


def page(rows: list[Case]) -> str:
    """docs/cases.md."""
    lines = [HEAD + "\n".join(table(rows)), ""]
    for kind in KINDS.values():
        lines += [f"## {kind.capitalize()}", "", "| | | |", "|---|---|---|"]
        for row in (row for row in rows if row.kind == kind):
            tests = [f"`{short(test)}`" for test in row.kept_by]
            told = "kept by " + "<br>".join(tests) if tests else row.sentence
            lines.append(f"| {row.id} | {row.title} | {told}{'; ' + row.note if row.note else ''} |")
        lines.append("")
    return "\n".join(lines)


def run(rows: list[Case]) -> int:
    """Run every test that keeps a case; the status of pytest."""
    tests = {test for row in rows for test in row.kept_by}
    # By file and name: a module that is skipped has no tests that could be asked for one by one.
    files = sorted({test.partition("::")[0] for test in tests})
    names = " or ".join(sorted({test.partition("::")[2] for test in tests}))
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.xml"
        options = [f"--junit-xml={told}", "-o", "junit_family=xunit1", "-k", f"({names}) and not sim-"]
        options += ["-n", "auto", "--maxprocesses", "4"]
        command = [sys.executable, "-P", "-m", "pytest", "-q", *options, *files]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        results: dict[str, set[str]] = {}
        for each in ET.parse(told).iter("testcase"):
            name = f"{each.get('file')}::{each.get('name', '').partition('[')[0]}"
            results.setdefault(name, set()).add(next((part.tag for part in each if part.tag != "properties"), "passed"))
    for row in rows:
        seen = [results.get(test, {"not run"}) for test in row.kept_by]
        words = set().union(*seen) if seen else set()
        if words & {"failure", "error"}:
            row.result = "FAILED"
        elif seen and not any("passed" in each for each in seen):
            row.result = "not run here: what its tests need is not installed"
    return status


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/cases.md")
    parser.add_argument("--run", action="store_true", help="run the tests first")
    chosen = parser.parse_args()
    rows = cases()
    if chosen.write:
        PAGE.write_text(page(rows))
        return 0
    status = run(rows) if chosen.run else 0
    for row in rows:
        told = f"  [{row.result}]" if row.result else ""
        print(f"{row.id}  {row.kind:20}  {row.sentence}{told}")
    print("\n" + "\n".join(table(rows)))
    return status


if __name__ == "__main__":
    sys.exit(main())
