"""The check of what needs a GPU: run where there is one; elsewhere its own code, with a device that records."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("gpu_check.py")
NO_GPU = 77
torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.slow
def test_everything_that_needs_a_gpu():
    done = subprocess.run([sys.executable, "-P", SCRIPT], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    if done.returncode == NO_GPU:
        pytest.skip(told["skipped"])
    assert told["ok"], done.stdout


class CpuAsGpu(types.ModuleType):
    """torch, with the CPU in place of "cuda", whose copies are those of a recording device."""

    def __init__(self, device):
        super().__init__("torch")
        self.device_now = device
        self.cuda = types.SimpleNamespace(
            Event=self._event,
            synchronize=lambda: device().run(),
            current_stream=lambda: types.SimpleNamespace(cuda_stream=device().new_stream()),
        )

    def __getattr__(self, name):
        value = getattr(torch, name)
        if name not in ("randint", "zeros", "ones", "Generator", "empty"):
            return value

        def on_cpu(*arguments, **options):
            if options.get("device") == "cuda":
                options["device"] = "cpu"
            return value(*arguments, **options)

        return on_cpu

    def _event(self):
        made = types.SimpleNamespace()
        made.record = lambda: setattr(made, "cuda_event", self.device_now().new_event())
        return made

    def equal(self, a, b):
        self.device_now().run()
        return torch.equal(a, b)

    @staticmethod
    def as_tensor(array, device):
        return torch.from_numpy(np.asarray(types.SimpleNamespace(__array_interface__=array.__cuda_array_interface__)))


def test_the_script_itself(monkeypatch):
    """All of it but the kernel, which is tested elsewhere and slow on a CPU."""
    from kvpool.bindings.cuda import RecordingDevice

    sys_path = [str(SCRIPT.parent)]
    monkeypatch.setattr(sys, "path", sys_path + sys.path)
    import gpu_check

    monkeypatch.setattr(gpu_check, "BLOCKS", 140)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    devices = []

    def kind():
        devices.append(RecordingDevice(delta=0))
        return devices[-1]

    fake = CpuAsGpu(lambda: devices[-1])
    names = [each.__name__ for each in gpu_check.CHECKS if each.__name__ != "paged_attention"]
    results = gpu_check.run(kind, fake, names)
    assert set(results) == set(names)
    assert all(each["ok"] for each in results.values()), json.dumps(results, indent=1)
    for device in devices:
        assert device.balance()["registered"] == 0
        assert device.balance()["copies"] == 0
