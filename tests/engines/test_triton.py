"""Runs triton_cases.py in a process of its own: triton chooses its interpreter when it is first imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")


def test_the_kernel_under_the_interpreter():
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            Path(__file__).with_name("triton_cases.py"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 12


PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvpool.bindings.torch import kernel

steps = ("i64",) * 3
kinds = {"tables": "*i32", "lengths": "*i32", "scale": "fp32", "window": "i32", "tokens": "i32", "table_step": "i32"}
kinds |= {f"{name}_step": steps for name in ("query", "key", "value", "out")}
for dtype, dim, tile, block in (("bf16", 128, 128, 16), ("fp16", 80, 128, 24), ("fp32", 64, 64, 64)):
    sizes = {"GROUP": 4, "BLOCK_TOKENS": block, "KEY_DIM": dim, "VALUE_DIM": dim, "ROWS": 16, "WIDEN": False}
    sizes |= {"COLUMNS": triton.next_power_of_2(block), "KEY_TILE": tile, "VALUE_TILE": tile}
    signature = kinds | {name: f"*{dtype}" for name in ("query", "keys", "values", "out")}
    signature |= dict.fromkeys(sizes, "constexpr")
    source = ASTSource(kernel._attend, signature=signature, constexprs=sizes)
    for capability in (80, 90):
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        print(dtype, capability, len(made.asm["cubin"]))
"""


def test_the_kernel_compiles_for_gpus():
    """To machine code, which needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 18
