"""Rules on the fields of request bodies, for a model or a key. Pure."""

from collections.abc import Iterator
from math import isfinite
from typing import Annotated, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
    model_validator,
)

from engines.spec import SpecModel

MAX_RULES = 64
_NAME = "[A-Za-z_][A-Za-z0-9_-]*"
# The gateway sets it to the model's name on the engine.
_RESERVED = "model"


def _number(value: object) -> int | float:
    # bool is a subclass of int, and pydantic would take text of digits for a number.
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError("must be a finite number")
    return value


FieldPath = Annotated[str, Field(max_length=256, pattern=rf"^{_NAME}(\.{_NAME}){{0,3}}$")]
Bound = Annotated[int | float, BeforeValidator(_number, json_schema_input_type=int | float)]
# Otherwise the schema would refer to an empty definition.
ForcedValue = Annotated[JsonValue, WithJsonSchema({})]


class FieldSettings(SpecModel):
    """Rules on the fields of request bodies. A field is up to four names, joined by dots."""

    model_config = ConfigDict(allow_inf_nan=False, hide_input_in_errors=True)

    allow: tuple[FieldPath, ...] = Field(
        (),
        max_length=MAX_RULES,
        description="Fields to pass on that are dropped or refused by default: kv_transfer_params, "
        "ec_transfer_params, request_id, session_id, priority, vllm_xargs, stream_interval, lora, "
        "extra_params, extra_body, sampling_params_list.",
    )
    deny: tuple[FieldPath, ...] = Field(
        (),
        max_length=MAX_RULES,
        description="Fields that a request may not have. A request with one is refused with 400.",
    )
    force: dict[FieldPath, ForcedValue] = Field(
        {},
        max_length=MAX_RULES,
        description="Fields to set, with their values, whatever the client sent.",
    )
    max: dict[FieldPath, Bound] = Field(
        {},
        max_length=MAX_RULES,
        description="Upper bounds of numeric fields. Larger numbers are lowered to the bound.",
    )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        # Faults do not repeat paths: one may be a key that was pasted there.
        for path in self._paths():
            if path.partition(".")[0] == _RESERVED:
                raise ValueError("model cannot be named: the gateway sets it")
        for one, other in (("allow", "deny"), ("force", "deny"), ("force", "max")):
            if not set(getattr(self, one)).isdisjoint(getattr(self, other)):
                raise ValueError(f"a field must not be in both {one} and {other}")
        return self

    def _paths(self) -> Iterator[str]:
        for rules in (self.allow, self.deny, self.force, self.max):
            yield from rules
