"""The fake's LoRA adapters, as vLLM 0.32 loads and unloads them (seen on the real one)."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from tests.engines.plan.checkpoints import Shapes, write_weights

# vLLM's default of --max-lora-rank.
MAX_RANK = 16


class AdapterRoutes:
    """The adapters of one fake server.

    An adapter with `fake: die` ends the process; the load of one with `fake: hang` never ends, and
    makes a file `asked` in its directory.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.paths: dict[str, str] = {}

    def cards(self) -> list[dict[str, Any]]:
        """Return their entries in /v1/models."""
        return [
            {"id": name, "object": "model", "root": path, "parent": self._model}
            for name, path in self.paths.items()
        ]

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[bytes, int]:
        """Return the body and the status of an answer to a POST."""
        load = path == "/v1/load_lora_adapter"
        name, source = body.get("lora_name"), body.get("lora_path")
        if not name or (load and not source):
            return _error("Field required", "Bad Request", 400)
        return await self._load(name, str(source), body) if load else self._unload(name)

    async def _load(self, name: str, source: str, body: dict[str, Any]) -> tuple[bytes, int]:
        if name == self._model:
            said = f"The lora adapter '{name}' conflicts with a served base model."
            return _error(said, "InvalidUserInput", 400)
        if name in self.paths and not body.get("load_inplace"):
            said = f"The lora adapter '{name}' has already been loaded. If you want to load the "
            return _error(
                said + "adapter in place, set 'load_inplace' to True.", "InvalidUserInput", 400
            )
        try:
            config = json.loads((Path(source) / "adapter_config.json").read_text())
        except OSError:
            said = f"Loading lora {name} failed: No adapter found for <path>"
            return _error(said, "NotFoundError", 404)
        if config.get("fake") == "die":
            os._exit(9)
        if config.get("fake") == "hang":
            (Path(source) / "asked").touch()
            await asyncio.Event().wait()
        if config["r"] > MAX_RANK:
            said = (
                f"Call to add_lora method failed: Worker failed with error 'LoRA rank "
                f"{config['r']} is greater than max_lora_rank {MAX_RANK}.', please check the stack "
                "trace above for the root cause"
            )
            return _error(said, "InternalServerError", 500)
        self.paths[name] = source
        return f"Success: LoRA adapter '{name}' added successfully.".encode(), 200

    def _unload(self, name: str) -> tuple[bytes, int]:
        if self.paths.pop(name, None) is None:
            said = f"The lora adapter '{name}' cannot be found."
            return _error(said, "NotFoundError", 404)
        return f"Success: LoRA adapter '{name}' removed successfully.".encode(), 200


def _error(message: str, kind: str, status: int) -> tuple[bytes, int]:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode(), status


def write_adapter(
    directory: Path,
    *,
    rank: int = 8,
    shapes: Shapes | None = None,
    **config: object,
) -> Path:
    """Write an adapter whose weights are a hole; return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    written = json.dumps({"peft_type": "LORA", "r": rank, **config})
    (directory / "adapter_config.json").write_text(written)
    write_weights(directory / "adapter_model.safetensors", shapes or {})
    return directory
