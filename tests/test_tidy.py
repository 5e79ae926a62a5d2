"""The rules of the house, as tests: what a reader may rely on in every file."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("coherence", "allocator", "native")  # C, bottom up
# Python, bottom up
PACKAGES = {"kvpool.bindings": 0, "kvpool": 1, "kvpool.testing": 2, "kvpool.tools": 3, "kvpool.tools.rig": 3}
FOLDERS = {"bindings": 0, "pool": 1, "pool/testing": 2, "tools": 3, "tools/rig": 3}
# Engine adapters use the pool: they stand above it, although they live with the bindings.
ADAPTERS = ("cuda", "door", "lmcache", "sglang", "torch", "transformers", "vllm")
PACKAGES |= {f"kvpool.bindings.{each}": 2 for each in ADAPTERS}
FOLDERS |= {f"bindings/{each}": 2 for each in ADAPTERS}
LINES_MAX, FUNCTION_MAX, MEDIAN_MAX = 600, 70, 12

C_FILES = sorted(p for layer in LAYERS for p in (ROOT / layer).glob("*.[ch]"))
PYTHON_FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).glob("*.py"))
TESTS = sorted(
    p
    for pattern in ("*.py", "cases/*.py", "engines/*.py", "native/*.[ch]", "fuzz/*.c", "spin/*.pml")
    for p in (ROOT / "tests").glob(pattern)
)

# Atomics that are not words of the pool: private to one process, never in the mapping.
PRIVATE_ATOMICS = {
    "coherence/keeper.c": r"fork_count|cached|in_this_order",  # forks, boot id; what the kernel reads of a dead thread
    "coherence/copy.c": r"dummy|passed",  # a fence for the sanitizer; the crash counter
    "coherence/sim.c": r"__atomic_thread_fence",  # the simulated memory itself: its words are co_, its fences its own
    "native/pool.c": r"pool->(closed|copies|holders|joined)",  # the handle
    "native/copies.c": r"pool->copies",
    "native/holds.c": r"pool->holders",
    "native/policy.c": r"pool->used_count",
    "native/host.c": r"pool->used_count",
}
# Bulk copies above coherence/ may go to private memory only; one of them is argued.
INTO_THE_MAPPING = re.compile(r"\b(memcpy|memset|memmove)\s*\(\s*([^,]+),")
MAPPED = re.compile(r"mapping\.base|->data\b|->words|->tags|->hints|->scores|->slots|->pins|->logs|->directory|super\b")
ARGUED_COPIES = {
    ("native/host.c", "pool->host_mapping.base"),  # host memory before its host has started, under its lock
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_of(text: str) -> str:
    """C without comments, the line breaks kept."""
    return re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)


def functions(path: Path) -> list[tuple[str, int]]:
    """Name and length of each top-level C function, by its braces in column 0."""
    found, start, title = [], None, ""
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        if line == "{" and i and not lines[i - 1].startswith(("struct", "enum", "union")):
            start, title = i, lines[i - 1]
        elif line == "}" and start is not None:
            found.append((title, i - start + 1))
            start = None
    return found


def tracked() -> list[Path]:
    done = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a checkout")
    return [path for line in done.stdout.splitlines() if (path := ROOT / line).is_file()]


def test_includes_go_down():
    for path in C_FILES:
        layer = LAYERS.index(path.parent.name)
        for target in re.findall(r'#include "([^"]+)"', path.read_text()):
            folder = target.split("/")[0]
            assert folder in LAYERS, f"{name(path)} includes {target} without its layer"
            assert LAYERS.index(folder) <= layer, f"{name(path)} includes {target}, which is above it"


def imported(path: Path) -> list[str]:
    """Modules that a file imports; `from kvpool import x` also counts as kvpool.x."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: a relative import"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules


def package_of(module: str) -> str | None:
    return next((p for p in sorted(PACKAGES, key=len, reverse=True) if f"{module}.".startswith(f"{p}.")), None)


def rank_of(path: Path) -> int:
    """Of the folder, or of the adapter that the file is."""
    folder = str(path.parent.relative_to(ROOT))
    return FOLDERS.get(f"{folder}/{path.stem}", FOLDERS[folder])


def test_imports_go_down():
    for path in PYTHON_FILES:
        for module in imported(path):
            package = package_of(module)
            if package:
                assert PACKAGES[package] <= rank_of(path), f"{name(path)} imports {module}, above it"
            assert module.split(".")[0] not in (*FOLDERS, *LAYERS), f"{name(path)} imports {module} past its package"


def test_shared_words_only_through_their_macros():
    for path in C_FILES:
        if name(path) == "coherence/words.h":
            continue
        allowed = PRIVATE_ATOMICS.get(name(path), r"(?!)")
        for number, line in enumerate(code_of(path.read_text()).splitlines(), 1):
            assert not re.search(r"\.(co32|co64|nc64)\b|->(co32|co64|nc64)\b", line), f"{name(path)}:{number}: {line}"
            assert "__atomic_" not in line or re.search(allowed, line), f"{name(path)}:{number}: {line}"
            assert not re.search(r"\bvolatile\b(?!\s*\()", line.replace("__asm__ volatile", "")), name(path)


def test_copies_into_the_pool_only_below():
    for path in C_FILES:
        if path.parent.name == "coherence":
            continue
        for call in INTO_THE_MAPPING.finditer(code_of(path.read_text())):
            target = call[2].strip()
            assert not MAPPED.search(target) or (name(path), target) in ARGUED_COPIES, f"{name(path)}: {call[0]}"


def test_every_fence_says_why():
    fence = re.compile(r"\b(nc_full|nc_write|nc_read|co_full)_fence\(\)")
    for path in C_FILES:
        if name(path) == "coherence/words.h":
            continue
        lines = path.read_text().splitlines()
        for i, line in enumerate(lines):
            if fence.search(line):
                near = "\n".join(lines[max(0, i - 3) : i + 1])
                assert "/*" in near or "*/" in near, f"{name(path)}:{i + 1}: a fence without a reason"


def test_functions_are_short():
    lengths = [(length, title, name(path)) for path in C_FILES for title, length in functions(path)]
    assert len(lengths) > 150
    longest = max(lengths)
    assert longest[0] <= FUNCTION_MAX, longest
    assert statistics.median(length for length, _, _ in lengths) <= MEDIAN_MAX
    for path in TESTS:
        assert all(length <= FUNCTION_MAX for _, length in functions(path)) or path.suffix == ".py", name(path)


def test_python_functions_are_short():
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= FUNCTION_MAX, f"{name(path)}:{node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", [*C_FILES, *PYTHON_FILES, *TESTS], ids=name)
def test_file(path):
    lines = path.read_text().splitlines()
    assert len(lines) < LINES_MAX, f"{len(lines)} lines"
    assert not [i for i, line in enumerate(lines, 1) if line != line.rstrip()], "white space at a line's end"
    assert not [i for i, line in enumerate(lines, 1) if re.search(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b", line)]
    if path.suffix in (".c", ".h", ".pml"):
        assert lines[0].startswith(f"/* {path.name} -- "), "the first line says what the file is for"


def test_markdown_has_one_title():
    files = [path for path in tracked() if path.suffix == ".md"]
    for path in files:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, name(path)
    if not files:
        pytest.skip("no markdown yet")


def test_no_path_of_one_machine():
    paths = re.compile(r"/(work|root)/")
    for path in tracked():
        if path == Path(__file__) or path.suffix in (".png", ".gguf"):
            continue
        assert not paths.search(path.read_text(errors="replace")), name(path)
