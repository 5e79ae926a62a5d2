"""The explorer of tests/explorer: built once for an unchanged tree, called for one scenario at a time.

python tests/explorer_build.py    builds it and prints where it is
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import native_build as build

HERE = build.ROOT / "tests" / "explorer"
FLAGS = ("-DKVP_MODE=3", f"-I{HERE}", f"-fmacro-prefix-map={build.ROOT}/=", "-no-pie")
LEFT_OUT = {"qualify.c"}  # litmus tests of real memory
BOTTOM = {"log.c", "hosts.c", "gate.c"}  # of coherence/; what the rest does is the explorer's own
EXPLORED = [
    source
    for source in build.SOURCES
    if source.name not in LEFT_OUT and (source.parent.name != "coherence" or source.name in BOTTOM)
]
# What a site may be without; words are loaded and stored by all of the code.
ORDERING = ("write_back", "invalidate", "write_fence", "read_fence", "full_fence", "host_fence")
BATCHED = ("lines_end", "lines_note")
NEEDED = (*ORDERING, *BATCHED)
KINDS = (*NEEDED, "cas", "change")
MACRO = re.compile(
    r"\b(?:nc_(write_back|invalidate|write_fence|read_fence|full_fence)|(co)_full_fence|kvp_(lines_end|lines_note)|"
    r"(?:nc|co)_(cas)(?:32)?|co_(exchange|add|or|and)(?:32)?)\s*\("
)


def _digest(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr(flags).encode())
    for path in sorted(
        p for folder in (*build.FOLDERS, "tests/explorer") for p in (build.ROOT / folder).glob("*.[ch]")
    ):
        digest.update(str(path.relative_to(build.ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def explorer(*flags: str) -> Path:
    """The program; by default optimised."""
    build.need("gcc")
    flags = flags or ("-O2",)
    folder = build.ROOT / "build" / "explorer" / _digest(flags)
    with build.alone(folder.parent):
        if not (folder / "explorer").exists():
            _build(folder, flags)
    return folder / "explorer"


def _build(folder: Path, flags: tuple[str, ...]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = ["gcc", "-std=gnu11", f"-I{build.ROOT}", "-g", *build.WARNINGS, *build.STRICT, *FLAGS, *flags]
    objects = []
    for source in [*EXPLORED, *sorted(HERE.glob("*.c"))]:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        before = ["-include", HERE / "standins.h"] if source in EXPLORED else []
        build.run([*command, *before, "-c", source, "-o", target])
        objects.append(target)
    build.run(["gcc", "-no-pie", *flags, *objects, "-o", folder / "explorer.part"])
    (folder / "explorer.part").rename(folder / "explorer")


def run(scenario: str, *options: str, program: Path | None = None, timeout: float = 600) -> dict[str, object]:
    """What one exploration found."""
    done = subprocess.run(
        [program or explorer(), "run", scenario, "quiet", *options],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    output = done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode in (0, 1), f"{scenario} {options}: exit {done.returncode}\n{output}"
    lines = done.stdout.splitlines()
    result = json.loads(next(line for line in lines if line.startswith("{")))
    told = [words for line in lines if len(words := line.split()) == 3 and words[0] == "passed"]
    result["passed"] = {site: int(count) for _, site, count in told}
    return result


@functools.cache
def scenarios() -> dict[str, str]:
    """Name and description of each."""
    lines = build.run([explorer(), "list"]).splitlines()
    return {name: what.strip() for name, _, what in (line.partition(" ") for line in lines)}


def all_sites() -> list[str]:
    """FILE:LINE:KIND of each use of a macro."""
    return [site.removeprefix("./") for site in build.run([explorer(), "sites"]).splitlines()]


def compiled_sites() -> list[str]:
    """Those in production code that could be missing."""
    return sorted(site for site in all_sites() if not site.startswith("tests/") and site.rsplit(":", 1)[1] in KINDS)


def source_sites() -> list[str]:
    """The same by reading the sources: FILE:LINE:KIND, a macro at the line where it begins."""
    sites = []
    headers = [path for folder in build.FOLDERS for path in (build.ROOT / folder).glob("*.h") if path.name != "words.h"]
    for path in sorted([*EXPLORED, *headers]):
        text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), path.read_text(), flags=re.DOTALL)
        for match in MACRO.finditer(text):
            if text[: match.start()].rsplit("\n", 1)[-1].lstrip().startswith(("#define", "static inline")):
                continue
            plain, host, lines, cas, _ = match.groups()
            kind = plain or lines or cas or ("host_fence" if host else "change")
            line = text.count("\n", 0, match.start()) + 1
            sites.append(f"{path.relative_to(build.ROOT)}:{line}:{kind}")
    return sites


if __name__ == "__main__":
    print(explorer())
