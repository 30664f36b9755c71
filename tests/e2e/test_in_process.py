"""An engine in the gateway's own process, on real vLLM: its start, its deaths, its end."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from engines.guard.marked_processes import find_marked
from tests.e2e.deployment import (
    CANARY,
    ENGINE_WITH_WORKER,
    SECRETS,
    START_S,
    Deployment,
    alive,
    demo_model,
    deployed,
    environment,
    run,
    traces,
    until_ready,
    use_known_flags,
    write_config,
)
from tests.e2e.test_engine_environment import assert_serves_without_secrets
from tests.forked import run_forked
from tests.waiting import poll_until

IN_PROCESS: dict[str, Any] = {**ENGINE_WITH_WORKER, "kind": "in_process"}
DEMO: dict[str, Any] = {"name": "demo", "engines": [IN_PROCESS]}
HELLO: dict[str, Any] = {
    "model": "demo",
    "temperature": 0,
    "messages": [{"role": "user", "content": "Hello!"}],
}


def engine_processes(deployment: Deployment) -> list[int]:
    """EngineCore and its worker, the one that was started first at the front."""
    return sorted(find_marked(str(deployment.run_dir / "demo-0")))


def engine_core(deployment: Deployment) -> int:
    """The one whose parent is the gateway."""
    [core] = (
        pid
        for pid in engine_processes(deployment)
        if psutil.Process(pid).ppid() == deployment.process.pid
    )
    return core


def answer(client: httpx.Client) -> str:
    reply = client.post("/v1/chat/completions", json=HELLO)
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def events(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def test_dead_engine_core_is_replaced_and_nothing_outlives_the_gateway_or_has_its_secrets(
    tmp_path: Path,
) -> None:
    demo_model()
    secrets = dict.fromkeys(SECRETS, CANARY)
    elsewhere = {"kind": "remote", "url": "http://127.0.0.1:9", "api_key_env": SECRETS[-1]}
    models = DEMO, {"name": "elsewhere", "engines": [elsewhere]}
    with deployed(tmp_path, *models, variables=secrets) as deployment:
        with deployment.client() as client:
            # It loads in a thread: the gateway answers meanwhile.
            poll_until(lambda: len(engine_processes(deployment)) > 0, START_S)
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
            until_ready(deployment)
            first = engine_processes(deployment)
            host = deployment.process.pid
            left = traces(deployment, [*map(psutil.Process, [host, *first])])
            said = answer(client)
            # Forked from EngineCore, and repaired as it is.
            log = (deployment.run_dir / "demo-0" / "engine.log").read_text()
            assert re.search(r"\(VllmWorker-0 .*keeps generators of seeds from samples", log)
            assert_serves_without_secrets(deployment, map(psutil.Process, first))

            work = {**HELLO, "stream": True, "n": 64, "temperature": 1, "ignore_eos": True}
            with client.stream("POST", "/v1/chat/completions", json=work) as stream:
                arriving = events(stream)
                seen = [next(arriving)]
                os.kill(engine_core(deployment), signal.SIGKILL)
                seen.extend(arriving)
            assert "[DONE]" not in seen
            assert json.loads(seen[-1])["error"]["code"] == "engine_failed"

            poll_until(lambda: "engine demo-0 restarts in 1 s" in deployment.said(), 60)
            poll_until(lambda: client.get("/ready").status_code == 200, START_S)
            second = engine_processes(deployment)
            assert second
            assert not [path for path in left if path.is_file()], "the directory is in use again"
            left = traces(deployment, [*map(psutil.Process, [host, *second])])
            assert not set(first) & set(second)
            assert answer(client) == said
            log = deployment.said()
            assert "it died while serving: EngineCore was killed by SIGKILL" in log
            assert "Traceback" not in log
            assert "vllm." not in log, "vLLM's own lines are in the engine's log"

        family = [*deployment.family(), *map(psutil.Process, second)]
        deployment.process.kill()
        deployment.process.wait()
        poll_until(lambda: not any(alive(process) for process in family), 10)
        assert not [path for path in left if path.exists()]


def failure(deployment: Deployment, name: str) -> str:
    """Return why an engine failed to start, by the log; "" if it has not yet."""
    mark = f"engine {name}-0 failed: "
    lines = (line for line in deployment.said().splitlines() if mark in line)
    return next((json.loads(line)["event"].partition(mark)[2] for line in lines), "")


def test_failing_engines_are_explained_and_sigterm_while_another_loads_leaves_no_process(
    tmp_path: Path,
) -> None:
    demo_model()
    divided = {**IN_PROCESS, "args": {**IN_PROCESS["args"], "tensor-parallel-size": 3}}
    models = [
        {"name": "missing", "engines": [{**IN_PROCESS, "model": "/nonexistent/model"}]},
        {"name": "flag", "engines": [{**IN_PROCESS, "args": {"no-such-flag": 3}}]},
        {"name": "heads", "engines": [divided]},
        DEMO,
    ]
    with deployed(tmp_path, *models) as deployment:
        poll_until(lambda: failure(deployment, "heads"), START_S)
        poll_until(lambda: len(engine_processes(deployment)) > 0, START_S)
        assert "serves on" not in deployment.said()
        family = deployment.family()
        assert deployment.terminate() == 0
        assert engine_processes(deployment) == []
        assert not [process for process in family if alive(process)]
    assert failure(deployment, "missing") == "model directory /nonexistent/model does not exist"
    assert failure(deployment, "flag") == (
        "unrecognized arguments: --no-such-flag=3; remove no-such-flag from args"
    )
    assert failure(deployment, "heads") == (
        "Total number of attention heads (4) must be divisible by tensor parallel size (3); "
        "set args: tensor-parallel-size to a divisor of 4: 1, 2, 4"
    )
    assert "Traceback" not in deployment.said()


def test_gateway_of_which_no_engine_can_start_exits_2(tmp_path: Path) -> None:
    missing = {"name": "missing", "engines": [{**IN_PROCESS, "model": "/nonexistent/model"}]}
    use_known_flags(tmp_path / "run")
    ended = run("serve", "--config", str(write_config(tmp_path, missing)))
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if line.startswith("vllm-gateway: ")]
    fault = "model directory /nonexistent/model does not exist"
    assert lines == [f"vllm-gateway: engine missing-0: {fault}"]
    assert "Traceback" not in ended.stderr


def test_check_prints_what_would_run_and_what_is_missing(tmp_path: Path) -> None:
    use_known_flags(tmp_path / "run")

    def check(*models: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        file = write_config(tmp_path, *models)
        return run_forked("check", "--config", str(file), env=environment(), cwd=tmp_path)

    ended = check(DEMO)
    assert ended.returncode == 0, ended.stderr
    assert "in this process: --model=" in ended.stdout
    missing = {"name": "m", "engines": [{**IN_PROCESS, "model": "/nonexistent/model"}]}
    ended = check(missing)
    assert ended.returncode == 2
    assert "model directory /nonexistent/model does not exist" in ended.stderr
