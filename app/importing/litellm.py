"""A config.yaml of LiteLLM's proxy, as settings of the gateway.

`model_list` becomes models: deployments of one `model_name` are the engines of one model. What is
told here of LiteLLM is what its documentation of the proxy says (docs.litellm.ai, config settings).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.importing.draft import Draft, Imported, fault_in, is_variable
from app.importing.litellm_advice import ADVICE
from app.importing.source import (
    list_of,
    mapping_of,
    named_lists,
    number_of,
    read_mapping,
    text_of,
)
from engines.output.redact import is_secret
from engines.spec import RemoteSpec

_ENVIRONMENT = "os.environ/"
# Providers whose deployments are servers that speak OpenAI's API at `api_base`.
_COMPATIBLE = frozenset(
    {
        "custom_openai", "hosted_vllm", "litellm_proxy", "llamafile", "lm_studio", "openai",
        "openai_like", "text-completion-openai", "xinference",
    }
)  # fmt: skip
# What people write where a server asks for no key.
_NO_KEY = frozenset(
    {"", "-", "anything", "dummy", "empty", "fake", "fake-key", "no-key", "none", "not-needed",
     "null", "sk-dummy", "token", "x"}
)  # fmt: skip
_TAKEN = frozenset(
    {
        "api_base", "api_key", "base_url", "cache_read_input_token_cost", "custom_llm_provider",
        "input_cost_per_token", "max_parallel_requests", "model", "output_cost_per_token", "rpm",
        "timeout", "tpm",
    }
)  # fmt: skip
# What LiteLLM gives to a model as its own; the gateway lets clients send it.
_SAMPLING = frozenset(
    {
        "frequency_penalty", "max_completion_tokens", "max_tokens", "n", "presence_penalty", "seed",
        "stop", "temperature", "top_k", "top_p",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Defaults:
    timeout: int | float | None
    environment: Mapping[str, str]


def from_litellm(text: str, environment: Mapping[str, str]) -> Imported:
    """Return the settings for a config.yaml; addresses may be in variables of `environment`.

    Raises SourceFault for a text that is none, or has no model that the gateway can serve.
    """
    data = read_mapping(text)
    draft = Draft()
    sections = {
        name: mapping_of(data.get(name), name)
        for name in ("litellm_settings", "router_settings", "general_settings")
    }
    router, library = sections["router_settings"], sections["litellm_settings"]
    set_there = mapping_of(data.get("environment_variables"), "environment_variables")
    timeout = router.get("timeout", library.get("request_timeout"))
    defaults = _Defaults(
        number_of(timeout, "timeout"),
        {**environment, **{k: v for k, v in set_there.items() if isinstance(v, str)}},
    )
    groups = _groups(data.get("model_list"), draft)
    models = {name: _model(name, members, defaults, draft) for name, members in groups.items()}
    models = {name: model for name, model in models.items() if model["engines"]}
    _add_aliases(models, router, draft)
    _add_fallbacks(models, (router, library), draft)
    _note_strategy(router, draft)
    _set_redis(router, draft)
    for name, model in models.items():
        draft.add(f"model {name!r}", model)
    _note_rest(data, sections, draft)
    return draft.finish()


def _groups(entries: object, draft: Draft) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the deployments of each model_name, with their places."""
    groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for number, entry in enumerate(list_of(entries, "model_list")):
        place = f"model_list[{number}]"
        deployment = mapping_of(entry, place)
        name = text_of(deployment.get("model_name"), f"{place}.model_name")
        if "*" in name:
            draft.note(f"{place} ({name})", "is a wildcard; write a model for each name")
            continue
        groups.setdefault(name, []).append((f"{place} ({name})", deployment))
    return groups


def _model(
    name: str,
    members: list[tuple[str, dict[str, Any]]],
    defaults: _Defaults,
    draft: Draft,
) -> dict[str, Any]:
    """Return a model whose engines are the deployments that are servers of OpenAI's API."""
    engines: list[dict[str, Any]] = []
    kept: list[tuple[str, dict[str, Any]]] = []
    price: dict[str, float] = {}
    for place, deployment in members:
        given = mapping_of(deployment.get("litellm_params"), f"{place}.litellm_params")
        info = mapping_of(deployment.get("model_info"), f"{place}.model_info")
        # They may stand beside litellm_params, too.
        given = {k: deployment[k] for k in ("rpm", "tpm") if k in deployment} | given
        engine = _engine(name, given, place, defaults, draft)
        if engine is not None:
            engines.append(engine)
            kept.append((place, given))
            price = price or _price({**info, **given}, place)
            _note_parameters(given, place, draft)
    model: dict[str, Any] = {"name": name, "price": price}
    if limits := dict(_limits(kept, name, draft)):
        model["limits"] = limits
    bounds = {number_of(given.get("max_parallel_requests"), place) for place, given in kept}
    if in_flight := min((int(bound) for bound in bounds if bound), default=0):
        model["queue"] = {"max_in_flight": in_flight}
        if len(bounds) > 1:
            draft.note(f"max_parallel_requests of {name!r}", "the lowest is that of every engine")
    return {**model, "engines": engines}


def _engine(
    name: str, given: Mapping[str, Any], place: str, defaults: _Defaults, draft: Draft
) -> dict[str, Any] | None:
    """Return a deployment as a remote engine, None with a note where it cannot be one."""
    provider, served_name = _provider(given, place)
    if provider not in _COMPATIBLE:
        draft.note(place, _why_not(provider, served_name))
        return None
    base = given.get("api_base", given.get("base_url"))
    if base is None:
        draft.note(
            place,
            f"is left out: {provider}/ without api_base is a hosted service, not an engine; where "
            "it speaks OpenAI's API, add `kind: remote` with its url and api_key_env",
        )
        return None
    address = _resolved(text_of(base, f"{place}.api_base"), defaults.environment)
    if address is None:
        draft.note(place, "is left out: api_base is in a variable that is not set here; set it")
        return None
    engine: dict[str, Any] = {"kind": "remote", "url": _url(address, place, draft)}
    if fault := fault_in(RemoteSpec, engine):
        draft.note(place, f"is left out: {fault}")
        return None
    if (variable := _key_variable(given.get("api_key"), name, place, draft)) is not None:
        engine["api_key_env"] = variable
    elif provider == "openai" and "api_key" not in given:
        draft.note(
            place,
            "has no api_key, so LiteLLM sends OPENAI_API_KEY; the gateway sends none, unless "
            "api_key_env names a variable",
        )
    if served_name != name:
        engine["served_model_name"] = served_name
    timeout = number_of(given.get("timeout", defaults.timeout), f"{place}.timeout")
    if timeout:
        engine["timeouts"] = {"first_byte_s": timeout}
    return engine


def _provider(given: Mapping[str, Any], place: str) -> tuple[str, str]:
    """Return the provider of a deployment and the model's name there."""
    model = text_of(given.get("model"), f"{place}.litellm_params.model")
    if (named := given.get("custom_llm_provider")) is not None:
        provider = text_of(named, f"{place}.custom_llm_provider")
        return provider, model.removeprefix(f"{provider}/")
    provider, slash, name = model.partition("/")
    return (provider, name) if slash else ("", model)


def _why_not(provider: str, model: str) -> str:
    if provider == "vllm":
        return (
            "is left out: LiteLLM runs it in its own process; add an engine of `kind: process` "
            f"with `model: {model}`"
        )
    what = f"the provider {provider!r}" if provider else "a model without a provider"
    return (
        f"is left out: {what} is no server of OpenAI's API; keep LiteLLM for it, and add LiteLLM "
        "as an engine of `kind: remote`"
    )


def _resolved(text: str, environment: Mapping[str, str]) -> str | None:
    """Return a value, from the environment where it names a variable; None if that is not set."""
    if not text.startswith(_ENVIRONMENT):
        return text
    name = text.removeprefix(_ENVIRONMENT)
    return None if is_secret(name) else environment.get(name)


def _url(address: str, place: str, draft: Draft) -> str:
    """Return the URL of a server without /v1, which the gateway adds itself."""
    url = address.strip().rstrip("/")
    if url.endswith("/v1"):
        return url.removesuffix("/v1").rstrip("/")
    draft.note(
        place, "its api_base does not end in /v1, which the gateway adds; check that it answers"
    )
    return url


def _key_variable(key: object, owner: str, place: str, draft: Draft) -> str | None:
    """Return the variable that holds the key of a server, None where there is none."""
    if key is None:
        return None
    text = text_of(key, f"{place}.api_key").strip()
    if text.startswith(_ENVIRONMENT):
        name = text.removeprefix(_ENVIRONMENT)
        if is_variable(name):
            return draft.key_variable(name, place, "LiteLLM")
        draft.note(place, "api_key names no variable; set api_key_env")
        return None
    if text.lower() in _NO_KEY:
        return None
    return draft.variable(text, owner, f"{place}.api_key")


def _price(costs: Mapping[str, Any], place: str) -> dict[str, float]:
    """Return what a million tokens cost, from what one costs."""

    def million(name: str) -> float:
        return round(1e6 * (number_of(costs.get(name), f"{place}.{name}") or 0), 6)

    prompt, completion = million("input_cost_per_token"), million("output_cost_per_token")
    if not prompt and not completion:
        return {}
    cached = "cache_read_input_token_cost"
    return {
        "prompt": prompt,
        "cached": million(cached) if cached in costs else prompt,
        "completion": completion,
    }


def _limits(
    members: list[tuple[str, dict[str, Any]]], name: str, draft: Draft
) -> Iterator[tuple[str, int]]:
    """Yield the limits of a model: the sums of its deployments'."""
    for source, target in (("rpm", "requests_per_minute"), ("tpm", "tokens_per_minute")):
        given = [number_of(params.get(source), f"{place}.{source}") for place, params in members]
        known = [int(number) for number in given if number is not None]
        if not known:
            continue
        if len(known) < len(given):
            draft.note(
                f"{source} of {name!r}",
                f"is left out: not every deployment has it; set models[].limits.{target}",
            )
            continue
        yield target, min(sum(known), 10**9)
        draft.note(
            f"{source} of {name!r}",
            f"is now a limit for all keys together ({target}); LiteLLM may have used it as a "
            "weight only",
        )


def _note_parameters(given: Mapping[str, Any], place: str, draft: Draft) -> None:
    sampling = sorted(given.keys() & _SAMPLING)
    if sampling:
        draft.note(
            place,
            f"{', '.join(sampling)}: what LiteLLM sends for clients that do not; let them send it, "
            "or set it for all in models[].fields.force",
        )
    draft.note_keys(place, given.keys() - _TAKEN - _SAMPLING, ADVICE)


def _add_aliases(
    models: dict[str, dict[str, Any]], router: Mapping[str, Any], draft: Draft
) -> None:
    place = "router_settings.model_group_alias"
    for alias, target in mapping_of(router.get("model_group_alias"), place).items():
        if isinstance(target, dict):
            if target.get("hidden"):
                draft.note(f"{place} {alias!r}", "is shown by /v1/models, as every alias")
            target = target.get("model")
        name = text_of(target, f"{place}.{alias[:64]}")
        if name in models:
            models[name].setdefault("aliases", []).append(alias)
        else:
            draft.note(f"{place} {alias!r}", f"is left out: there is no model {name!r}")


def _add_fallbacks(
    models: dict[str, dict[str, Any]],
    sections: tuple[Mapping[str, Any], Mapping[str, Any]],
    draft: Draft,
) -> None:
    general: list[str] = []
    for section in sections:
        for name, fallbacks in named_lists(section.get("fallbacks"), "fallbacks"):
            if name == "*":
                general += fallbacks
            elif name in models:
                models[name].setdefault("fallbacks", []).extend(fallbacks)
            else:
                draft.note(f"fallbacks of {name!r}", "are left out: it is no model here")
        defaults = list_of(section.get("default_fallbacks"), "default_fallbacks")
        general += [text_of(one, "default_fallbacks") for one in defaults]
    for name, model in models.items():
        if general and "fallbacks" not in model and name not in general:
            model["fallbacks"] = [*general]


def _note_strategy(router: Mapping[str, Any], draft: Draft) -> None:
    strategy = router.get("routing_strategy")
    if strategy not in (None, "least-busy"):
        draft.note(
            "router_settings.routing_strategy",
            "engines get requests by fewest in flight (models[].policy: least_loaded); "
            "round_robin, prefix and session are the others",
        )


def _set_redis(router: Mapping[str, Any], draft: Draft) -> None:
    """Take over Redis where it has no password; a password belongs in a variable."""
    if "redis_url" in router or "redis_password" in router:
        draft.note(
            "router_settings.redis_*",
            "is not copied, for it may hold a password: where several gateways share limits, set "
            "GATEWAY_STATE__REDIS_URL to the address with the password",
        )
    elif (host := router.get("redis_host")) is not None:
        name = text_of(host, "router_settings.redis_host")
        port = number_of(router.get("redis_port"), "router_settings.redis_port") or 6379
        if re.fullmatch(r"[A-Za-z0-9.-]{1,253}", name):
            draft.sections["state"] = {"redis_url": f"redis://{name}:{port}/0"}
        else:
            draft.note("router_settings.redis_host", "set state.redis_url")


def _note_rest(
    data: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], draft: Draft
) -> None:
    """Note what is left of the sections, the keys of the proxy first."""
    general = sections["general_settings"]
    if general.get("master_key") is not None:
        draft.note(
            "general_settings.master_key",
            "is not copied: set GATEWAY_ADMIN_KEY to a key of your own for /admin, and make keys "
            "for clients with `vllm-gateway keys create` (LiteLLM's virtual keys do not work here)",
        )
    else:
        draft.note(
            "keys",
            "LiteLLM asked for none, the gateway does: `vllm-gateway keys create --name NAME`",
        )
    taken = {
        "router_settings": {
            "default_fallbacks", "fallbacks", "model_group_alias", "redis_host", "redis_password",
            "redis_port", "redis_url", "routing_strategy", "timeout",
        },
        "litellm_settings": {"default_fallbacks", "fallbacks", "request_timeout"},
        "general_settings": {"master_key"},
    }  # fmt: skip
    for section, values in sections.items():
        draft.note_keys(section, values.keys() - taken[section], ADVICE)
    draft.note_keys("", data.keys() - sections.keys() - {"model_list", "environment_variables"}, {})
    draft.note("port", "LiteLLM listens on 4000, the gateway on 8000: set server.port or clients")
