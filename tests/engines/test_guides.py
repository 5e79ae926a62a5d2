"""docs/engines: the code of the pages runs, and their start lines name what exists."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "engines"
PAGES = ("cuda", "lmcache", "sglang", "torch", "transformers")


def text(page):
    return (GUIDES / f"{page}.md").read_text()


def code(page):
    return re.findall(r"^```python\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def configurations(page):
    """The JSON arguments of the commands of a page."""
    commands = re.findall(r"^((?:    .*\n)+)", text(page), re.MULTILINE)
    words = [word for command in commands for word in shlex.split(command)]
    return [json.loads(word) for word in words if word.startswith("{")]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_says_what_it_must(page):
    titles = re.findall(r"^## (.*)", text(page), re.MULTILINE)
    assert titles == ["Install", "Start", "What is shared", "What identity covers", "How to see hits", "Limits"]


@pytest.mark.parametrize("page", ["torch", "transformers"])
def test_the_code_runs(page, capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip(page, reason=f"{page} is not installed")
    for block in code(page):
        exec(compile(block, f"{page}.md", "exec"), {"__name__": page})
    told = capsys.readouterr().out
    assert told.strip()
    assert page != "transformers" or "96 of 100 tokens were there" in told


def test_the_code_for_gpus_is_python():
    from kvpool.bindings import cuda

    for block in code("cuda"):
        names = [
            alias.name
            for node in ast.walk(ast.parse(block))
            if isinstance(node, ast.ImportFrom) and node.module == "kvpool.bindings.cuda"
            for alias in node.names
        ]
        assert names
        assert all(hasattr(cuda, name) for name in names)


def test_the_parameters_for_lmcache_are_those_of_the_client():
    from kvpool.bindings import lmcache

    adapter = next(each for each in configurations("lmcache") if each.get("type") == "native_plugin")
    assert adapter["module_path"] == lmcache.__name__
    known = set(inspect.signature(getattr(lmcache, adapter["class_name"])).parameters)
    assert set(adapter["adapter_params"]) <= known
    told = re.search(r"^Parameters: (.*?)\n\n", text("lmcache"), re.DOTALL | re.MULTILINE)[1]
    assert set(re.findall(r"`(\w+)`", told)) == known


def test_the_extra_config_for_sglang_is_whole():
    (extra,) = configurations("sglang")
    assert extra["module_path"] == "kvpool.bindings.sglang"
    assert f"class {extra['class_name']}(" in (GUIDES.parents[1] / "bindings" / "sglang.py").read_text()
    assert {"backend_name", "interface_v1", "uri", "revision"} <= set(extra)
