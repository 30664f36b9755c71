"""What a reload says that it does to requests."""

from dataclasses import replace
from typing import Any

from app.reload.difference import Takeover, difference
from app.reload.effects import NONE, request_effects
from app.settings import Settings


def model(name: str = "demo", **fields: Any) -> dict[str, Any]:
    return {"name": name, "engines": [{"kind": "process", "model": "m", **fields}]}


def settings(*models: dict[str, Any]) -> Settings:
    return Settings(models=models, server={"drain_timeout_s": 45})


def takeover(**fields: Any) -> str:
    """Return the effect of replacing the engine of a model."""
    found = difference(settings(model(args={"a": 1})), settings(model(args={"a": 2})))
    usual: dict[str, Any] = {
        "old": "demo-0", "new": "demo-1", "obstacle": None, "others_serve": False,
        "requests_wait": False, "load_s": None,
    }  # fmt: skip
    (change,) = found.changed
    changed = replace(change, takeovers=(Takeover(**{**usual, **fields}),))
    (effect,) = request_effects(replace(found, changed=(changed,)))
    return effect


def test_an_added_model_affects_no_request() -> None:
    found = difference(settings(model()), settings(model(), model("other")))
    assert list(request_effects(found)) == [NONE]


def test_a_removed_model_refuses_new_requests_and_finishes_the_others() -> None:
    found = difference(settings(model(), model("other")), settings(model()))
    (effect,) = request_effects(found)
    assert "other leaves: new requests for it are refused" in effect
    assert "up to 45 s to finish" in effect


def test_servers_of_another_source_have_their_drain() -> None:
    def demo(file: str) -> dict[str, Any]:
        return {"name": "demo", "engines": [{"kind": "remote", "discover": {"file": file}}]}

    found = difference(settings(demo("a.json")), settings(demo("b.json")))
    (effect,) = request_effects(found)
    assert "discovers servers anew" in effect
    assert "up to 45 s to finish" in effect


def test_fewer_engines_finish_their_requests() -> None:
    found = difference(settings(model(replicas=2)), settings(model()))
    (effect,) = request_effects(found)
    assert "fewer engines" in effect


def test_a_takeover_says_who_serves_meanwhile() -> None:
    assert "serves all along" in takeover()
    crowded = {"obstacle": "crowded", "new": "demo-0"}
    assert "the other engines of the model take new ones" in takeover(**crowded, others_serve=True)
    assert "new requests wait until demo-0 is ready" in takeover(**crowded, requests_wait=True)
    assert "the model takes no requests until demo-0 is ready" in takeover(**crowded)
