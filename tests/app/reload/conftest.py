"""A machine without GPUs, for gateways that reload."""

import pytest

from engines.gpu import HostMemory


@pytest.fixture(autouse=True)
def free_gib(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Run on a machine without GPUs; return its free memory, which a test may change."""
    free = [100.0]
    monkeypatch.setattr("app.fleet.builder.find_accelerator", HostMemory)
    monkeypatch.setattr("app.fleet.resources.vllm_runs_on_cpu", lambda _: True)
    monkeypatch.setattr("app.fleet.resources.available_host_gib", lambda: free[0])
    return free
