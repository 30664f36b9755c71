"""Imports a command line of `vllm serve`."""

from typing import Any

from app.config_import.builder import ImportResult, SettingsBuilder, find_fault
from app.config_import.reading import ImportFault
from app.config_import.vllm_command import VllmServer, read_vllm_servers
from app.settings import ServerSettings


def from_vllm(text: str) -> ImportResult:
    """Return the settings for the vLLM servers of a command line.

    Raises ImportFault for a text that is not a command line, or that starts no vLLM server.
    """
    found, others = read_vllm_servers(text)
    if not found:
        reasons = f" ({others[0]})" if others else ""
        raise ImportFault(
            "no command of vLLM in it; it takes `vllm serve MODEL …`, `python -m "
            f"vllm.entrypoints.openai.api_server …` and `docker run … vllm/vllm-openai …`{reasons}"
        )
    builder = SettingsBuilder()
    for server in found:
        place = f"vllm serve {server.model}".strip()
        for note in server.notes:
            builder.note(place, note)
        if server.model:
            builder.add(place, model_settings(server, server.names or [server.model]))
        elif not server.notes:
            builder.note(place, "names no model; add it after `vllm serve`")
        _listen(builder, server)
    if not any(server.requires_key for server in found):
        builder.note(
            "keys", "vLLM required none, the gateway does: `vllm-gateway keys create --name NAME`"
        )
    for other in others:
        builder.note("command line", other)
    return builder.build()


def model_settings(server: VllmServer, names: list[str]) -> dict[str, Any]:
    """Return a model whose only engine is the one of a server."""
    name, *aliases = dict.fromkeys(names)
    model: dict[str, Any] = {"name": name, "aliases": aliases}
    if server.media_domains:
        model["media"] = {"domains": server.media_domains}
    if server.adapters:
        model["adapters"] = server.adapters
    return {**model, "engines": [server.engine]}


def _listen(builder: SettingsBuilder, server: VllmServer) -> None:
    """Listen where the server listened; with several servers, the first address applies."""
    place = "server"
    for name, value in (
        ("host", server.host),
        ("port", server.port),
        ("cors_origins", server.origins),
    ):
        if not value:
            continue
        section = builder.sections.setdefault(place, {})
        if name in section:
            if section[name] != value:
                builder.note(f"{place}.{name}", "is taken from the first server")
        elif fault := find_fault(ServerSettings, {name: value}):
            builder.note(place, f"is left as it is: {fault}")
        else:
            section[name] = value
