"""A model for coding agents, which need a longer context than the demo model has.

It is the fake of the tests with what such a model would write, decided by the agent's task.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.fakes.vllm import Fake, Seen

# What stands in a task, and the file that the model is to write for it.
WRITE = "Write the greeting"
BREAK = "Break off"
TOO_LONG = "Read everything"
WRITTEN = "greeting.txt"
DONE = "The greeting is written."
MAX_MODEL_LEN = 131_072

_TOO_LONG = (
    "This model's maximum context length is 131072 tokens. However, your prompt contains at least "
    "131073 input tokens, which exceeds this limit even without any output tokens. Please reduce "
    "the length of the input prompt. (parameter=input_tokens, value=131073)"
)
# The tools by which the agents run a shell command, and the argument that takes it.
_SHELLS = {"exec_command": "cmd", "Bash": "command"}
# What stands in the messages when a tool has run.
_RESULTS = ('"tool_result"', '"function_call_output"')


class CodingModel(Fake):
    """Writes a file by the agent's shell, then says so; breaks off, or refuses, where asked to."""

    async def _generate(
        self, request: Seen, path: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> bool:
        text = json.dumps(body.get("messages") or body.get("input"))
        if TOO_LONG in text:
            error = {"message": _TOO_LONG, "type": "BadRequestError", "param": "input_tokens"}
            return self.plain(writer, json.dumps({"error": {**error, "code": 400}}).encode(), 400)
        if BREAK in text:
            body["fake_fault"] = "close:3"
        acted = any(mark in text for mark in _RESULTS)
        body["fake"] = f"say:{_call(body) if WRITE in text and not acted else DONE}"
        body["fake_prompt_tokens"] = len(request.body) // 4
        return await super()._generate(request, path, body, writer)


def _call(body: dict[str, Any]) -> str:
    names = [tool.get("name") for tool in body.get("tools") or ()]
    name = next((name for name in names if name in _SHELLS), None)
    if name is None:
        return DONE
    arguments = {_SHELLS[name]: f"echo hello > {WRITTEN}"}
    if name == "Bash":
        arguments["description"] = "Write the greeting"
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@contextmanager
def coding_model() -> Iterator[CodingModel]:
    """Serve the model from a thread."""
    model = CodingModel(model="coder", max_model_len=MAX_MODEL_LEN)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(model.start(), loop).result(10)
    try:
        yield model
    finally:
        asyncio.run_coroutine_threadsafe(model.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
