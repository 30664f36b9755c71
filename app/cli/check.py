"""`vllm-gateway check`: validate the configuration and print what would run."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from app.certificate import Certificate
from app.cli.faults import fail, faults
from app.cli.options import ConfigOption
from app.settings import (
    ConfigError,
    LimitSettings,
    ModelSettings,
    OidcSettings,
    Settings,
    load_settings,
)

if TYPE_CHECKING:  # slow to import
    from app.fleet import Builder, EngineConfig
    from app.routing import Catalogue, Model

HIDDEN = "***"
LOCAL_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


GpusOption = Annotated[
    str | None,
    typer.Option(
        help="GPUs of the machine that the configuration is for, as in 8x80: 8 GPUs with 80 GiB "
        "each; default: those of this machine.",
        metavar="COUNTxGIB",
    ),
]


def check(config: ConfigOption = None, gpus: GpusOption = None) -> None:
    """Validate the configuration and print what would run."""
    from app.fleet import Builder, catalogue_of, initial_engines, run_preflight
    from app.telemetry.logs import check_log_file

    with faults():
        settings = load_settings(config)
        settings.keep_secrets()
        check_log_file(settings.logs)
        builder = Builder(settings)
        configs = initial_engines(settings)
        assumed = _assumed_gpus(gpus, configs, builder)
        found = run_preflight(
            settings,
            [config for group in configs.values() for config in group],
            builder,
            with_adapters=configs.keys(),
        )
        try:
            catalogue = catalogue_of(settings, builder)
        except ConfigError as error:
            raise ConfigError([*found.faults, *error.faults]) from None
        if found.faults:
            raise ConfigError(list(found.faults))
        for line in _plan(settings, catalogue, configs, builder):
            print(line)
        for note in (*assumed, *_notes(settings, catalogue), *found.notes):
            print(f"note: {note}")
        adapters = len(catalogue.models) - len(settings.models)
        counts = _count(len(settings.models), "model")
        if adapters:
            counts += f", {_count(adapters, 'adapter')}"
        counts += f", {_count(len(catalogue.engines), 'engine')}"
        if any(model.discovering for model in settings.models):
            counts += " and those that are discovered"
        print(f"{settings.source.file} is valid: {counts}")


def _assumed_gpus(
    given: str | None, configs: "Mapping[str, Sequence[EngineConfig]]", builder: "Builder"
) -> list[str]:
    """Place engines on the given GPUs; on a machine without any, on as many as they need.

    Returns a note if the number was not given.
    """
    from engines.gpu import AssumedGpus, HostMemory
    from engines.spec import LocalSpec

    if given is not None:
        try:
            builder.assume(AssumedGpus.parse(given))
        except ValueError as error:
            fail(f"--gpus {error}")
        return []
    specs = [one.spec for group in configs.values() for one in group]
    local = [spec for spec in specs if isinstance(spec, LocalSpec)]
    if all(spec.gpus is None for spec in local):
        return []
    machine = builder.accelerator
    if not isinstance(machine, HostMemory) or machine.driver_failed:
        return []
    builder.assume(enough := AssumedGpus.enough_for(local))
    return [
        "this machine has no GPU, which `serve` would refuse: engines were placed as if it had "
        f"{enough.count}; --gpus 8x80 places them on 8 GPUs with 80 GiB each"
    ]


def _plan(
    settings: Settings,
    catalogue: "Catalogue",
    configs: "Mapping[str, Sequence[EngineConfig]]",
    builder: "Builder",
) -> Iterator[str]:
    """Yield a line for each part of what would run."""
    server, metrics = settings.server, settings.metrics
    keys = f"keys: {len(settings.api_keys)} from the environment, others from the key store"
    if not settings.auth.enabled:
        keys = "no keys: open to everyone"
    if metrics.port is not None:
        yield f"metrics on {metrics.host}:{metrics.port}"
    where = f"{server.host}:{server.port}" + (" over TLS" if server.tls is not None else "")
    yield f"listen on {where}, {keys}, run directory {server.run_dir}"
    if server.tls is not None:
        yield f"certificate {server.tls.cert_file} is {Certificate(server.tls).describe()}"
    state = settings.state
    redis = "none (each gateway counts limits for itself)"
    if state.redis_url is not None:
        redis = without_password(state.redis_url.get_secret_value())
    yield f"database {without_password(state.database_url.get_secret_value())}, redis {redis}"
    yield f"limits of a key that has none of its own: {_limits(settings.limits.default)}"
    for each in settings.models:
        model = catalogue.resolve(each.name)
        yield from _model(each, model, configs[each.name], builder)


def _model(
    settings: ModelSettings, model: "Model", configs: "Sequence[EngineConfig]", builder: "Builder"
) -> Iterator[str]:
    from engines.output import redact_variable
    from engines.plan import engine_memory
    from engines.process import vllm_runs_on_cpu
    from engines.spec import LocalSpec, ManagedSpec

    yield f"model {', '.join(settings.names)}"
    if settings.split:
        yield f"  split {', '.join(f'{one.model} {one.weight}' for one in settings.split)}"
    if not settings.engines:
        return
    fallbacks = f", fallbacks {', '.join(settings.fallbacks)}" if settings.fallbacks else ""
    limits = f", limits {_limits(settings.limits)}" if _any(settings.limits) else ""
    yield f"  load {settings.load}, isolation {settings.isolation}{fallbacks}{limits}"
    gpu_gib = partial(_gpu_gib, builder)
    previous: object = None
    for config, replica in zip(configs, model.replicas, strict=True):
        env = config.spec.env if isinstance(config.spec, ManagedSpec) else {}
        words = [*(redact_variable(*one) for one in env.items()), replica.engine.describe()]
        yield f"  {replica.engine.name}: {' '.join(words)}"
        # Replicas have the same specification, and so the same memory.
        if isinstance(config.spec, LocalSpec) and config.spec is not previous:
            yield from (
                f"    {line}" for line in engine_memory(config.spec, gpu_gib, vllm_runs_on_cpu)
            )
        previous = config.spec
    if (bounds := settings.scaling) is not None:
        yield f"  scaled with the load: {bounds.min} to {bounds.max} engines of kind: ray"
    for source in _sources(settings):
        yield f"  {source}"
    for adapter in settings.adapters or ():
        names = ", ".join(adapter.names)
        yield f"  adapter {names}: {adapter.source or 'loaded by its servers'}"


def _gpu_gib(builder: "Builder") -> float | None:
    from engines.gpu import AcceleratorError

    try:
        return next((device.total_gib for device in builder.devices()), None)
    except AcceleratorError:
        return None


def _notes(settings: Settings, catalogue: "Catalogue") -> Iterator[str]:
    """Yield a line for each valid setting that may have an unexpected effect."""
    from engines.spec import CACHED_TOKENS_FLAG

    host = settings.server.host
    if host not in LOCAL_HOSTS and settings.server.tls is None:
        yield (
            f"the gateway speaks plain HTTP on {host}, so keys can be read on the network: set "
            "server.tls, put a TLS proxy in front, or set server.host to 127.0.0.1"
        )
    if settings.console.oidc is not None:
        yield from _provider_fault(settings.console.oidc)
    for each in settings.models:
        yield from _unread_files(each)
    for each in settings.models:
        replicas = catalogue.resolve(each.name).replicas if each.engines else ()
        remote = [one.engine.name for one in replicas if not one.engine.capabilities.managed]
        remote += _sources(each)
        if remote and _cached_tokens_matter(settings, each):
            yield (
                f"cached tokens of {', '.join(remote)} are counted only if the server runs with "
                f"--{CACHED_TOKENS_FLAG}"
            )


def _sources(model: ModelSettings) -> list[str]:
    """Return a text for each source of discovered servers."""
    specs = (spec.discover for spec in model.discovering)
    return [f"servers of {source.describe()}" for source in specs if source is not None]


def _provider_fault(oidc: OidcSettings) -> Iterator[str]:
    """Yield why people could not sign in now. Asks the identity provider."""
    from app.auth.oidc import find_provider_fault

    fault = asyncio.run(find_provider_fault(oidc))
    if fault is not None:
        yield f"console.oidc.issuer {oidc.issuer} cannot be used now: {fault}"


def _unread_files(model: ModelSettings) -> Iterator[str]:
    """Yield a text for each file of discovered servers that cannot be used as it is."""
    from app.discovery import file_fault

    for spec in model.discovering:
        source = spec.discover
        if source is not None and source.file is not None:
            fault = file_fault(source.file, source.api_key_envs)
            if fault is not None:
                yield f"no server is known from {source.describe()}: {fault}"


def without_password(url: str) -> str:
    """Return a URL with its password hidden and without its query."""
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return f"{url.partition('://')[0]}://{HIDDEN}"
    place = parts.netloc
    if password is not None:
        user, _, host = place.rpartition("@")
        place = f"{user.partition(':')[0]}:{HIDDEN}@{host}"
    return f"{parts.scheme}://{place}{parts.path}"


def _limits(limits: LimitSettings) -> str:
    parts = (
        (limits.requests_per_minute, "requests per minute"),
        (limits.tokens_per_minute, "tokens per minute"),
        (limits.concurrent_requests, "requests at once"),
    )
    return ", ".join(f"{n:,} {what}" if n is not None else f"unlimited {what}" for n, what in parts)


def _any(limits: LimitSettings) -> bool:
    return any(getattr(limits, name) is not None for name in LimitSettings.model_fields)


def _cached_tokens_matter(settings: Settings, model: ModelSettings) -> bool:
    """Return whether a cached prompt token of a model has another price or weight."""
    price = model.price
    return price.cached != price.prompt or settings.limits.cached_token_weight != 1


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
