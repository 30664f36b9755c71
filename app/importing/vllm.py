"""A command line of `vllm serve`, as settings of the gateway."""

from typing import Any

from app.importing.draft import Draft, Imported, fault_in
from app.importing.serving import Served, served
from app.importing.source import SourceFault
from app.settings import ServerSettings


def from_vllm(text: str) -> Imported:
    """Return the settings for the vLLM servers of a command line.

    Raises SourceFault for a text that is no command line, or that runs no vLLM server.
    """
    found, others = served(text)
    if not found:
        reasons = f" ({others[0]})" if others else ""
        raise SourceFault(
            "no command of vLLM in it; it takes `vllm serve MODEL …`, `python -m "
            f"vllm.entrypoints.openai.api_server …` and `docker run … vllm/vllm-openai …`{reasons}"
        )
    draft = Draft()
    for one in found:
        place = f"vllm serve {one.model}".strip()
        for note in one.notes:
            draft.note(place, note)
        if one.model:
            draft.add(place, served_model(one, one.names or [one.model]))
        elif not one.notes:
            draft.note(place, "names no model; write it behind `vllm serve`")
        _listen(draft, one)
    if not any(one.asks_for_key for one in found):
        draft.note(
            "keys", "vLLM asked for none, the gateway does: `vllm-gateway keys create --name NAME`"
        )
    for other in others:
        draft.note("command line", other)
    return draft.finish()


def served_model(one: Served, names: list[str]) -> dict[str, Any]:
    """Return a model of the settings with one engine, which a command described."""
    name, *aliases = dict.fromkeys(names)
    model: dict[str, Any] = {"name": name, "aliases": aliases}
    if one.media_domains:
        model["media"] = {"domains": one.media_domains}
    return {**model, "engines": [one.engine]}


def _listen(draft: Draft, one: Served) -> None:
    """Have the gateway listen where the server did; the first server that says so decides."""
    place = "server"
    for name, value in (("host", one.host), ("port", one.port), ("cors_origins", one.origins)):
        if not value:
            continue
        section = draft.sections.setdefault(place, {})
        if name in section:
            if section[name] != value:
                draft.note(f"{place}.{name}", "is that of the first server")
        elif fault := fault_in(ServerSettings, {name: value}):
            draft.note(place, f"is left as it is: {fault}")
        else:
            section[name] = value
