"""Fields of FastAPI's endpoints, made once per process: a quarter of a gateway's start."""

from collections.abc import Hashable
from typing import Any

from fastapi import routing
from fastapi.dependencies import utils
from fastapi.dependencies.utils import ParamDetails


def share_fields() -> None:
    """Have gateways that start later share the fields of parameters and of responses.

    FastAPI changes none of them. Of parameters, only those that name no dependency are shared:
    a dependency has its gateway.
    """
    parameters, responses = vars(utils), vars(routing)  # private names to mypy
    analyze, make = parameters["analyze_param"], responses["create_model_field"]
    # The objects whose identities are a key stay beside its details.
    known: dict[tuple[str, int, int, bool], tuple[Any, Any, ParamDetails]] = {}
    fields: dict[Hashable, Any] = {}

    def analyze_once(
        *, param_name: str, annotation: Any, value: Any, is_path_param: bool
    ) -> ParamDetails:
        key = (param_name, id(annotation), id(value), is_path_param)
        if key in known:
            return known[key][2]
        details: ParamDetails = analyze(
            param_name=param_name,
            annotation=annotation,
            value=value,
            is_path_param=is_path_param,
        )
        if details.depends is None:
            known[key] = (annotation, value, details)
        return details

    def make_once(name: str, type_: Any, mode: Any = "validation") -> Any:
        key = (name, type_, mode)
        if key not in fields:
            fields[key] = make(name=name, type_=type_, mode=mode)
        return fields[key]

    parameters["analyze_param"], responses["create_model_field"] = analyze_once, make_once
