"""Undo what keeps a case, and see its test fail: a row of undo.toml is a place in the source, and what is put there.

A row may say which `tests` of which `files` are to fail, if they do not carry the id, and in which `mode` C is built.

python tests/cases/undo.py            all rows (a build for each that is in C: some minutes)
python tests/cases/undo.py L08 M05    those of some cases
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pool", "bindings", "tools", "tests", "coherence", "allocator", "native")


def copied(folder: Path) -> Path:
    """A copy of what is tested, as it is built here, with the package where Python finds it."""
    ignore = shutil.ignore_patterns("__pycache__", "*.o", "build")
    for each in FOLDERS:
        shutil.copytree(ROOT / each, folder / each, ignore=ignore)
    for each in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / each, folder / each)
    package = folder / "as_package" / "kvpool"
    package.mkdir(parents=True)
    for each in sorted((folder / "pool").iterdir()):
        (package / each.name).symlink_to(each)
    for each in ("bindings", "tools"):
        (package / each).symlink_to(folder / each)
    return folder


def undone(folder: Path, row: dict[str, str]) -> bool:
    """Make the change; False if what it changes is not there any more."""
    path = folder / row["file"]
    text = path.read_text()
    if text.count(row["old"]) != 1:
        return False
    path.write_text(text.replace(row["old"], row["new"]))
    if path.suffix in (".c", ".h"):
        setup, mode = folder / "setup.py", row.get("mode", "coherent")  # one build: most tests are of one machine
        setup.write_text(setup.read_text().replace('("coherent", "noncoherent", "sim")', f'("{mode}",)'))
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=folder, check=True, capture_output=True)
    return True


def is_noticed(folder: Path, row: dict[str, str]) -> bool:
    """Does a test that carries the id fail? One that waits for ever is ended, and has noticed too."""
    files = [str(path.relative_to(folder)) for path in sorted((folder / "tests/cases").glob("test_*.py"))]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=60"]
    command += ["-k", row.get("tests", f"test_{row['case']}_"), *row.get("files", " ".join(files)).split()]
    paths = [folder / "as_package", folder / "tests", folder / "tests/engines"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "KVPOOL_UNDONE": row["case"]}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode in (1, 3) or done.returncode < 0


def main(chosen: list[str]) -> int:
    """See the module."""
    rows = tomllib.loads((ROOT / "tests/cases/undo.toml").read_text())["undo"]
    changes: dict[tuple[str, ...], list[dict[str, str]]] = {}  # one build for all cases that a change undoes
    for row in rows:
        if not chosen or row["case"] in chosen:
            change = row["file"], row["old"], row["new"], row.get("mode", "")
            changes.setdefault(change, []).append(row)
    wrong = 0
    for same in changes.values():
        with tempfile.TemporaryDirectory() as folder:
            where = copied(Path(folder))
            is_there = undone(where, same[0])
            for row in same:
                told = "NOT THERE any more" if not is_there else "noticed" if is_noticed(where, row) else "NOT NOTICED"
                wrong += told != "noticed"
                print(f"{row['case']}  {row['file']:24} {row['what']:60} {told}", flush=True)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
