"""The test's side of `vllm_driver.py`: a process with engines, as an object."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

DRIVER = Path(__file__).with_name("vllm_driver.py")


class DriverDied(Exception):
    """The process has ended; its log says why."""


class Client:
    """One driver process. Every verb of `Driver` is a method; `send` and `receive` are its halves."""

    def __init__(self, log, **environment):
        self.log_path = Path(log)
        self._log = self.log_path.open("a")
        path = os.pathsep.join([str(DRIVER.parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
            start_new_session=True,
        )
        self.receive()

    @property
    def pid(self):
        return self.process.pid

    def receive(self):
        for line in self.process.stdout:
            if line.startswith("@@"):
                value = json.loads(line[2:])
                if "error" in value:
                    raise RuntimeError(f"{value['error']} (see {self.log_path})")
                return value
            self._log.write(line)
            self._log.flush()
        tail = self.log_path.read_text()[-3000:]
        raise DriverDied(f"the driver ended with {self.process.wait()}: {tail}")

    def send(self, verb, **values):
        self.process.stdin.write(json.dumps({"verb": verb, **values}) + "\n")
        self.process.stdin.flush()

    def call(self, verb, **values):
        self.send(verb, **values)
        return self.receive()

    def engine(self, model, uri=None, /, *, extra=None, **values):
        """Start an engine, with the connector if a pool is given."""
        if uri is not None:
            values["extra"] = {"uri": uri, **(extra or {})}
        return self.call("engine", model=model, **values)

    def generate(self, *prompts, **values):
        return self.call("generate", prompts=prompts, **values)["outputs"]

    def run(self, code, **values):
        return self.call("run", code=code, **values)["result"]

    def reset(self, connector=False):
        return self.call("reset", connector=connector)["reset"]

    def log(self):
        return self.log_path.read_text()

    def kill(self):
        """SIGKILL of the process and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, 9)
        self.process.wait()

    def close(self):
        if self.process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self.send("quit")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.kill()
        self._log.close()


def same(first, second):
    """Tokens equal, and the cumulative log-probability to the last digit."""
    return first["tokens"] == second["tokens"] and first["logprob"] == second["logprob"]
