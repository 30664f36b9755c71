"""Splits: requests of one name go to several models, through the real server with fake engines."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from app.telemetry import EndedRequest
from tests.app.console.visits import visiting
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, ROOT_KEY, Gateway, free_port, remote, running, settings_for
from tests.waiting import wait_until

MESSAGES = [{"role": "user", "content": "hi"}]


def shares(**weights: int) -> list[dict[str, object]]:
    return [{"model": name, "weight": weight} for name, weight in weights.items()]


class Setup:
    """The split `chat` of the models `old` and `new`, and the fake engine behind each."""

    settings: Settings

    def __init__(self, stack: AsyncExitStack, tmp_path: Path) -> None:
        self._stack = stack
        self._tmp_path = tmp_path

    def changed(self, split: list[dict[str, object]], **models: dict[str, Any]) -> Settings:
        """Return the settings with another split; `models` has more fields of `old` and `new`."""
        plain = [
            {"name": fake.model, "engines": [remote(fake.url)], **models.get(fake.model, {})}
            for fake in (self.old, self.new)
        ]
        chat = {"name": "chat", "split": split, **models.get("chat", {})}
        return settings_for(chat, *plain, run_dir=self._tmp_path)

    async def start(self, split: list[dict[str, object]], **models: dict[str, Any]) -> Gateway:
        self.old = await self._stack.enter_async_context(Fake("old"))
        self.new = await self._stack.enter_async_context(Fake("new"))
        self.settings = self.changed(split, **models)
        running_one = running(self.settings, source=lambda: self.settings)
        return await self._stack.enter_async_context(running_one)

    async def reload(self, gateway: Gateway, split: list[dict[str, object]]) -> str:
        """Return the first line of the report, once the split has changed."""
        self.settings = self.changed(split)
        report = (await gateway.client.post("/admin/reload", headers=ROOT)).json()
        assert report["ok"], report
        first: str = report["lines"][0]
        return first


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        yield Setup(stack, tmp_path)


async def client_key(gateway: Gateway, *models: str) -> dict[str, str]:
    """Return the headers of a new key that may use these models."""
    given = {"name": "limited", "models": [*models]}
    made = (await gateway.client.post("/admin/keys", json=given, headers=ROOT)).json()
    return {"authorization": f"Bearer {made['key']}"}


async def answered_by(gateway: Gateway, session: str, **fields: Any) -> str:
    """Return the model that answers a request of a session."""
    answer = await gateway.client.post(
        "/v1/chat/completions",
        json={"model": "chat", "messages": MESSAGES, **fields},
        headers={"x-session-id": session},
    )
    assert answer.status_code == 200, answer.text
    return answer.headers["x-gateway-model"]


async def test_sessions_go_by_weight_and_stay(setup: Setup) -> None:
    gateway = await setup.start(shares(old=3, new=1))
    sessions = [str(number) for number in range(40)]
    first = [await answered_by(gateway, one) for one in sessions]
    again = [await answered_by(gateway, one, stream=True) for one in sessions]
    assert first == again
    counts = Counter(first)
    assert set(counts) == {"old", "new"}
    assert counts["old"] > counts["new"]
    for name, count in counts.items():
        series = "gateway_split_requests_total"
        assert await gateway.metric(series, model="chat", target=name) == 2 * count
    # The engine is asked under its own name.
    assert {seen.json["model"] for seen in setup.new.seen if seen.method == "POST"} == {"new"}


async def test_key_stays_with_one_model_where_there_is_no_session(setup: Setup) -> None:
    gateway = await setup.start(shares(old=1, new=1))
    answers = [await gateway.chat("chat", temperature=0.1 * n) for n in range(4)]
    assert len({answer.headers["x-gateway-model"] for answer in answers}) == 1


async def test_model_with_engines_has_a_part_of_its_own_split(setup: Setup) -> None:
    gateway = await setup.start(shares(new=1), old={"split": shares(old=3, new=1)})
    models = {
        (
            await gateway.client.post(
                "/v1/chat/completions",
                json={"model": "old", "messages": MESSAGES, "user": str(user)},
            )
        ).headers["x-gateway-model"]
        for user in range(20)
    }
    assert models == {"old", "new"}


async def test_key_of_a_split_may_use_its_models_through_it_alone(setup: Setup) -> None:
    gateway = await setup.start(shares(old=1, new=1), old={"fallbacks": ["new"]})
    headers = await client_key(gateway, "chat")
    gateway.client.headers.update(headers)
    assert {await answered_by(gateway, str(n)) for n in range(20)} == {"old", "new"}
    for name in ("old", "new"):
        assert (await gateway.chat(name)).status_code == 404
    listed = (await gateway.client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in listed] == [("chat", 2048)]
    # Fallbacks as well.
    setup.old.fault = "dead"
    assert {await answered_by(gateway, str(n)) for n in range(20)} == {"new"}


async def test_key_without_the_split_may_not_use_it(setup: Setup) -> None:
    gateway = await setup.start(shares(old=1, new=1))
    gateway.client.headers.update(await client_key(gateway, "old"))
    answer = await gateway.chat("chat")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_ledger_has_both_names(setup: Setup) -> None:
    gateway = await setup.start(shares(new=1), chat={"aliases": ["gpt-4o"]})
    ended: list[EndedRequest] = []
    gateway.state.ledger.watch(lambda _batch, one: ended.append(one))
    await gateway.chat("chat")
    await gateway.chat("gpt-4o")
    await wait_until(lambda: len(ended) == 2)
    names = [(one.record.model, one.record.requested_model) for one in ended]
    assert names == [("new", "chat"), ("new", "gpt-4o")]
    path = "/v1/chat/completions"
    series = "gateway_requests_total"
    assert await gateway.metric(series, model="new", endpoint=path, status="200") == 2
    assert await gateway.metric(series, model="chat", endpoint=path, status="200") == 0


async def test_limits_are_those_of_the_model_that_answers(setup: Setup) -> None:
    limited = {"limits": {"requests_per_minute": 1}}
    gateway = await setup.start(shares(old=0, new=1), new=limited)
    assert [(await gateway.chat("chat")).status_code for _ in range(2)] == [200, 429]
    assert (await gateway.chat("old")).status_code == 200


async def test_split_whose_models_are_down_is_a_model_without_engines(setup: Setup) -> None:
    gone = {"engines": [remote(f"http://127.0.0.1:{free_port()}")]}
    gateway = await setup.start(shares(old=1, new=1), old=gone, new=gone)
    for number in range(8):
        answer = await gateway.chat("chat", user=str(number))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "retry-after" in answer.headers


async def test_reload_shifts_weights_and_sessions_that_stay_do_not_move(setup: Setup) -> None:
    gateway = await setup.start(shares(old=1, new=1))
    sessions = [str(number) for number in range(20)]
    before = {one: await answered_by(gateway, one) for one in sessions}
    assert await setup.reload(gateway, shares(old=1, new=3)) == "~ model chat: split.new 1 → 3"
    after = {one: await answered_by(gateway, one) for one in sessions}
    assert all(after[one] == "new" for one in sessions if before[one] == "new")
    await setup.reload(gateway, shares(new=1))
    assert {await answered_by(gateway, one) for one in sessions} == {"new"}


async def test_operators_see_the_shares(setup: Setup) -> None:
    gateway = await setup.start(shares(old=3, new=1))
    rows = (await gateway.client.get("/admin/models", headers=ROOT)).json()["data"]
    chat = next(row for row in rows if row["name"] == "chat")
    assert chat["split"] == [
        {"model": "old", "weight": 3, "share": 0.75},
        {"model": "new", "weight": 1, "share": 0.25},
    ]
    assert (chat["state"], chat["ready"], chat["engines"]) == ("ready", 2, 2)
    load = await gateway.client.post("/admin/models/chat/unload", headers=ROOT)
    assert load.status_code == 409
    assert "a split and has no engines of its own" in load.text
    async with visiting(gateway, ROOT_KEY) as admin:
        for path in ("/console/models", "/console/models/chat", "/console"):
            page = " ".join((await admin.get(path, follow_redirects=True)).text.split())
            assert "75 %" in page, path
