"""The clients: the task of each, and a line about its result."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from engines.demo.dialogues import DIALOGUES
from tests.clients.coding_agents import claude_code, codex
from tests.clients.environments import programs
from tests.clients.running import ClientFault, Gateway, blocks, environment, run
from tests.docs.page import Block
from tests.e2e.deployment import ADMIN_KEY, MODEL
from tests.gateway import free_port
from tests.waiting import poll_until

START_S = 180.0
ANSWERS = {dialogue.question: dialogue.answer for dialogue in DIALOGUES}
HELLO = ANSWERS["Hello!"]
CAPITAL = "What is the capital of France?"
BROWSER = Path(__file__).with_name("gradio_browser.py")


def openai_python(gateway: Gateway) -> str:
    return _expect(_python(gateway, blocks("python")[0], Path(sys.executable)), HELLO)


def anthropic_python(gateway: Gateway) -> str:
    return _expect(_python(gateway, blocks("python")[1], Path(sys.executable)), HELLO)


def openai_javascript(gateway: Gateway) -> str:
    directory = programs("node")
    [block] = blocks("javascript", "node")
    file = directory / "page.mjs"
    file.write_text(gateway.here(block.text))
    return _expect(run(gateway, "node", str(file)), HELLO)


def langchain(gateway: Gateway) -> str:
    [block] = blocks("python", "langchain")
    printed = _python(gateway, block, programs("langchain") / "python")
    return _expect(printed, HELLO, HELLO, str([("get_weather", {"city": "Paris"})]))


def llama_index(gateway: Gateway) -> str:
    [block] = blocks("python", "llama-index")
    return _expect(_python(gateway, block, programs("llama-index") / "python"), HELLO, HELLO)


def gradio(gateway: Gateway) -> str:
    """Two messages, as from a browser: the second one carries the first as Gradio keeps it."""
    python = programs("gradio") / "python"
    [block] = blocks("python", "gradio")
    file = gateway.directory / "gradio_page.py"
    file.write_text(gateway.here(block.text))
    port = free_port()
    variables = {"GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False"}
    url = f"http://127.0.0.1:{port}/"
    with _serving(gateway, url, [str(python), str(file)], variables):
        printed = run(gateway, str(python), str(BROWSER), url, "Hello!", CAPITAL)
    said = [text for text, _ in json.loads(printed)]
    if said != ["Hello!", HELLO, CAPITAL, ANSWERS[CAPITAL]]:
        raise ClientFault(printed)
    return f"two messages: {said[1]} {said[3]}"


def open_webui(gateway: Gateway) -> str:
    """Sign up, chat plain and streamed, unload and load, through the API of Open WebUI's pages."""
    bin_directory = programs("open-webui")
    [block] = blocks("console", "open-webui")
    port = free_port()
    script = gateway.here(re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE))
    script = script.replace("--port 3000", f"--port {port}").replace(
        "open-webui serve", "exec open-webui serve"
    )
    variables = {
        "KEY": _key_that_loads(gateway),
        "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}",
        "DATA_DIR": str(gateway.directory / "open-webui"),
        "WEBUI_SECRET_KEY": "of-a-test",
        "HF_HUB_OFFLINE": "1",
    }
    (gateway.directory / "open-webui").mkdir()
    url = f"http://127.0.0.1:{port}"
    with (
        _serving(gateway, f"{url}/health", ["bash", "-ec", script], variables),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        account = {"name": "A", "email": "a@example.com", "password": "Of-a-test-1"}
        token = client.post("/api/v1/auths/signup", json=account).raise_for_status().json()["token"]
        client.headers["authorization"] = f"Bearer {token}"
        models = [m["id"] for m in client.get("/api/models").raise_for_status().json()["data"]]
        ask = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}]}
        plain = client.post("/api/chat/completions", json={**ask, "stream": False})
        answer = plain.raise_for_status().json()["choices"][0]["message"]["content"]
        streamed = client.post("/api/chat/completions", json={**ask, "stream": True})
        events = re.findall(r"^data: (\{.*)$", streamed.raise_for_status().text, re.MULTILINE)
        deltas = [choice["delta"] for e in events for choice in json.loads(e)["choices"]]
        states = _unload_and_load(client)
    text = "".join(delta.get("content") or "" for delta in deltas)
    if (answer, text) != (HELLO, HELLO) or "demo" not in models:
        raise ClientFault(f"models {models}, plain {answer!r}, streamed {text!r}")
    return f"models {', '.join(models)}; {text} {' → '.join(states)}"


def _key_that_loads(gateway: Gateway) -> str:
    """Return a new client key with `may_load_models`."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    body = {"name": "open-webui", "may_load_models": True}
    made = httpx.post(f"{gateway.url}/admin/keys", headers=headers, json=body)
    key: str = made.raise_for_status().json()["key"]
    return key


def _unload_and_load(client: httpx.Client) -> list[str]:
    """Press the buttons of the model menu and of the page of models; return the states shown."""

    def state() -> str:
        catalog = client.get("/openai/models/0/catalog").raise_for_status().json()["data"]
        return next(str(model["status"]["value"]) for model in catalog if model["id"] == "demo")

    def dot() -> bool:
        models = client.get("/api/models?refresh=true").raise_for_status().json()["data"]
        return next(bool(model["loaded"]) for model in models if model["id"] == "demo")

    def load() -> None:
        client.post("/openai/models/0/load", json={"model": "demo"}).raise_for_status()
        poll_until(lambda: state() == "loaded", START_S)

    states, dots = [state()], [dot()]
    unload = {"model": "demo", "instance_id": "demo"}
    client.post("/openai/models/0/unload", json=unload).raise_for_status()
    poll_until(lambda: state() == "unloaded", START_S)
    states, dots = [*states, state()], [*dots, dot()]
    load()
    states, dots = [*states, state()], [*dots, dot()]
    client.post("/api/models/unload", json={"model": "demo"}).raise_for_status()
    poll_until(lambda: state() == "unloaded", START_S)
    load()
    if states != ["loaded", "unloaded", "loaded"] or dots != [True, False, True]:
        raise ClientFault(f"states {states}, dots {dots}")
    return states


def vllm_bench(gateway: Gateway) -> str:
    """vLLM's command as it is, with the gateway's key."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    base = ("--base-url", gateway.url, "--model", "demo", "--tokenizer", str(MODEL))
    return _bench(gateway, vllm, "bench", "serve", *base)


def gateway_bench(gateway: Gateway) -> str:
    command = str(Path(sys.executable).with_name("vllm-gateway"))
    return _bench(gateway, command, "bench", "--tokenizer", str(MODEL))


def _bench(gateway: Gateway, *command: str) -> str:
    load = ("--num-prompts", "50", "--input-len", "64", "--output-len", "16")
    printed = run(gateway, *command, *load)
    counts = re.findall(r"^(?:Successful|Failed) requests: +(\d+)", printed, re.MULTILINE)
    if counts != ["50", "0"]:
        raise ClientFault(printed)
    rate = re.search(r"^Output token throughput \(tok/s\): +([\d.]+)", printed, re.MULTILINE)
    return f"50 of 50 requests, {rate[1] if rate else '?'} tokens/s"


CLIENTS: Mapping[str, Callable[[Gateway], str]] = {
    "openai-python": openai_python,
    "openai-javascript": openai_javascript,
    "anthropic-python": anthropic_python,
    "langchain": langchain,
    "llama-index": llama_index,
    "gradio": gradio,
    "open-webui": open_webui,
    "codex": codex,
    "claude-code": claude_code,
    "vllm-bench-serve": vllm_bench,
    "vllm-gateway-bench": gateway_bench,
}


def _python(gateway: Gateway, block: Block, python: Path) -> str:
    file = gateway.directory / "page.py"
    file.write_text(gateway.here(block.text))
    return run(gateway, str(python), str(file))


@contextmanager
def _serving(
    gateway: Gateway, url: str, command: list[str], variables: Mapping[str, str]
) -> Iterator[None]:
    """Run a server of a client's; it answers when the body begins."""
    log = gateway.directory / "serving.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=gateway.directory,
            env={**environment(gateway), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def answers() -> bool:
        if process.poll() is not None:
            raise ClientFault(log.read_text())
        try:
            return httpx.get(url).is_success
        except httpx.TransportError:
            time.sleep(0.2)
            return False

    try:
        poll_until(answers, START_S)
        yield
    finally:
        process.terminate()
        process.wait(30)


def _expect(printed: str, *lines: str) -> str:
    found = printed.strip().splitlines()
    if found != list(lines):
        raise ClientFault(f"expected {list(lines)}, it printed {found}")
    return " | ".join(found)
