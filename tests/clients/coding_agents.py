"""Codex and Claude Code against a gateway in front of `coding_model`.

Each is asked four things, and each has to tell its user what happened: a task with a tool call, an
engine that dies in a stream, a prompt that is too long for the model, a budget that is used up.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

from tests.clients.coding_model import BREAK, DONE, TOO_LONG, WRITE, WRITTEN, coding_model
from tests.clients.environments import programs
from tests.clients.running import ClientFault, Gateway, blocks, ended
from tests.e2e.deployment import ADMIN_KEY, KEY, deployed
from tests.gateway import remote, responds
from tests.waiting import poll_until

# Less than a turn of either agent takes.
DAILY_TOKENS = 9_000
# Runs an agent with a task and a key; returns its exit code and the last line that it printed.
Run = Callable[[Gateway, str, str], tuple[int, str]]
TASKS = {"tool call": WRITE, "broken stream": BREAK, "too long": TOO_LONG, "budget": WRITE}


def codex(gateway: Gateway) -> str:
    """It repeats a broken stream five times, then shows the gateway's reason."""
    bin_directory = programs("codex") / "node_modules" / ".bin"
    [configuration] = blocks("toml", "codex")
    home = gateway.directory / "codex"
    home.mkdir()

    def run(gateway: Gateway, task: str, key: str) -> tuple[int, str]:
        (home / "config.toml").write_text(gateway.here(configuration.text))
        command = (str(bin_directory / "codex"), "exec", "--skip-git-repo-check", task)
        allowed = "--dangerously-bypass-approvals-and-sandbox"
        done = ended(gateway, *command, allowed, variables={"KEY": key, "CODEX_HOME": str(home)})
        return done.returncode, _last_line(done.stdout or done.stderr)

    return _asked(
        gateway,
        run,
        {
            "tool call": (0, DONE),
            "broken stream": (1, "the engine failed before its answer was whole"),
            "too long": (1, "maximum context length is 131072 tokens"),
            "budget": (1, "Quota exceeded"),
        },
    )


def claude_code(gateway: Gateway) -> str:
    """It answers a broken stream by a plain request; a prompt that is too long it understands."""
    bin_directory = programs("claude-code") / "node_modules" / ".bin"
    [block] = blocks("console", "claude")
    script = re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE)
    script = re.sub(r"^claude$", 'exec claude -p "$TASK" --allowedTools Bash', script, flags=re.M)
    home = {"HOME": str(gateway.directory), "CLAUDE_CONFIG_DIR": str(gateway.directory / "claude")}

    def run(gateway: Gateway, task: str, key: str) -> tuple[int, str]:
        path = f"{bin_directory}:/usr/local/bin:/usr/bin:/bin"
        variables = {**home, "PATH": path, "KEY": key, "TASK": task}
        done = ended(gateway, "bash", "-ec", gateway.here(script), variables=variables)
        return done.returncode, _last_line(done.stdout or done.stderr)

    return _asked(
        gateway,
        run,
        {
            "tool call": (0, DONE),
            "broken stream": (0, DONE),
            "too long": (1, "Prompt is too long"),
            "budget": (1, f"the daily budget of {DAILY_TOKENS:,} tokens"),
        },
    )


def _asked(gateway: Gateway, run: Run, expected: Mapping[str, tuple[int, str]]) -> str:
    """Return what the agent printed last in each case. Raises ClientFault."""
    told = []
    with (
        coding_model() as model,
        deployed(
            gateway.directory, {"name": "coder", "engines": [remote(model.url)]}
        ) as deployment,
    ):
        poll_until(lambda: responds(f"{deployment.url}/ready"), 30)
        small = _small_key(deployment.url)
        for case, (code, words) in expected.items():
            work = gateway.directory / case.replace(" ", "-")
            work.mkdir()
            key = small if case == "budget" else KEY
            found, line = run(Gateway(deployment.url, work), TASKS[case], key)
            told.append(f"\n  {case}: exit {found}, {line}")
            if found != code or words not in line:
                raise ClientFault(f"{case}: exit {found}, expected {code} and {words!r}: {line}")
            if case == "tool call" and Path(work, WRITTEN).read_text() != "hello\n":
                raise ClientFault("the tool call was not carried out")
    return "".join(told)


def _small_key(url: str) -> str:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    body = {"name": "small", "daily_tokens": DAILY_TOKENS}
    key: str = httpx.post(f"{url}/admin/keys", headers=headers, json=body).json()["key"]
    return key


def _last_line(text: str) -> str:
    return ([""] + [line for line in text.splitlines() if line.strip()])[-1]
