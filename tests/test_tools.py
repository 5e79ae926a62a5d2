"""The command line: each command as a process, for people and for programs, and when things go wrong."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from conftest import eventually

import kvpool
from kvpool.tools import main as main_module

COMMAND = [sys.executable, "-P", "-m", "kvpool.tools.main"]
ENVIRONMENT = {**os.environ, "COLUMNS": "150"}


def kvpool_run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `kvpool ARGUMENTS`; its exit code must be `code`, and no traceback may show."""
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def kvpool_json(*arguments: object, code: int = 0):
    """Run `kvpool ARGUMENTS --json`: stdout is one JSON value and nothing else."""
    return json.loads(kvpool_run(*arguments, "--json", code=code).stdout)


def inside(*arguments: object, code: int = 0):
    """As `kvpool_run`, but in this process: for the many ways of being wrong."""
    result = CliRunner().invoke(main_module.main, list(map(str, arguments)))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def inside_json(*arguments: object, code: int = 0):
    """As `kvpool_json`, in this process."""
    return json.loads(inside(*arguments, "--json", code=code).stdout)


@pytest.fixture
def start():
    """Start `kvpool ARGUMENTS`; killed at the end of the test."""
    running = []

    def run(*arguments):
        running.append(subprocess.Popen([*COMMAND, *map(str, arguments)], text=True, env=ENVIRONMENT,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE))  # fmt: skip
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def shm_path(uri):
    return Path(f"/dev/shm/kvpool.{os.getuid()}.{uri.removeprefix('shm:')}")


@pytest.fixture
def filled(make_pool, identity):
    """A pool of 64 blocks, 16 of them live."""
    pool = make_pool(policy="lru")
    ns = pool.namespace(identity)
    keys = ns.keys(np.arange(16 * identity.block_tokens))
    ns.put(keys, [b"x" * 64] * len(keys))
    ns.match(keys).release()
    return pool


# ---- the frame ----


def test_help_names_every_command_and_imports_none(python):
    done = python("""
        import sys
        from kvpool.tools.main import main
        main(["--help"], standalone_mode=False)
        print([name for name in sys.modules if name.startswith(("kvpool.tools.", "rich", "multiprocessing.c"))])
    """)
    assert all(name in done.stdout for name in main_module.COMMANDS)
    assert done.stdout.splitlines()[-1] == "['kvpool.tools.console', 'kvpool.tools.main']"


@pytest.mark.parametrize("name", sorted(set(main_module.COMMANDS) - {"demo", "bench"}))
def test_each_command_has_help_and_json(name):
    text = inside(name, "--help").stdout
    assert "--json" in text
    assert text.startswith("Usage: ")


def test_version():
    assert kvpool.__version__ in kvpool_run("--version").stdout


@pytest.mark.parametrize("arguments", [["nothing"], ["stat"], ["stat", "--bogus", "shm:x"], ["create", "shm:x"],
                                       ["create", "shm:x", "--size", "1MiB", "--blocks", "3"],
                                       ["create", "shm:x", "--blocks", "3", "--policy", "best"],
                                       ["replay"], ["replay", "/no/such/file"]])  # fmt: skip
def test_wrong_command_lines_are_2(arguments):
    assert "Error:" in inside(*arguments, code=2).stderr


def test_a_missing_extra_is_one_line(monkeypatch):
    monkeypatch.setitem(main_module.COMMANDS, "demo", main_module.Lazy("absent", "", extra="demo"))
    result = CliRunner().invoke(main_module.main, ["demo"])
    assert result.exit_code == 1
    assert "pip install 'kvpool[demo]'" in result.output


def test_interrupts_and_system_errors_have_codes(monkeypatch):
    def command(error):
        @click.command()
        def fails():
            raise error

        return fails

    runner = CliRunner()
    monkeypatch.setattr(main_module, "load", lambda name: command(KeyboardInterrupt()))
    assert runner.invoke(main_module.main, ["ls"]).exit_code == 130
    monkeypatch.setattr(main_module, "load", lambda name: command(PermissionError(13, "Permission denied", "/x/y")))
    result = runner.invoke(main_module.main, ["ls"])
    assert (result.exit_code, result.output) == (1, "kvpool: /x/y: Permission denied\n")


# ---- create, ls, rm ----


def test_create_ls_rm(uri):
    made = kvpool_json("create", uri, "--blocks", 100, "--block", "8KiB", "--policy", "lfu", "--workers", 5)
    assert made["classes"] == [{"block_bytes": 8192, "blocks": 100}]
    assert (made["uri"], made["policy"], made["workers"], made["temporary"]) == (uri, "lfu", 5, False)
    assert made["bytes"] >= made["metadata_bytes"] + 100 * 8192
    row = next(row for row in kvpool_json("ls") if row["uri"] == uri)
    assert (row["state"], row["blocks"], row["live"], row["workers"]) == ("ok", 100, 0, 0)
    assert (row["policy"], row["bytes"]) == ("lfu", made["bytes"])
    assert kvpool_json("rm", uri) == {"removed": uri}
    assert all(row["uri"] != uri for row in kvpool_json("ls"))


def test_create_for_people(uri):
    shown = kvpool_run("create", uri, "--size", "8MiB", "--block", "64KiB", "--block", "360KiB").stdout
    assert uri in shown
    assert "blocks of 64 KiB" in shown
    assert "blocks of 360 KiB" in shown
    assert "metadata" in shown
    assert "huge pages" in shown
    assert "removed" in kvpool_run("rm", uri).stdout


def test_create_exists_and_replace(uri):
    kvpool_run("create", uri, "--blocks", 8)
    refused = kvpool_run("create", uri, "--blocks", 8, code=1)
    assert refused.stderr.startswith("kvpool: ")
    assert refused.stderr.count("\n") == 1
    assert kvpool_json("create", uri, "--blocks", 8, code=1)["code"] == kvpool.Exists.code
    kvpool_run("create", uri, "--blocks", 9, "--replace", "--threads", 1)
    assert kvpool_json("stat", uri)["classes"][0]["blocks"] == 9


def test_create_bad_sizes(uri, shm_path):
    for arguments in (["--size", "lots"], ["--size", "100"], ["--blocks", "0"], ["--blocks", "9", "--block", "100"]):
        assert inside_json("create", uri, *arguments, code=1)["code"] == kvpool.InvalidArgument.code
    assert inside_json("create", uri, "--size", "3000GiB", code=1)["code"] == kvpool.NoSpace.code
    assert inside_json("create", "nowhere:x", "--blocks", 3, code=1)["code"] == kvpool.InvalidArgument.code
    assert not shm_path.exists()


def test_a_memfd_pool_is_held_until_interrupted(start):
    process = start("create", "memfd:", "--blocks", 4, "--json")
    made = json.loads(process.stdout.readline())
    assert made["uri"].startswith(f"memfd:{process.pid}/")
    assert made["temporary"]
    assert kvpool_json("stat", made["uri"])["classes"][0]["blocks"] == 4
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "as long as a process holds it" in errors
    assert "Traceback" not in errors
    assert kvpool_json("stat", made["uri"], code=1)["code"] < 0


def test_interrupting_create_leaves_nothing(start, uri, shm_path):
    process = start("create", uri, "--size", "6GiB", "--threads", 1)
    watched = psutil.Process(process.pid)
    assert eventually(lambda: process.poll() is not None or watched.memory_info().rss > 200 << 20, 20)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, (output, errors)
    assert output == errors == ""
    assert not shm_path.exists()
    assert not list(Path("/dev/shm").glob(f"*{uri.removeprefix('shm:')}*"))


def test_ls_with_several_pools(uri):
    uris = [f"{uri}.{letter}" for letter in "abc"]
    try:
        for each in uris:
            kvpool.create(each, blocks=8).close()
        path = Path(f"/dev/shm/kvpool.{os.getuid()}.{uris[2].removeprefix('shm:')}")
        with path.open("r+b") as file:
            file.seek(100)
            file.write(b"\xff" * 8)
        rows = {row["uri"]: row for row in kvpool_json("ls")}
        assert [rows[each]["state"] for each in uris[:2]] == ["ok", "ok"]
        assert rows[uris[2]]["state"].startswith("damaged: ")
        assert rows[uris[2]]["blocks"] is None
        with kvpool.open(uris[0]) as pool:
            assert kvpool_json("ls")
            shown = kvpool_run("ls").stdout
            assert sum(w["state"] == "alive" for w in pool.stats()["worker_list"]) == 1
        line = next(line for line in shown.splitlines() if uris[0] in line)
        assert line.split()[1:3] == ["ok", "leaf"]
        assert line.split()[-1] == "1"
        assert "damaged: " in shown
    finally:
        for each in uris:
            kvpool.remove(each, force=True)


def test_ls_of_a_full_pool(uri):
    with kvpool.create(uri, blocks=8, workers=1):
        row = next(row for row in kvpool_json("ls") if row["uri"] == uri)
    assert row["state"] == "ok"
    assert row["code"] == kvpool.NoSlot.code


def test_rm_of_a_pool_in_use(uri, filled):
    assert kvpool_json("rm", uri, code=1)["code"] == kvpool.Busy.code
    kvpool_run("rm", uri, "--force")
    with pytest.raises(kvpool.Replaced):
        filled.evict(1)
    assert kvpool_json("rm", uri, code=1)["code"] == kvpool.NotFound.code


# ---- stat, check ----


def test_stat(uri, filled):
    stats = kvpool_json("stat", uri)
    assert stats["classes"][0]["live"] == 16
    assert (stats["published"], stats["hits"]) == (16, 16)
    assert [worker["state"] for worker in stats["worker_list"]] == ["alive", "alive"]
    shown = kvpool_run("stat", uri).stdout
    for text in (uri, "lru", "25.0%", "published", "alive (this)", str(os.getpid()), "hit ratio"):
        assert text in shown


def test_check(uri, filled):
    report = kvpool_json("check", uri)
    assert report["clean"]
    assert report["problems"] == []
    assert (report["blocks"]["live"], report["leaked"], report["pins"], report["entries"]) == (16, 0, 0, 16)
    assert f"{uri}: clean" in kvpool_run("check", uri).stdout


def damaged_at(offset):
    def damage(path):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff" * 8)

    return damage


DAMAGE = {
    "another's file": (lambda path: path.write_bytes(b"no pool at all\n" * 4096), kvpool.Foreign),
    "short": (lambda path: path.write_bytes(b"KVP"), kvpool.Truncated),
    "empty": (lambda path: path.write_bytes(b""), kvpool.Truncated),
    "cut": (lambda path: os.truncate(path, 8192), kvpool.Truncated),
    "flipped": (damaged_at(100), kvpool.Corrupt),
    "newer": (damaged_at(8), kvpool.VersionMismatch),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_no_whole_pool(tmp_path, kind):
    damage, error = DAMAGE[kind]
    path = tmp_path / "pool"
    uri = f"file:{path}"
    kvpool.create(uri, blocks=64, block="4KiB").close()
    damage(path)
    report = inside_json("check", uri, code=1)
    assert report["clean"] is False
    assert report["code"] == inside_json("stat", uri, code=1)["code"]
    assert issubclass(type(kvpool.bindings.errors.error_for(report["code"], "")), error)
    assert report["problems"][0] in inside("check", uri, code=1).stdout
    assert kvpool_run("stat", uri, code=1).stderr == f"kvpool: {report['problems'][0]}\n"


@pytest.mark.parametrize("command", ["stat", "top", "check", "rm"])
def test_unknown_pools(command, uri):
    failed = inside_json(command, uri, code=1)
    assert failed["code"] == kvpool.NotFound.code
    assert kvpool_run(command, uri, code=1).stderr == f"kvpool: {failed['error']}\n"
    assert inside_json(command, "what:ever", code=1)["code"] == kvpool.InvalidArgument.code


def test_no_permission(tmp_path, python):
    uri = f"file:{tmp_path}/pool"
    kvpool.create(uri, blocks=8).close()
    if os.getuid():
        (tmp_path / "pool").chmod(0)
    done = python("""
        import os, sys
        import kvpool.tools.inspect_state
        from kvpool.tools.main import main
        if os.getuid() == 0:
            os.seteuid(65534)
        main(["stat", "--json", sys.argv[1]])
    """, uri, check=False)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["code"] == kvpool.PermissionDenied.code


# ---- top ----


def test_top_counts_what_happens_between_ticks(uri, filled, identity, start):
    process = start("top", uri, "--ticks", 2, "--interval", 0.5, "--json")
    assert eventually(lambda: sum(w["state"] == "alive" for w in filled.stats()["worker_list"]) == 2)
    time.sleep(0.1)  # it looks as soon as it has joined
    ns = filled.namespace(identity)
    keys = ns.keys(np.arange(32 * identity.block_tokens))
    found = ns.lookup(keys)
    assert int((found != 0).sum()) == 16
    first, second = map(json.loads, process.communicate(timeout=20)[0].splitlines())
    assert process.returncode == 0
    assert (first["lookups"], first["hits"], first["hit_ratio"]) == (32, 16, 0.5)
    assert (second["lookups"], second["hit_ratio"]) == (0, None)
    mine = next(worker for worker in first["workers"] if worker["pid"] == os.getpid())
    assert mine["lookups_per_s"] == pytest.approx(32 / first["interval"])
    assert first["classes"][0]["live"] == 16
    assert first["pins"] == 0


def test_top_for_people(uri, filled):
    shown = kvpool_run("top", uri, "--once", "--interval", 0.05).stdout
    for text in (uri, "25.0%", "0 pins", "lookups/s", str(os.getpid())):
        assert text in shown


def test_top_tells_of_recoveries(uri, filled, python):
    python("import kvpool, os, sys; pool = kvpool.open(sys.argv[1]); os.kill(os.getpid(), 9)", uri, check=False)
    assert eventually(lambda: filled.stats()["recoveries"] == 1)
    tick = kvpool_json("top", uri, "--once", "--interval", 0.05)
    assert any("recovered by 0" in event for event in tick["events"])


def test_top_ends_on_interrupt(uri, filled, start):
    process = start("top", uri, "--interval", 0.05, "--json")
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (130, "")
    assert eventually(lambda: sum(w["state"] == "alive" for w in filled.stats()["worker_list"]) == 1)


def test_top_on_a_terminal_ends_on_q(uri, filled):
    """On a terminal it draws in place, reads single keys, and puts the terminal back."""
    import pty
    import termios

    leader, follower = pty.openpty()
    before = termios.tcgetattr(follower)
    process = subprocess.Popen([*COMMAND, "top", uri, "--interval", "0.1"], stdin=follower, stdout=follower,
                               stderr=follower, env={**ENVIRONMENT, "TERM": "xterm"})  # fmt: skip
    try:
        shown = b""

        def draws(text):
            nonlocal shown
            if select.select([leader], [], [], 0.05)[0]:
                shown += os.read(leader, 65536)
            return text in shown

        assert eventually(lambda: draws(b"lookups/s"), 20)
        os.write(leader, b"q")
        assert eventually(lambda: draws(b"never") or process.poll() is not None, 10)
        assert process.wait(1) == 0
        assert termios.tcgetattr(follower)[3] == before[3]
    finally:
        process.kill()
        os.close(leader)
        os.close(follower)


def test_top_ends_when_the_pool_is_removed(uri, filled, start):
    process = start("top", uri, "--interval", 0.05)
    process.stdout.readline()
    kvpool.remove(uri, force=True)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert errors.startswith("kvpool: the pool was removed or replaced")


# ---- hosts, give, fence ----


@pytest.fixture
def many(uri):
    """The URI of a simulated pool of three hosts, made by host 0 and not open."""
    name = uri.replace("shm:", "sim:")
    made = kvpool_json("create", name, "--blocks", 96, "--block", "4KiB", "--hosts", 3, "--lease", 0.5)
    assert (made["mode"], made["hosts"]) == ("sim", 3)
    yield name
    kvpool.remove(name, force=True)


def states(uri, *options):
    return [row["state"] for row in inside_json("hosts", uri, *options)["hosts"]]


def test_hosts_for_programs_and_people(many):
    with kvpool.open(many, host=1) as pool:
        report = inside_json("hosts", many)
        assert report["host"] == 1  # looked at from where somebody works, not as a host that nobody is
        assert [row["state"] for row in report["hosts"]] == ["left", "present", "free"]
        assert sum(row["segments"] for row in report["hosts"]) == pool.info["segments"]
        assert pool.hosts()[0]["state"] == "left"
        shown = kvpool_run("hosts", many).stdout
    assert f"{many}: sim, lease 500 ms" in shown
    assert "seen by host 1" in shown
    assert inside_json("hosts", many, "--host", 2)["host"] == 2
    assert inside_json("hosts", many, "--host", 3, code=1)["code"] == kvpool.WrongHost.code


def test_hosts_of_a_pool_of_one(uri, pool):
    (row,) = inside_json("hosts", uri)["hosts"]
    assert (row["host"], row["state"]) == (0, "present")


def test_give(many):
    with kvpool.open(many, host=1) as pool:
        before = pool.info["owned"]
        given = inside_json("give", many, "--host", 0, "--to", 1, "-n", 2)
        assert given == {"offered": 2, "taken": 2, "from": 0, "to": 1}
        assert pool.hosts()[1]["segments"] == before + 2
    assert "0 of 1 segments" in inside("give", many, "--host", 0, "--to", 2).stdout  # nobody is there to take it
    assert inside_json("give", many, "--host", 0, "--to", 0, code=1)["code"] == kvpool.OutOfRange.code
    with kvpool.open(many) as pool:
        assert pool.check().clean


def lose(uri, host):
    """Be a host for a moment, and be reset."""
    source = f"import kvpool, os; pool = kvpool.open({uri!r}, host={host}); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-P", "-c", source]).returncode == -9
    core = kvpool.bindings.core("sim")
    assert core.check(core.lib.kvp_pool_lose_host(uri.encode(), host)) >= 0


def test_fence(many):
    lose(many, 2)
    with kvpool.open(many, host=1) as pool:
        assert eventually(lambda: states(many)[2] == "lapsed", 20)
        fence = ("fence", many, 2, "--as-host", 1)
        assert "--confirmed" in inside(*fence, "--incarnation", 1, code=2).stderr
        assert inside_json(*fence, "--incarnation", 7, "--confirmed", code=1)["code"] == kvpool.InvalidArgument.code
        share = pool.hosts()[2]["segments"]
        adopted = inside_json(*fence, "--incarnation", 1, "--confirmed")
        assert adopted == {"fenced": 2, "incarnation": 1, "adopter": 1, "segments": share}
        assert states(many)[2] == "fenced"
        assert inside_json("hosts", many)["hosts"][2]["segments"] == 0
        assert pool.check().clean


def test_a_host_that_beats_is_not_fenced(many):
    with kvpool.open(many, host=2):
        refused = inside_json("fence", many, 2, "--as-host", 1, "--incarnation", 1, "--confirmed", code=1)
    assert refused["code"] == kvpool.Busy.code


def test_looking_does_not_wake_a_lost_host(many):
    lose(many, 0)
    with kvpool.open(many, host=1) as pool:
        lost = pool.hosts()[0]["incarnation"]
        for command in ("stat", "check", "hosts"):
            assert inside_json(command, many)
        assert inside_json("top", many, "--once", "--interval", 0.01)["uri"] == many
        assert pool.hosts()[0]["incarnation"] == lost
        assert eventually(lambda: pool.hosts()[0]["state"] == "lapsed")
        assert inside_json("stat", many)["host"] == 1
        assert inside_json("stat", many, "--host", 2)["host"] == 2


def test_the_host_of_the_environment(many, monkeypatch):
    monkeypatch.setenv("KVPOOL_HOST", "2")
    assert inside_json("stat", many)["host"] == 2
    assert inside_json("check", many)["clean"]


def test_ls_shows_modes_and_no_caches(many, uri):
    with kvpool.create(uri, blocks=64, block="4KiB", mode="noncoherent", hosts=2):
        rows = {row["uri"]: row for row in inside_json("ls")}
        name = many.removeprefix("sim:")
        assert (rows[many]["mode"], rows[many]["hosts"], rows[many]["state"]) == ("sim", 3, "ok")
        assert (rows[uri]["mode"], rows[uri]["hosts"], rows[uri]["workers"]) == ("noncoherent", 2, 1)
        assert [each for each in rows if name in each] in ([many, uri], [uri, many])
        assert not [each for each in rows if ".cache" in each or each.startswith("shm:host.")]
        assert "sim, 3 hosts" in inside("ls").stdout


def test_create_and_stat_of_a_device_for_many_hosts(tmp_path):
    uri = f"file:{tmp_path / 'pool'}"
    options = ("--mode", "noncoherent", "--hosts", 2, "--lease", 1.5, "--quota", 40)
    made = inside_json("create", uri, "--blocks", 64, "--block", "4KiB", *options)
    assert made["mode"] == "noncoherent"
    stats = inside_json("stat", uri)  # to look at it is allowed
    assert (stats["lease_ms"], stats["quota"], stats["qualification"]) == (1500, 40, None)
    assert "no (kvpool qualify)" in inside("stat", uri).stdout
    with pytest.raises(kvpool.Unqualified):
        kvpool.open(uri)
    inside("qualify", uri, "--rounds", 20)
    assert "by hosts 0, 1: 20 rounds" in inside("stat", uri).stdout
    kvpool.open(uri).close()
    kvpool.remove(uri)
