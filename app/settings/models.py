"""The section `models`: names, bounds, routing, loading and engines of each model."""

import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from app.settings.field_rules import FieldSettings
from app.settings.limits import NO_LIMITS, LimitSettings
from app.settings.source import shown
from engines.spec import (
    LORA_FLAG,
    MAX_ADAPTERS,
    MAX_ADAPTERS_FLAG,
    EngineSpec,
    InProcessSpec,
    ManagedSpec,
    PlacedError,
    RaySpec,
    RemoteSpec,
    ReplicaRange,
    SpecModel,
)

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"


def _host_name(text: str) -> str:
    """Return a host's name in lower case, as vLLM compares it. Raises ValueError."""
    name = text.lower()
    if len(name) > 253 or not re.fullmatch(rf"{_LABEL}(?:\.{_LABEL})*", name):
        raise ValueError(
            f"{text!r} is not a host name such as images.example.com, without scheme, port and path"
        )
    return name


Domain = Annotated[str, AfterValidator(_host_name)]


class MediaSettings(SpecModel):
    """Images, audio and video in requests."""

    domains: tuple[Domain, ...] = Field(
        (),
        description="Hosts, by exact name, whose images, audio and video a request may name by "
        "URL. Other URLs are refused with 400. Engines that the gateway runs follow no redirects. "
        "Default: none; media must be data: URLs.",
    )


# Requests that each engine gets at once; auto: as many as it runs, by its own counters.
SlotsPerEngine = Annotated[int, Field(ge=1)] | Literal["auto"]


def _slots(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Return the number or auto. Raises ValueError, where a union has a fault for each member."""
    try:
        return validate(value)
    except ValidationError:
        raise ValueError(
            f"must be auto or a whole number of at least 1, not {shown(value)}"
        ) from None


class QueueSettings(SpecModel):
    """The fair queue in front of the model's engines."""

    max_in_flight: Annotated[SlotsPerEngine | None, WrapValidator(_slots)] = Field(
        None,
        description="Maximum number of requests that each engine gets at once. Further requests "
        "wait in the gateway's fair queue. Gateways with one Redis divide it. auto: as many as the "
        "engine runs at once, by its own counters. Default: no limit; vLLM's own queue holds them.",
    )
    max_waiting: int = Field(
        256,
        ge=0,
        description="Maximum number of requests in the queue. Further requests are refused with "
        "503.",
    )
    timeout_s: float = Field(
        60.0,
        gt=0,
        description="Maximum time that a request waits in the queue, in seconds. It is then "
        "refused with 503.",
    )


class UnitSettings(SpecModel):
    """Tokens that images and sound count as, in limits, budgets, usage and prices."""

    image: int = Field(
        1056,
        ge=1,
        le=1_000_000,
        description="Output tokens for each image. Default: as OpenAI's gpt-image-1 counts one of "
        "1024x1024 and medium quality.",
    )
    character: int = Field(
        1, ge=1, le=1000, description="Prompt tokens for each character of text to be spoken."
    )
    second: int = Field(
        20,
        ge=0,
        le=100_000,
        description="Output tokens for each second of speech. 0: only characters count.",
    )


# Beyond any price; above all, finite.
MAX_PRICE = 1e9
# Costs are counted in units of this place.
PRICE_PLACES = 9


class PriceSettings(SpecModel):
    """Prices per million tokens, in the currency of your reports."""

    prompt: float = Field(
        0.0, ge=0, le=MAX_PRICE, description="Price of a million uncached prompt tokens."
    )
    cached: float = Field(
        0.0, ge=0, le=MAX_PRICE, description="Price of a million cached prompt tokens."
    )
    completion: float = Field(
        0.0, ge=0, le=MAX_PRICE, description="Price of a million output tokens."
    )

    @field_validator("*")
    @classmethod
    def _check_places(cls, price: float) -> float:
        # A price of 0 instead would be a model that no budget in money bounds.
        if price != round(price, PRICE_PLACES):
            raise ValueError(f"must have at most {PRICE_PLACES} decimal places")
        return price


def _printable(name: str) -> str:
    """Refuse a name that clients would hardly send, and that logs would not show as it is."""
    if name != name.strip():
        raise ValueError("must not begin or end with a space or a line break")
    if not name.isprintable():
        raise ValueError("must not hold a line break or another control character")
    return name


ModelName = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_printable)]


def _unquoted(value: object) -> object:
    """Return "off" for YAML's unquoted off, which YAML 1.1 reads as false."""
    return "off" if value is False else value


Continuation = Annotated[Literal["exact", "off"], BeforeValidator(_unquoted)]


class AdapterSettings(SpecModel):
    """A LoRA adapter of the model, which clients request as a model of its own.

    Whatever it does not set is that of its model: the queue, the bounds, the isolation and so on.
    """

    name: ModelName = Field(
        description="Name that clients send as model, and under which engines serve the adapter."
    )
    aliases: tuple[ModelName, ...] = Field((), description="Other names of the same adapter.")
    source: str | None = Field(
        None,
        min_length=1,
        description="Directory or Hugging Face repository of the adapter, in PEFT's format. "
        "Engines that the gateway runs load it from there. Not needed for remote servers, which "
        "have loaded it themselves.",
    )
    limits: LimitSettings = Field(
        NO_LIMITS, description="Limits of the adapter for all keys together."
    )
    fallbacks: tuple[ModelName, ...] = Field(
        (), description="Models or adapters that serve a request when no engine can; as for models."
    )
    price: PriceSettings | None = Field(
        None, description="Prices per million tokens. Default: those of the model."
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the aliases."""
        return (self.name, *self.aliases)


class SplitTarget(SpecModel):
    """A model that serves a share of the requests for another name."""

    model: ModelName = Field(description="Name of a model or an adapter; no alias.")
    weight: int = Field(
        1,
        ge=0,
        le=1_000_000,
        description="Its share, relative to the weights of the others. 0: no requests.",
    )


# The settings of a model without engines of its own.
_SPLIT_SETTINGS = frozenset({"name", "aliases", "split"})


class ModelSettings(SpecModel):
    """A model that clients can request, and the engines that serve it."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["engines"]}, {"required": ["split"]}]}
    )

    name: ModelName = Field(description="Name that clients send as model.")
    aliases: tuple[ModelName, ...] = Field((), description="Other names of the same model.")
    max_choices: int | None = Field(
        128,
        ge=1,
        description="Maximum number of choices (`n`) per request. A larger n is lowered to it.",
    )
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum number of output tokens per request. A larger or missing max_tokens "
        "is set to it. Default: no limit.",
    )
    max_sequences: int | None = Field(
        256,
        ge=1,
        description="Maximum number of sequences per request: prompts times choices. Requests "
        "with more are refused.",
    )
    max_inputs: int | None = Field(
        2048,
        ge=1,
        description="Maximum number of inputs per request: texts or documents for embeddings, "
        "scores and the like. Requests with more are refused.",
    )
    media: MediaSettings = MediaSettings()
    isolation: Literal["key", "owner", "none"] = Field(
        "key",
        description="Which requests share the engines' prefix cache: those of one key, of all "
        "keys with one owner, or all requests (none). Clients that share a cache can infer each "
        "other's prompts from response times.",
    )
    stores_responses: bool = Field(
        False,
        description="Allow store, background and previous_response_id in /v1/responses. Requires "
        "engines with VLLM_ENABLE_RESPONSES_API_STORE=1.",
    )
    reasoning_field: Literal["reasoning", "both"] = Field(
        "reasoning",
        description="Name of the reasoning in /v1/chat/completions. reasoning: as vLLM sends it, "
        "byte for byte; both: also as reasoning_content, for clients written for DeepSeek's API or "
        "an earlier vLLM. The response is then no longer the engine's own bytes.",
    )
    limits: LimitSettings = Field(
        NO_LIMITS, description="Limits of the model for all keys together."
    )
    policy: Literal["round_robin", "least_loaded", "prefix", "session"] = Field(
        "least_loaded",
        description="How an engine is chosen for a request. round_robin: in turn; least_loaded: "
        "fewest requests in flight; prefix: an engine that has cached most of the prompt, with the "
        "fewest tokens to compute before it; session: one engine per session (x-session-id or a "
        "coding agent's header, prompt_cache_key, user or the key).",
    )
    eject_after: int = Field(
        5,
        ge=0,
        le=1000,
        description="Failed answers in a row (500, 502, 504, broken streams, timeouts) after which "
        "one of several engines gets no requests for a while, although its health check is good. "
        "0: never.",
    )
    fallbacks: tuple[ModelName, ...] = Field(
        (),
        description="Models, by name, that serve a request when no engine of this model can, "
        "tried in this order. Models that the key may not use are skipped, and a fallback's own "
        "fallbacks are not tried.",
    )
    queue: QueueSettings = QueueSettings()
    fields: FieldSettings = FieldSettings()
    load: Literal["eager", "on_demand"] = Field(
        "eager",
        description="When the engines start. eager: with the gateway; on_demand: at the first "
        "request.",
    )
    idle_unload_s: float | None = Field(
        None,
        gt=0,
        description="Time without requests after which a model loaded on demand is unloaded, in "
        "seconds. Default: it is unloaded only to make room for another model.",
    )
    load_wait_s: float = Field(
        300.0,
        ge=0,
        description="Maximum time that a request waits for a model to load, in seconds. It "
        "applies to models loaded on demand, and to models that start, or restart after a crash, "
        "while none of their fallbacks is up. A request that would wait longer goes to a "
        "fallback, or is refused at once with a Retry-After header. 0: no request waits.",
    )
    keep_priority: int = Field(
        0,
        description="Priority for staying loaded. Models with a lower number are unloaded first "
        "to make room.",
    )
    continuation: Continuation | None = Field(
        None,
        description="What happens to a stream whose engine dies, stalls, or is drained, unloaded "
        "or replaced. exact: it goes on at another engine, or after the restart, without a lost "
        "or repeated token; off: it ends with an error event. Default: exact for a model with "
        "several engines or with an engine that the gateway runs.",
    )
    continuation_wait_s: float = Field(
        120.0,
        ge=0,
        description="Maximum time that an interrupted stream waits for an engine, in seconds. It "
        "then ends with an error event.",
    )
    continuation_max_tokens: int = Field(
        32768,
        ge=1,
        description="Maximum number of tokens, prompt and output, up to which a stream can go on "
        "at another engine. The gateway keeps four bytes per token.",
    )
    price: PriceSettings = PriceSettings()
    units: UnitSettings = UnitSettings()
    adapters: tuple[AdapterSettings, ...] | None = Field(
        None,
        description="LoRA adapters of the model. Engines that the gateway runs are started with "
        "--enable-lora, and load each adapter before they take requests; a reload adds and removes "
        "adapters without a restart. An empty list starts engines that adapters can be added to "
        "later. Default: none, and engines without LoRA.",
    )
    split: tuple[SplitTarget, ...] = Field(
        (),
        max_length=64,
        description="Models that share the requests for this name, by weight. A session (as for "
        "policy: session) or else a key stays with one of them. The model itself may be one, if it "
        "has engines. Default: none; the model serves all of its requests.",
    )
    engines: tuple[EngineSpec, ...] = Field(
        (), min_length=1, description="Engines that serve the model. Required without split."
    )

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if not self.engines:
            if not self.split:
                raise PlacedError("is required", "engines")
            if others := sorted(self.model_fields_set - _SPLIT_SETTINGS):
                message = "a split without engines has no such setting: set it for its models"
                raise PlacedError(message, others[0])
        names = [target.model for target in self.split]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise PlacedError(f"{name!r} is given twice", "split", number, "model")
            if name == self.name and not self.engines:
                message = "the model has no engines to be a part of its own split"
                raise PlacedError(message, "split", number, "model")
        if self.split and not any(target.weight for target in self.split):
            raise PlacedError("every weight is 0: one must be above", "split")
        return self

    @model_validator(mode="after")
    def _check_loading(self) -> Self:
        if self.load == "on_demand":
            for spec in self.engines:
                if spec.kind not in ("process", "container", "ray"):
                    raise ValueError(
                        f"load: on_demand needs kind: process, container or ray, not {spec.kind}"
                    )
        elif self.idle_unload_s is not None:
            raise ValueError("idle_unload_s needs load: on_demand")
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.adapters is None:
            return self
        for number, spec in enumerate(self.engines):
            if isinstance(spec, InProcessSpec):
                raise PlacedError(
                    "adapters need another kind of engine, such as process", "engines", number
                )
            if isinstance(spec, ManagedSpec):
                self._check_adapter_flags(number, spec, len(self.adapters))
        bases = {one.served_model_name for one in self.engines if isinstance(one, RemoteSpec)}
        managed = any(isinstance(spec, ManagedSpec) for spec in self.engines)
        for number, adapter in enumerate(self.adapters):
            if adapter.name in bases:
                message = (
                    "is the served_model_name of a server, which would answer without the adapter"
                )
                raise PlacedError(message, "adapters", number, "name")
            if managed and adapter.source is None:
                message = "is needed: engines load the adapter from there"
                raise PlacedError(message, "adapters", number, "source")
        return self

    @staticmethod
    def _check_adapter_flags(number: int, spec: ManagedSpec, adapters: int) -> None:
        place = ("engines", number, "args")
        if spec.args.get(LORA_FLAG) is False:
            raise PlacedError("adapters of the model need it", *place, LORA_FLAG)
        most = spec.args.get(MAX_ADAPTERS_FLAG, MAX_ADAPTERS)
        if isinstance(most, int) and adapters > most:
            message = f"the model has {adapters} adapters, the engine keeps {most}: set it higher"
            raise PlacedError(message, *place, MAX_ADAPTERS_FLAG)

    @model_validator(mode="after")
    def _check_scaling(self) -> Self:
        ranges = [
            number
            for number, spec in enumerate(self.engines)
            if isinstance(spec, RaySpec) and isinstance(spec.replicas, ReplicaRange)
        ]
        if not ranges:
            return self
        place = ("engines", ranges[0], "replicas")
        if len(ranges) > 1:
            raise PlacedError("one specification of a model can have min and max", *place)
        if not isinstance(self.queue.max_in_flight, int):
            raise PlacedError(
                "min and max need queue.max_in_flight of the model as a number: the requests that "
                "one engine takes at once",
                *place,
            )
        if self.load == "on_demand":
            raise PlacedError("min and max need load: eager", *place)
        return self

    @property
    def scaling(self) -> ReplicaRange | None:
        """The bounds of the number of engines that are scaled; None: none are."""
        for spec in self.engines:
            if isinstance(spec, RaySpec) and isinstance(spec.replicas, ReplicaRange):
                return spec.replicas
        return None

    @property
    def continues_streams(self) -> bool:
        """True if an interrupted stream goes on where that is possible."""
        if self.continuation is not None:
            return self.continuation == "exact"
        several = len(self.engines) > 1 or bool(self.discovering)
        return several or any(spec.kind != "remote" for spec in self.engines)

    @property
    def discovering(self) -> tuple[RemoteSpec, ...]:
        """The engines whose servers are discovered: any number for each, which come and go."""
        return tuple(
            spec
            for spec in self.engines
            if isinstance(spec, RemoteSpec) and spec.discover is not None
        )

    @property
    def canonical_names(self) -> dict[str, str]:
        """Every name and alias, adapters' included, with the name of its model or adapter."""
        named: tuple[ModelSettings | AdapterSettings, ...] = (self, *(self.adapters or ()))
        return {name: one.name for one in named for name in one.names}

    @property
    def prices(self) -> dict[str, PriceSettings]:
        """The prices of the model and of each adapter, by name."""
        adapters = self.adapters or ()
        return {self.name: self.price} | {one.name: one.price or self.price for one in adapters}

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the aliases."""
        return (self.name, *self.aliases)
