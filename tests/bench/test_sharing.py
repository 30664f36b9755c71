"""The parts of the benchmark of several gateways, without gateways."""

import asyncio

import httpx

from bench.sharing import WAYS, Result, Takeover, sessions, table
from bench.sharing_engine import BLOCK_CHARS, Engine


def test_sessions_of_every_measurement_are_the_same() -> None:
    first = sessions(3)
    assert first == sessions(3)
    assert {one.parallel for one in first} == {1, 6}
    assert all(0 <= one.begins_s < 3 and 0 <= one.gateway < 1 for one in first)


def test_table_has_a_row_for_each_result() -> None:
    results = [Result(way.name, "session", 0.25, 0.5, 100, 0.012) for way in WAYS]
    made = table(results, Takeover(2.04, 2.2, (12, 18)), 2)
    assert [row[1:] for row in made.rows] == [["0.25", "50%", "12", "100"]] * len(WAYS)
    assert "from 12 to 18 requests in flight" in made.note


async def ask(engine: Engine, text: str, decode_s: float = 0.0) -> int:
    messages = [{"role": "user", "content": text}]
    body = {"model": "m", "messages": messages, "decode_s": decode_s}
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{engine.url}/v1/chat/completions", json=body)
    return answer.status_code


async def test_engine_counts_what_is_in_its_prefix_cache() -> None:
    async with Engine() as engine:
        prompt = "x" * BLOCK_CHARS
        assert await ask(engine, prompt) == 200
        assert (engine.prompt_chars, engine.cached_chars) == (BLOCK_CHARS, 0)
        assert await ask(engine, prompt * 2) == 200
        assert engine.cached_chars == BLOCK_CHARS
        engine.forget()
        assert await ask(engine, prompt) == 200
        assert engine.cached_chars == 0


async def test_engine_counts_requests_in_flight() -> None:
    async with Engine() as engine:
        asked = asyncio.create_task(ask(engine, "x", decode_s=0.05))
        while not engine.in_flight:
            await asyncio.sleep(0)
        assert await asked == 200
        assert engine.in_flight == 0
