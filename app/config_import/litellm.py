"""Imports a config.yaml of LiteLLM's proxy.

Deployments with the same `model_name` in `model_list` become the engines of one model. The reading
of LiteLLM's keys follows its documentation (docs.litellm.ai, config settings).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.config_import.builder import ImportResult, SettingsBuilder, find_fault, is_variable
from app.config_import.litellm_advice import ADVICE
from app.config_import.reading import (
    list_of,
    mapping_of,
    named_lists,
    number_of,
    read_mapping,
    text_of,
)
from engines.output import is_secret
from engines.spec import RemoteSpec

# A deployment, with its place in the file.
_Deployment = tuple[str, dict[str, Any]]
_ENVIRONMENT = "os.environ/"
# Providers whose deployments are OpenAI-compatible servers at `api_base`.
_COMPATIBLE = frozenset(
    {
        "custom_openai", "hosted_vllm", "litellm_proxy", "llamafile", "lm_studio", "openai",
        "openai_like", "text-completion-openai", "xinference",
    }
)  # fmt: skip
# Placeholders for a server without a key.
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
# Parameters that LiteLLM sets per model and the gateway leaves to clients.
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


def from_litellm(text: str, environment: Mapping[str, str]) -> ImportResult:
    """Return the settings for a config.yaml; `environment` resolves os.environ/ addresses.

    Raises ImportFault for an invalid config.yaml, or one without a model for the gateway.
    """
    data = read_mapping(text)
    builder = SettingsBuilder()
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
    groups = _groups(data.get("model_list"), builder)
    models = {name: _model(name, members, defaults, builder) for name, members in groups.items()}
    models = {name: model for name, model in models.items() if model["engines"]}
    _add_aliases(models, router, builder)
    _add_fallbacks(models, (router, library), builder)
    _note_strategy(router, builder)
    _set_redis(router, builder)
    for name, model in models.items():
        builder.add(f"model {name!r}", model)
    _note_rest(data, sections, builder)
    return builder.build()


def _groups(entries: object, builder: SettingsBuilder) -> dict[str, list[_Deployment]]:
    """Return the deployments of each model_name, with their places."""
    groups: dict[str, list[_Deployment]] = {}
    for number, entry in enumerate(list_of(entries, "model_list")):
        place = f"model_list[{number}]"
        deployment = mapping_of(entry, place)
        name = text_of(deployment.get("model_name"), f"{place}.model_name")
        if "*" in name:
            builder.note(f"{place} ({name})", "is a wildcard; write a model for each name")
            continue
        groups.setdefault(name, []).append((f"{place} ({name})", deployment))
    return groups


def _model(
    name: str,
    members: list[_Deployment],
    defaults: _Defaults,
    builder: SettingsBuilder,
) -> dict[str, Any]:
    """Return a model whose engines are the OpenAI-compatible deployments."""
    engines: list[dict[str, Any]] = []
    kept: list[_Deployment] = []
    price: dict[str, float] = {}
    for place, deployment in members:
        given = mapping_of(deployment.get("litellm_params"), f"{place}.litellm_params")
        info = mapping_of(deployment.get("model_info"), f"{place}.model_info")
        # LiteLLM accepts these next to litellm_params, too.
        given = {k: deployment[k] for k in ("rpm", "tpm") if k in deployment} | given
        engine = _engine(name, given, place, defaults, builder)
        if engine is not None:
            engines.append(engine)
            kept.append((place, given))
            price = price or _price({**info, **given}, place)
            _note_parameters(given, place, builder)
    model: dict[str, Any] = {"name": name, "price": price}
    if limits := dict(_limits(kept, name, builder)):
        model["limits"] = limits
    bounds = {number_of(given.get("max_parallel_requests"), place) for place, given in kept}
    if in_flight := min((int(bound) for bound in bounds if bound), default=0):
        model["queue"] = {"max_in_flight": in_flight}
        if len(bounds) > 1:
            builder.note(f"max_parallel_requests of {name!r}", "the lowest applies to every engine")
    return {**model, "engines": engines}


def _engine(
    name: str, given: Mapping[str, Any], place: str, defaults: _Defaults, builder: SettingsBuilder
) -> dict[str, Any] | None:
    """Return a deployment as a remote engine; None, with a note, if it cannot be one."""
    provider, served_name = _provider(given, place)
    if provider not in _COMPATIBLE:
        builder.note(place, _explain_provider(provider, served_name))
        return None
    base = given.get("api_base", given.get("base_url"))
    if base is None:
        builder.note(
            place,
            f"is left out: {provider}/ without api_base is a hosted service; if it speaks OpenAI's "
            "API, add an engine of `kind: remote` with its url and api_key_env",
        )
        return None
    address = _lookup(text_of(base, f"{place}.api_base"), defaults.environment)
    if address is None:
        builder.note(place, "is left out: the variable with its api_base is not set")
        return None
    engine: dict[str, Any] = {"kind": "remote", "url": _url(address, place, builder)}
    if fault := find_fault(RemoteSpec, engine):
        builder.note(place, f"is left out: {fault}")
        return None
    if (variable := _key_variable(given.get("api_key"), name, place, builder)) is not None:
        engine["api_key_env"] = variable
    elif provider == "openai" and "api_key" not in given:
        builder.note(
            place,
            "has no api_key, so LiteLLM sends OPENAI_API_KEY; the gateway sends no key unless "
            "api_key_env names a variable",
        )
    if served_name != name:
        engine["served_model_name"] = served_name
    timeout = number_of(given.get("timeout", defaults.timeout), f"{place}.timeout")
    if timeout:
        engine["timeouts"] = {"first_byte_s": timeout}
    return engine


def _provider(given: Mapping[str, Any], place: str) -> tuple[str, str]:
    """Return the provider of a deployment, and the provider's name of the model."""
    model = text_of(given.get("model"), f"{place}.litellm_params.model")
    if (named := given.get("custom_llm_provider")) is not None:
        provider = text_of(named, f"{place}.custom_llm_provider")
        return provider, model.removeprefix(f"{provider}/")
    provider, slash, name = model.partition("/")
    return (provider, name) if slash else ("", model)


def _explain_provider(provider: str, model: str) -> str:
    if provider == "vllm":
        return (
            "is left out: LiteLLM runs it in its own process; add an engine of `kind: process` "
            f"with `model: {model}`"
        )
    what = f"the provider {provider!r}" if provider else "a model without a provider"
    return (
        f"is left out: {what} is not an OpenAI-compatible server; keep LiteLLM for it, and add "
        "LiteLLM as an engine of `kind: remote`"
    )


def _lookup(text: str, environment: Mapping[str, str]) -> str | None:
    """Return a text, or the value of the variable it names; None if that is not set."""
    if not text.startswith(_ENVIRONMENT):
        return text
    name = text.removeprefix(_ENVIRONMENT)
    return None if is_secret(name) else environment.get(name)


def _url(address: str, place: str, builder: SettingsBuilder) -> str:
    """Return a server's URL without /v1, which the gateway adds."""
    url = address.strip().rstrip("/")
    if url.endswith("/v1"):
        return url.removesuffix("/v1").rstrip("/")
    builder.note(
        place, "its api_base does not end in /v1, but the gateway adds /v1; check that it answers"
    )
    return url


def _key_variable(key: object, owner: str, place: str, builder: SettingsBuilder) -> str | None:
    """Return the variable for a server's key, None if the server has no key."""
    if key is None:
        return None
    text = text_of(key, f"{place}.api_key").strip()
    if text.startswith(_ENVIRONMENT):
        name = text.removeprefix(_ENVIRONMENT)
        if is_variable(name):
            return builder.use_key_variable(name, place, "LiteLLM")
        builder.note(place, "api_key names no variable; set api_key_env")
        return None
    if text.lower() in _NO_KEY:
        return None
    return builder.secret_variable(text, owner, f"{place}.api_key")


def _price(costs: Mapping[str, Any], place: str) -> dict[str, float]:
    """Return the prices per million tokens from LiteLLM's prices per token."""

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
    members: list[_Deployment], name: str, builder: SettingsBuilder
) -> Iterator[tuple[str, int]]:
    """Yield the limits of a model, each the sum over its deployments."""
    for source, target in (("rpm", "requests_per_minute"), ("tpm", "tokens_per_minute")):
        given = [number_of(params.get(source), f"{place}.{source}") for place, params in members]
        known = [int(number) for number in given if number is not None]
        if not known:
            continue
        if len(known) < len(given):
            builder.note(
                f"{source} of {name!r}",
                f"is left out: not every deployment has it; set models[].limits.{target}",
            )
            continue
        yield target, min(sum(known), 10**9)
        builder.note(
            f"{source} of {name!r}",
            f"is now a limit for all keys together ({target}); LiteLLM may use it only as a weight",
        )


def _note_parameters(given: Mapping[str, Any], place: str, builder: SettingsBuilder) -> None:
    sampling = sorted(given.keys() & _SAMPLING)
    if sampling:
        builder.note(
            place,
            f"{', '.join(sampling)}: LiteLLM sends these for clients that do not; let clients send "
            "them, or set them for all requests in models[].fields.force",
        )
    builder.note_keys(place, given.keys() - _TAKEN - _SAMPLING, ADVICE)


def _add_aliases(
    models: dict[str, dict[str, Any]], router: Mapping[str, Any], builder: SettingsBuilder
) -> None:
    place = "router_settings.model_group_alias"
    for alias, target in mapping_of(router.get("model_group_alias"), place).items():
        if isinstance(target, dict):
            if target.get("hidden"):
                builder.note(f"{place} {alias!r}", "is listed by /v1/models, like every alias")
            target = target.get("model")
        name = text_of(target, f"{place}.{alias[:64]}")
        if name in models:
            models[name].setdefault("aliases", []).append(alias)
        else:
            builder.note(f"{place} {alias!r}", f"is left out: there is no model {name!r}")


def _add_fallbacks(
    models: dict[str, dict[str, Any]],
    sections: tuple[Mapping[str, Any], Mapping[str, Any]],
    builder: SettingsBuilder,
) -> None:
    general: list[str] = []
    for section in sections:
        for name, fallbacks in named_lists(section.get("fallbacks"), "fallbacks"):
            if name == "*":
                general += fallbacks
            elif name in models:
                models[name].setdefault("fallbacks", []).extend(fallbacks)
            else:
                builder.note(f"fallbacks of {name!r}", "are left out: there is no such model")
        defaults = list_of(section.get("default_fallbacks"), "default_fallbacks")
        general += [text_of(name, "default_fallbacks") for name in defaults]
    for name, model in models.items():
        if general and "fallbacks" not in model and name not in general:
            model["fallbacks"] = [*general]


def _note_strategy(router: Mapping[str, Any], builder: SettingsBuilder) -> None:
    strategy = router.get("routing_strategy")
    if strategy not in (None, "least-busy"):
        builder.note(
            "router_settings.routing_strategy",
            "requests go to the engine with the fewest in flight; for another policy, set "
            "models[].policy to round_robin, prefix or session",
        )


def _set_redis(router: Mapping[str, Any], builder: SettingsBuilder) -> None:
    """Import the Redis address unless it has a password, which belongs in a variable."""
    if "redis_url" in router or "redis_password" in router:
        builder.note(
            "router_settings.redis_*",
            "is not copied, because it may hold a password: if several gateways share limits, set "
            "GATEWAY_STATE__REDIS_URL to the address with the password",
        )
    elif (host := router.get("redis_host")) is not None:
        name = text_of(host, "router_settings.redis_host")
        port = number_of(router.get("redis_port"), "router_settings.redis_port") or 6379
        if re.fullmatch(r"[A-Za-z0-9.-]{1,253}", name):
            builder.sections["state"] = {"redis_url": f"redis://{name}:{port}/0"}
        else:
            builder.note("router_settings.redis_host", "set state.redis_url")


def _note_rest(
    data: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], builder: SettingsBuilder
) -> None:
    """Add notes for the remaining keys, those about API keys first."""
    general = sections["general_settings"]
    if general.get("master_key") is not None:
        builder.note(
            "general_settings.master_key",
            "is not copied: set GATEWAY_ADMIN_KEY to a new key for /admin, and create client keys "
            "with `vllm-gateway keys create` (LiteLLM's virtual keys are not imported)",
        )
    else:
        builder.note(
            "keys",
            "LiteLLM required none, the gateway does: `vllm-gateway keys create --name NAME`",
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
        builder.note_keys(section, values.keys() - taken[section], ADVICE)
    known = {*sections, "model_list", "environment_variables"}
    builder.note_keys("", data.keys() - known, {})
    builder.note("port", "LiteLLM listens on 4000, the gateway on 8000: set server.port")
