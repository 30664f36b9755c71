"""Check of `models[].split` across models. Pure."""

from collections.abc import Sequence

from app.settings.models import AdapterSettings, ModelSettings
from app.settings.suggest import did_you_mean
from engines.spec import PlacedError

# Where a model or an adapter is in the configuration, and what it is there.
Placed = tuple[tuple[str | int, ...], ModelSettings | AdapterSettings]


def check_splits(named: Sequence[Placed]) -> None:
    """Check the splits of all models and adapters. Raises PlacedError for the first fault."""
    names = [found.name for _, found in named]
    splits = {one.name: one for _, one in named if isinstance(one, ModelSettings) and one.split}
    for where, found in named:
        for place, target in enumerate(found.split if isinstance(found, ModelSettings) else ()):
            fault = None
            if target.model not in names:
                hint = did_you_mean(target.model, names, "; use a model's name, not an alias")
                fault = f"{target.model!r} is not a model{hint}"
            elif target.model in splits and target.model != found.name:
                fault = f"{target.model!r} is a split itself: name its models"
            if fault is not None:
                raise PlacedError(fault, *where, "split", place, "model")
        for place, name in enumerate(found.fallbacks):
            if name in splits and not splits[name].engines:
                message = f"{name!r} is a split without engines: name its models"
                raise PlacedError(message, *where, "fallbacks", place)
