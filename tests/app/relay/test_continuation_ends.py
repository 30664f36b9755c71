"""Where an interrupted stream goes on, and how it ends where it cannot."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.relay import continuation
from app.relay.request_context import KEY_DISABLED
from app.sse import COMMENT
from engines import remote as remote_engine
from engines.base import EngineState
from tests.app.relay.continuing import CHAT, Stream, Streams, streaming
from tests.fakes.stream_faults import StreamFault
from tests.fakes.vllm import Fake
from tests.gateway import ROOT
from tests.waiting import PATIENCE_S, wait_until

GREEDY: dict[str, Any] = {"temperature": 0}
FIRST: dict[str, Any] = {"policy": "round_robin"}  # the first engine is asked first
EXACT: dict[str, Any] = {"continuation": "exact", **FIRST}


def ends_with(stream: Stream, reason: str, *, code: str = "engine_failed") -> None:
    """Assert that a stream ends with an error event that is recorded with its reason."""
    assert stream.error["code"] == code
    assert stream.answer.whole, "the body ends in order behind the error"
    assert b"[DONE]" not in stream.body
    assert stream.record.not_continued == reason
    assert (stream.record.status, stream.record.outcome) == (200, "failed")
    assert stream.record.usage is not None
    assert stream.record.usage.estimated


def pair(**second: Any) -> list[Fake]:
    return [Fake(names_ids=True), Fake(names_ids=True, **second)]


async def test_sampled_choices_end_with_an_error(tmp_path: Path) -> None:
    async with streaming(tmp_path, model=FIRST) as streams:
        streams.fail("close", 2)
        ends_with(await streams.ask(n=2), "several_choices")
        assert len(streams.posts()) == 1
        assert await streams.metric("none", "several_choices") == 1


async def test_sampled_answer_that_thinks_again_ends_with_an_error(tmp_path: Path) -> None:
    """Behind its first thought all is text; a replay would take the rest for a thought."""
    async with streaming(tmp_path, model=FIRST) as streams:
        streams.fail("close", 8)
        stream = await streams.ask(say="<think>one</think>two <think>three four</think>five")
        ends_with(stream, "second_thought")
        assert await streams.metric("replay", "second_thought") == 1


async def test_second_death_ends_the_stream_and_no_third_engine_is_asked(tmp_path: Path) -> None:
    async with streaming(tmp_path, 3, model=FIRST) as streams:
        streams.fail("close", 1, times=2)
        stream = await streams.ask()
        ends_with(stream, "died_again")
        assert stream.record.continued == 1
        assert not any(seen.target == CHAT for seen in streams.fakes[2].seen)
        assert await streams.metric("replay", "died_again") == 1


async def test_second_death_before_its_head_is_one_as_well(tmp_path: Path) -> None:
    async with streaming(tmp_path, 3, model=FIRST) as streams:
        streams.fakes[0].stream_fault = StreamFault("close", 1)
        streams.fakes[1].dead = True  # every request gets a 500
        ends_with(await streams.ask(), "died_again")
        assert not any(seen.target == CHAT for seen in streams.fakes[2].seen)


async def test_killed_engine_is_left_for_one_that_lives(tmp_path: Path) -> None:
    async with streaming(tmp_path, 3, model=FIRST) as streams:
        undisturbed = await streams.ask()
        streams.fakes[1].stream_fault = StreamFault("kill", 1)
        stream = await streams.ask()
        assert (stream.error, stream.text) == (None, undisturbed.text)


@pytest.mark.parametrize(
    "other", [{"version": "0.33.0"}, {"max_model_len": 4096}], ids=["version", "length"]
)
async def test_engine_with_other_facts_does_not_go_on(tmp_path: Path, other: Any) -> None:
    async with streaming(tmp_path, fakes=pair(**other), model=FIRST) as streams:
        streams.fail("close", 1)
        ends_with(await streams.ask(), "no_replica")
        assert len(streams.posts()) == 1


@pytest.mark.parametrize(("fields", "reason"), [(GREEDY, None), ({}, "version")])
async def test_engine_of_a_version_without_ids_is_verified(
    tmp_path: Path, fields: dict[str, Any], reason: str | None
) -> None:
    fakes = [Fake(names_ids=True, version="0.31.0", knows_ids=False) for _ in range(2)]
    async with streaming(tmp_path, fakes=fakes, model=FIRST) as streams:
        streams.fail("close", 2)
        stream = await streams.ask(**fields)
        assert "return_token_ids" not in streams.posts()[0]
        if reason is None:
            assert (stream.error, stream.record.continued) == (None, 1)
        else:
            ends_with(stream, reason)


async def test_engine_that_ignores_ids_against_its_version_is_not_trusted(tmp_path: Path) -> None:
    async with streaming(tmp_path, fakes=pair(knows_ids=False), model=FIRST) as streams:
        streams.fakes[0].stream_fault = StreamFault("close", 2)
        stream = await streams.ask()
        ends_with(stream, "refused")
        assert stream.body.count(b'"content":') == 3  # of the role, and two tokens


async def test_prompt_over_the_bound_is_not_recorded_which_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"continuation_max_tokens": 5, **FIRST}
    caplog.set_level("INFO", "app.relay")
    async with streaming(tmp_path, model=settings) as streams:
        streams.fail("close", 2)
        long = [{"role": "user", "content": "many words " * 100}]
        stream = await streams.ask(messages=long)
        ends_with(stream, "too_long")
        assert "return_token_ids" not in streams.posts()[0]
        await streams.ask(messages=long)
    assert caplog.text.count("continuation_max_tokens is 5") == 1


async def test_continuation_off_is_a_request_as_before(tmp_path: Path) -> None:
    async with streaming(tmp_path, model={"continuation": "off", **FIRST}) as streams:
        streams.fail("close", 2)
        stream = await streams.ask()
        assert stream.error["code"] == "engine_failed"
        assert stream.record.not_continued is None
        [sent] = streams.posts()
        extra = {"cache_salt", "stream_options"}
        assert sent.keys() - extra == {"model", "stream", "messages"}


@pytest.mark.slow
async def test_stall_is_continued(tmp_path: Path) -> None:
    async with streaming(tmp_path, model=FIRST, timeouts={"stall_s": 0.2}) as streams:
        undisturbed = await streams.ask()
        streams.fail("stall", 2)
        stream = await streams.ask()
        assert (stream.error, stream.text) == (None, undisturbed.text)


async def test_busy_engine_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "RETRY_S", 0.01)
    async with streaming(tmp_path, model=FIRST) as streams:
        streams.fakes[0].stream_fault = StreamFault("close", 2)
        async with streams.asking() as (client, name):
            streams.fakes[1].fault = "status:503"
            await wait_until(lambda: len(streams.posts()) > 2)
            streams.fakes[1].fault = "say:one two three"
            answer = await client.answer()
        await wait_until(lambda: name in streams.records)
        record = streams.records[name]
        assert answer.whole
        assert (record.continued, record.not_continued) == (1, None)


async def test_engine_that_stays_busy_is_waited_for_no_longer_than_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuation, "RETRY_S", 0.01)
    settings = {"continuation_wait_s": 0.05, **FIRST}
    async with streaming(tmp_path, model=settings) as streams:
        streams.fakes[0].stream_fault = StreamFault("close", 2)
        async with streams.asking() as (client, name):
            streams.fakes[1].fault = "status:503"
            answer = await client.answer()
        await wait_until(lambda: name in streams.records)
        ends_with(Stream(CHAT, answer, streams.records[name]), "no_replica")


@pytest.mark.slow
async def test_streams_of_a_dead_engine_spread_by_load(tmp_path: Path) -> None:
    async with streaming(tmp_path, 3, model=FIRST) as streams:
        streams.fakes[0].stream_fault = StreamFault("stall", 2, times=None)
        asked = [asyncio.create_task(streams.ask(say="one two three")) for _ in range(48)]
        await streams.fakes[0].until_stalled(16)
        for fake in streams.fakes[1:]:
            fake.seen.clear()
        streams.fakes[0].dead = True
        done = await asyncio.gather(*asked)
        assert [stream.error for stream in done] == [None] * 48
        assert sum(stream.record.continued for stream in done) == 16
        taken = [sum(seen.target == CHAT for seen in f.seen) for f in streams.fakes[1:]]
        assert sum(taken) == 16
        assert max(taken) <= 10


async def test_moved_stream_goes_on_and_is_no_death(tmp_path: Path) -> None:
    async with streaming(tmp_path, model=FIRST) as streams:
        undisturbed = await streams.ask()
        for fake in streams.fakes:
            fake.pace_s = 0.02
        replicas = streams.gateway.state.catalogue.models[0].replicas
        async with streams.asking() as (client, name):
            for _ in range(3):
                await wait_until(lambda: any(replica.streams for replica in replicas))
                assert sum(replica.move_streams() for replica in replicas) == 1
            answer = await client.answer()
        await wait_until(lambda: name in streams.records)
        stream = Stream(CHAT, answer, streams.records[name])
        assert (stream.error, stream.text) == (None, undisturbed.text)
        assert stream.tokens == undisturbed.tokens


class TestGap:
    """The second engine is down: the stream waits for it."""

    @pytest.fixture(autouse=True)
    def _quick_checks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote_engine, "CHECK_INTERVAL_S", 0.02)

    @staticmethod
    async def begin(streams: Streams) -> None:
        """Take the second engine down, and have the first fail."""
        streams.fakes[1].kill()
        engine = streams.gateway.state.catalogue.engines[1]
        await wait_until(lambda: engine.state is EngineState.FAILED)
        streams.fakes[0].stream_fault = StreamFault("close", 2)

    async def test_stream_waits_for_the_restart_with_comments(self, tmp_path: Path) -> None:
        server = {"sse_keepalive_s": 0.02}
        async with streaming(tmp_path, model=FIRST, server=server) as streams:
            undisturbed = await streams.ask()
            await self.begin(streams)
            async with streams.asking() as (client, name):
                raw = await client.until(COMMENT)
                raw += await client.until(COMMENT)
                await streams.fakes[1].revive()
                raw += await client.until(b"[DONE]\n\n")
            await wait_until(lambda: name in streams.records)
            assert raw.count(b'"content":"one"') == raw.count(b'"content":" three"') == 1
            assert streams.records[name].usage == undisturbed.record.usage

    async def test_wait_ends_as_configured(self, tmp_path: Path) -> None:
        settings = {"continuation_wait_s": 0.05, **FIRST}
        async with streaming(tmp_path, model=settings) as streams:
            await self.begin(streams)
            ends_with(await streams.ask(), "no_replica")
            assert await streams.metric("replay", "no_replica") == 1

    async def test_client_that_leaves_ends_the_wait(self, tmp_path: Path) -> None:
        async with streaming(tmp_path, model=FIRST) as streams:
            await self.begin(streams)
            async with streams.asking() as (client, name):
                await client.until(b'"content":"one"')
                await self.until_waiting(streams)
            await wait_until(lambda: name in streams.records)
            record = streams.records[name]
            assert (record.status, record.outcome) == (499, "disconnected")
            assert await streams.metric("replay", "disconnected") == 1
            assert len(streams.posts()) == 1

    async def test_disabled_key_ends_the_wait(self, tmp_path: Path) -> None:
        async with streaming(tmp_path, model=FIRST) as streams:
            await self.begin(streams)
            admin = streams.gateway.client
            made = (await admin.post("/admin/keys", json={"name": "k"}, headers=ROOT)).json()
            key = b"authorization: Bearer " + made["key"].encode()
            async with streams.asking(key=key) as (client, _):
                await client.until(b'"content":"one"')
                await self.until_waiting(streams)
                path = f"/admin/keys/{made['id']}/disable?now=true"
                assert (await admin.post(path, headers=ROOT)).status_code == 200
                assert KEY_DISABLED.encode() in await client.chunked()

    async def test_cancellation_ends_the_wait(self, tmp_path: Path) -> None:
        async with streaming(tmp_path, model=FIRST) as streams:
            await self.begin(streams)
            requests = streams.gateway.state.requests
            async with streams.asking() as (client, name):
                await client.until(b'"content":"one"')
                await self.until_waiting(streams)
                [view] = requests.in_flight()
                assert [phase.name for phase in view.phases][-2:] == ["decode", "continuation"]
                assert requests.cancel(view.id, "root") is not None
                assert b"canceled by an operator" in await client.chunked()
            await wait_until(lambda: name in streams.records)
            record = streams.records[name]
            assert (record.status, record.outcome) == (200, "canceled")
            assert len(streams.posts()) == 1

    async def test_draining_gateway_waits_for_the_stream(self, tmp_path: Path) -> None:
        async with streaming(tmp_path, model=FIRST) as streams:
            await self.begin(streams)
            async with streams.asking() as (client, _):
                await client.until(b'"content":"one"')
                await self.until_waiting(streams)
                admission = streams.gateway.state.admission
                admission.drain()
                idle = asyncio.create_task(admission.wait_until_idle())
                await streams.fakes[1].revive()
                assert b"[DONE]" in await client.until(b"[DONE]\n\n")
                await asyncio.wait_for(idle, PATIENCE_S)

    @staticmethod
    async def until_waiting(streams: Streams) -> None:
        await wait_until(lambda: any(q.suspended for q in streams.gateway.state.admission._all()))
