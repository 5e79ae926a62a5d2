"""One guest: a QEMU process, a serial line to its agent, and what it printed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import click

from kvpool.tools.rig.image import loader

__all__ = ["Failed", "Guest", "Machine", "Memory", "Shape", "boot", "find_qemu"]

BOOT_S, ANSWER_S = 120.0, 240.0
"""Of a guest's own processor time: what others leave to it is nobody's failure."""
STILL_S = 1800.0
"""Of the clock: a guest that hangs without doing anything."""
TICKS = os.sysconf("SC_CLK_TCK")


class Failed(click.ClickException):
    """A guest did not do what it should have done."""


@dataclass(frozen=True)
class Machine:
    """What every guest needs."""

    qemu: list[str]
    kernel: Path
    image: Path
    folder: Path
    """For what guests print."""


def find_qemu(root: Path) -> list[str]:
    """An unpacked QEMU and where its firmware lies."""
    program = [*loader(root), str(root / "usr/bin/qemu-system-x86_64")]
    return [*program, "-L", str(root / "usr/share/qemu"), "-L", str(root / "usr/share/seabios")]


@dataclass(frozen=True)
class Shape:
    """What a guest is made of: arguments of QEMU and words of the kernel's command line."""

    arguments: list[str]
    board: str = "q35"
    processor: str = "max"
    memory: str = "1G"
    words: str = ""
    ready: list[str] = field(default_factory=list)
    """Commands that bring the device up in the guest."""


class Guest:
    """A guest that runs. A context manager: it is ended with the `with`.

    It leaves nothing, however the rig ends: the kernel ends it with the thread that has started it (so the rig may die
    by any signal), and neither its line nor its memory has a name.
    """

    def __init__(self, machine: Machine, name: str, shape: Shape) -> None:
        self.name, self.machine, self.shape = name, machine, shape
        self.console = machine.folder / f"{name}.log"
        self._rest = b""
        self._link, theirs = socket.socketpair()
        with theirs, (machine.folder / f"{name}.qemu.log").open("wb") as log:
            command = ["setpriv", "--pdeathsig", "KILL", *self._command(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                             pass_fds=(theirs.fileno(),))  # fmt: skip

    def _command(self, line: int) -> list[str]:
        shape, machine_id = self.shape, self.name.encode().hex().ljust(32, "0")
        words = f"console=ttyS0 quiet panic=-1 no_timer_check nowatchdog machine={machine_id} {shape.words}"
        return [
            *self.machine.qemu, "-accel", "tcg,thread=multi", "-M", shape.board, "-cpu", shape.processor, "-smp", "2",
            "-m", shape.memory, "-kernel", str(self.machine.kernel), "-initrd", str(self.machine.image),
            "-append", words, "-display", "none", "-vga", "none", "-monitor", "none", "-no-reboot", "-net", "none",
            "-serial", f"file:{self.console}", "-chardev", f"socket,id=agent,fd={line}",
            "-serial", "chardev:agent", *shape.arguments,
        ]  # fmt: skip

    # ---- talking ----

    def _spent(self) -> float:
        """Seconds of processor time it has had."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def _demand_life(self) -> None:
        if self._process.poll() is not None:
            raise Failed(f"guest {self.name} has ended ({self._process.returncode}): {self.last_words()}")

    def last_words(self) -> str:
        """The end of what QEMU and the guest printed."""
        logs = (self.machine.folder / f"{self.name}.qemu.log", self.console)
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in logs if path.exists()).strip()

    def receive(self, patience: float = ANSWER_S) -> Any:
        """The next answer. Raises `Failed` if it is an error of the agent's own, or does not come."""
        most, latest = self._spent() + patience, time.monotonic() + STILL_S
        self._link.settimeout(0.5)
        while b"\n" not in self._rest:
            self._demand_life()
            if self._spent() > most or time.monotonic() > latest:
                raise Failed(f"guest {self.name} does not answer: {self.last_words()}")
            with contextlib.suppress(TimeoutError):
                self._rest += self._link.recv(65536)
        line, self._rest = self._rest.split(b"\n", 1)
        answer = json.loads(line)
        if answer.get("kind") == "crash":
            raise Failed(f"guest {self.name}: {answer['error']}")
        return answer

    def send(self, do: str, **arguments: Any) -> None:
        """Ask for something; the answer is to be received."""
        self._link.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def ask(self, do: str, **arguments: Any) -> Any:
        """Ask and wait; raises `Failed` if the pool says no."""
        self.send(do, **arguments)
        return self.result()

    def result(self) -> Any:
        """The result of what was asked."""
        answer = self.receive()
        if "error" in answer:
            raise Failed(f"guest {self.name}: {answer['kind']}: {answer['error']}")
        return answer["ok"]

    def refusal(self, do: str, **arguments: Any) -> tuple[str, str]:
        """Ask for what must be refused; the class of the error, and its text."""
        self.send(do, **arguments)
        answer = self.receive()
        if "error" not in answer:
            raise Failed(f"guest {self.name}: {do} {arguments} was to be refused, and gave {answer['ok']}")
        return answer["kind"], answer["error"]

    def run(self, command: str) -> str:
        """A shell command that must succeed; what it printed."""
        done = self.ask("shell", command=command)
        if done["code"]:
            raise Failed(f"guest {self.name}: {command}: exit code {done['code']}: {done['out']}{done['err']}")
        return str(done["out"])

    def kvpool(self, *arguments: str, code: int = 0) -> str:
        """The command `kvpool`; what it printed, errors included."""
        done = self.ask("command", arguments=list(arguments))
        text = f"{done['out']}{done['err']}".strip()
        if done["code"] != code:
            raise Failed(f"guest {self.name}: kvpool {' '.join(arguments)}: exit code {done['code']}: {text}")
        return text

    # ---- life ----

    def wait_ready(self) -> Guest:
        """Until its agent answers and its device is there."""
        self.receive(BOOT_S)
        for command in self.shape.ready:
            self.run(command)
        return self

    def kill(self) -> None:
        """End it at whatever instruction it is: the death of a host."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._link.close()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def boot(*guests: Guest) -> None:
    """Wait for guests that were started together."""
    for guest in guests:
        guest.wait_ready()


class Memory:
    """A device's memory, all zero at first; guests that share it map it. It is gone with the last of them.

    A context manager.
    """

    def __init__(self, name: str, size: int) -> None:
        self.file = os.memfd_create(f"kvpool-rig.{name}")
        os.ftruncate(self.file, size)

    @property
    def path(self) -> str:
        """For QEMU."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @property
    def uri(self) -> str:
        """For a pool on this machine."""
        return f"memfd:{os.getpid()}/{self.file}"

    def write(self, at: int, data: bytes) -> None:
        """Write from below the guests."""
        os.pwrite(self.file, data, at)

    def read(self, at: int, size: int) -> bytes:
        """Read from below the guests."""
        return os.pread(self.file, size, at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.file)
