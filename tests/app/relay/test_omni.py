"""Images and speech of vllm-omni: passed byte for byte, counted by the units of their model."""

import asyncio
import base64
import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from app.telemetry import EndedRequest
from tests.app.raw import connected, request
from tests.app.tenants import make_key, tokens
from tests.fakes.omni import EDITS, IMAGES, PIECE, PNG, SPEECH, form_of, pieces_of, wav_header
from tests.fakes.vllm import Fake
from tests.gateway import KEY, Gateway, serving_demo
from tests.waiting import wait_until

UNITS = {"units": {"image": 1000, "character": 2, "second": 10}}
CHAT_PATH = "/v1/chat/completions"
# Four seconds of the fake's sound.
TEXT = "The quick brown fox jumps over the dogs"
SOUND = b"".join(pieces_of(TEXT))
BASE64_PNG = base64.b64encode(PNG).decode()


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with serving_demo(tmp_path, fake.url, model=UNITS) as running:
        yield running


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{gateway.client.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as opened:
        yield opened


def asked(fake: Fake) -> list[str]:
    return [seen.target for seen in fake.seen if seen.method == "POST"]


async def counted(gateway: Gateway) -> tuple[int, int]:
    return await tokens(gateway, "prompt"), await tokens(gateway, "completion")


class TestImages:
    async def test_each_image_is_counted(
        self, gateway: Gateway, client: openai.AsyncOpenAI, fake: Fake
    ) -> None:
        made = await client.images.generate(model="demo", prompt="a cat", n=3, size="1024x1024")
        assert [image.b64_json for image in made.data or ()] == [BASE64_PNG] * 3
        assert fake.seen[-1].json == {
            "model": "demo", "prompt": "a cat", "n": 3, "size": "1024x1024",
        }  # fmt: skip
        assert await counted(gateway) == (0, 3000)

    async def test_layers_are_images(self, gateway: Gateway) -> None:
        body = {"model": "demo", "prompt": "a cat", "n": 2, "layers": 4}
        assert (await gateway.client.post(IMAGES, json=body)).status_code == 200
        assert await counted(gateway) == (0, 8000)

    @pytest.mark.parametrize("count", [1, 2])
    async def test_files_pass_byte_for_byte(self, gateway: Gateway, count: int) -> None:
        body = {"model": "demo", "prompt": "a cat", "n": count, "response_format": "file"}
        answer = await gateway.client.post(IMAGES, json=body)
        assert answer.headers["content-disposition"].startswith("attachment")
        if count == 1:
            assert answer.headers["content-type"] == "image/png"
            assert answer.content == PNG
        else:
            assert len(zipfile.ZipFile(io.BytesIO(answer.content)).namelist()) == count

    async def test_images_are_edited(
        self, gateway: Gateway, client: openai.AsyncOpenAI, fake: Fake
    ) -> None:
        made = await client.images.edit(
            model="demo", prompt="a dog", image=[("a.png", PNG), ("b.png", PNG)], n=2
        )
        assert [image.b64_json for image in made.data or ()] == [BASE64_PNG] * 2
        files = [(name, value) for name, file, value in form_of(fake.seen[-1]) if file]
        assert files == [("image[]", PNG)] * 2
        assert await counted(gateway) == (0, 2000)

    async def test_edit_is_streamed(self, gateway: Gateway) -> None:
        answer = await gateway.client.post(
            EDITS,
            data={"model": "demo", "prompt": "a dog", "stream": "true"},
            files={"image": ("a.png", PNG)},
        )
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.content.endswith(b"data: [DONE]\n\n")
        assert await counted(gateway) == (0, 1000)

    @pytest.mark.parametrize("body", [{"n": 11}, {"model": "demo", "prompt": "a cat", "n": 0}])
    async def test_refused_requests_are_free(self, gateway: Gateway, body: dict[str, Any]) -> None:
        answer = await gateway.client.post(IMAGES, json={"model": "demo", **body})
        assert answer.status_code == 400
        assert await counted(gateway) == (0, 0)

    async def test_more_images_than_the_bound_are_refused(
        self, gateway: Gateway, fake: Fake
    ) -> None:
        form = {"model": "demo", "prompt": "a dog", "n": "300"}
        answer = await gateway.client.post(EDITS, data=form, files={"image": ("a.png", PNG)})
        assert answer.status_code == 400
        assert "256 are allowed" in answer.text
        assert not asked(fake)

    async def test_answer_that_is_no_stream_is_not_kept_alive_as_one(
        self, fake: Fake, tmp_path: Path
    ) -> None:
        server = {"sse_keepalive_s": 0.02}
        async with serving_demo(tmp_path, fake.url, model=UNITS, server=server) as gateway:
            fake.pace_s = 0.1
            body = {"model": "demo", "prompt": "a cat", "stream": True}
            answer = await gateway.client.post(IMAGES, json=body)
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["data"][0]["b64_json"] == BASE64_PNG

    async def test_limit_counts_images(self, fake: Fake, tmp_path: Path) -> None:
        limits = {"default": {"tokens_per_minute": 2500}}
        async with serving_demo(tmp_path, fake.url, model=UNITS, limits=limits) as gateway:
            body = {"model": "demo", "prompt": "a cat", "n": 2}
            assert (await gateway.client.post(IMAGES, json=body)).status_code == 200
            assert (await gateway.client.post(IMAGES, json=body)).status_code == 429

    async def test_budget_in_money_is_charged_by_the_image(
        self, fake: Fake, tmp_path: Path
    ) -> None:
        model = {**UNITS, "price": {"completion": 40.0}}  # 0.04 for an image
        async with serving_demo(tmp_path, fake.url, model=model) as gateway:
            key = await make_key(gateway, "painter", daily_cost=0.1)
            body = {"model": "demo", "prompt": "a cat"}
            statuses = [
                (await gateway.client.post(IMAGES, json=body, headers=key)).status_code
                for _ in range(3)
            ]
            assert statuses == [200, 200, 429]


class TestSpeech:
    async def test_characters_and_seconds_are_counted(
        self, gateway: Gateway, client: openai.AsyncOpenAI, fake: Fake
    ) -> None:
        async with client.audio.speech.with_streaming_response.create(
            model="demo", voice="vivian", input=TEXT, response_format="wav"
        ) as answer:
            assert answer.headers["content-type"] == "audio/wav"
            assert await answer.read() == wav_header(len(SOUND)) + SOUND
        assert await counted(gateway) == (2 * len(TEXT), 40)

    @pytest.mark.parametrize("kind", ["pcm", "wav"])
    async def test_sound_is_streamed_as_it_is_made(
        self, gateway: Gateway, client: openai.AsyncOpenAI, fake: Fake, kind: Any
    ) -> None:
        fake.pace_s = 0.02
        sizes: list[int] = []
        async with client.audio.speech.with_streaming_response.create(
            model="demo", voice="vivian", input=TEXT, response_format=kind, stream_format="audio"
        ) as answer:
            assert answer.headers["content-type"] == f"audio/{kind}"
            assert "content-length" not in answer.headers
            sizes += [len(piece) async for piece in answer.iter_bytes()]
        assert sum(sizes) == len(SOUND) + (44 if kind == "wav" else 0)
        assert len(sizes) > 2
        assert await counted(gateway) == (2 * len(TEXT), 40)

    async def test_sound_of_a_lower_rate_is_longer(self, gateway: Gateway) -> None:
        body = {"model": "demo", "input": TEXT, "response_format": "pcm", "sample_rate": 12_000}
        assert (await gateway.client.post(SPEECH, json=body)).content == SOUND
        assert await counted(gateway) == (2 * len(TEXT), 80)

    async def test_long_sound_of_a_short_text_counts_in_full(
        self, gateway: Gateway, fake: Fake
    ) -> None:
        body = {"model": "demo", "input": "rain", "response_format": "pcm", "sample_rate": 500}
        assert (await gateway.client.post(SPEECH, json=body)).status_code == 200
        assert await counted(gateway) == (8, 340)  # what is believed of four characters
        body = {**body, "duration_seconds": 48}
        assert (await gateway.client.post(SPEECH, json=body)).status_code == 200
        assert await counted(gateway) == (16, 340 + 480)

    async def test_events_of_speech_pass(self, gateway: Gateway, fake: Fake) -> None:
        body = {"model": "demo", "input": TEXT, "response_format": "pcm", "stream_format": "sse"}
        answer = await gateway.client.post(SPEECH, json=body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:5] == "data:"]
        sound = b"".join(base64.b64decode(one["audio"]) for one in events if "audio" in one)
        assert sound == SOUND
        assert events[-1]["type"] == "speech.audio.done"
        # Compressed and encoded sound does not tell its length: 15 characters are a second.
        assert await counted(gateway) == (2 * len(TEXT), 30)

    async def test_error_in_the_events_is_noted(self, gateway: Gateway) -> None:
        ended: list[EndedRequest] = []
        gateway.state.ledger.watch(lambda _batch, one: ended.append(one))
        body = {"model": "demo", "input": "fail", "response_format": "pcm", "stream": True}
        answer = await gateway.client.post(SPEECH, json=body)
        assert "event: speech.audio.error" in answer.text
        await wait_until(lambda: ended)
        assert ended[0].record.error == "engine_error"

    async def test_characters_are_not_bytes(self, gateway: Gateway) -> None:
        body = {"model": "demo", "input": "\u4f60\u597d\U0001f600", "response_format": "mp3"}
        assert (await gateway.client.post(SPEECH, json=body)).status_code == 200
        assert await counted(gateway) == (6, 10)

    async def test_client_that_leaves_ends_the_speech(self, gateway: Gateway, fake: Fake) -> None:
        fake.pace_s = 0.2
        body = {"model": "demo", "input": TEXT * 20, "stream_format": "audio"}
        async with connected(gateway) as client:
            client.send(request(json.dumps(body).encode(), path=SPEECH.encode()))
            await client.until(PIECE)
        await wait_until(lambda: fake.aborted)
        await asyncio.wait_for(gateway.state.admission.wait_until_idle(), 20)
        prompt, completion = await counted(gateway)
        assert prompt == 2 * 20 * len(TEXT)
        assert 0 < completion < 20 * 40


class TestWhatIsNotPassedOn:
    @pytest.mark.parametrize(
        ("path", "fields", "code"),
        [
            (SPEECH, {"ref_audio": "http://169.254.169.254/"}, "media_not_allowed"),
            (SPEECH, {"ref_audio": "file:///etc/passwd"}, "media_not_allowed"),
            (SPEECH, {"ref_audio": ["http://10.0.0.1/a.wav"]}, "media_not_allowed"),
            (SPEECH, {"ref_audio_2": "/etc/passwd"}, "media_not_allowed"),
            (SPEECH, {"references": [{"audio_path": "/etc/passwd"}]}, "media_not_allowed"),
            (SPEECH, {"extra_params": {"x": 1}}, "field_not_allowed"),
            (IMAGES, {"lora": {"path": "/srv/other"}}, "field_not_allowed"),
            (IMAGES, {"extra_params": {"x": 1}}, "field_not_allowed"),
            (CHAT_PATH, {"sampling_params_list": [{"max_tokens": 9}]}, "field_not_allowed"),
        ],
    )
    async def test_paths_and_addresses_in_json(
        self, gateway: Gateway, fake: Fake, path: str, fields: dict[str, Any], code: str
    ) -> None:
        body = {"model": "demo", "input": "hi", "prompt": "hi", **fields}
        answer = await gateway.client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert not asked(fake)

    @pytest.mark.parametrize(
        ("name", "code"),
        [
            ("url", "media_not_allowed"), ("url[]", "media_not_allowed"),
            ("mask_image", "media_not_allowed"), ("reference_image", "media_not_allowed"),
            ("lora", "field_not_allowed"),
        ],
    )  # fmt: skip
    async def test_paths_and_addresses_in_forms(
        self, gateway: Gateway, fake: Fake, name: str, code: str
    ) -> None:
        form = {"model": "demo", "prompt": "a dog", name: "http://169.254.169.254/"}
        answer = await gateway.client.post(EDITS, data=form, files={"image": ("a.png", PNG)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert not asked(fake)

    async def test_nested_fields_of_a_chat_are_dropped(self, gateway: Gateway, fake: Fake) -> None:
        nested = {"lora": {"path": "/srv/other"}, "num_outputs_per_prompt": 50}
        messages = [{"role": "user", "content": "a cat"}]
        body = {"model": "demo", "messages": messages, "extra_body": nested}
        answer = await gateway.client.post(CHAT_PATH, json=body)
        assert answer.headers["x-gateway-dropped-fields"] == "extra_body"
        assert "extra_body" not in fake.seen[-1].json

    async def test_voice_in_the_request_passes(self, gateway: Gateway, fake: Fake) -> None:
        voice = "data:audio/wav;base64,AAAA"
        body = {"model": "demo", "input": "hi", "ref_audio": voice, "lora": None}
        assert (await gateway.client.post(SPEECH, json=body)).status_code == 200
        assert fake.seen[-1].json["ref_audio"] == voice


@pytest.mark.parametrize("path", [IMAGES, EDITS, SPEECH])
async def test_model_of_another_kind_does_not_serve_it(
    gateway: Gateway, fake: Fake, path: str
) -> None:
    fake.serves = ("generate",)
    if path == EDITS:
        form = {"model": "demo", "prompt": "a dog"}
        answer = await gateway.client.post(path, data=form, files={"image": ("a.png", PNG)})
    else:
        body = {"model": "demo", "input": "hi", "prompt": "hi"}
        answer = await gateway.client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "endpoint_not_served")
    assert await counted(gateway) == (0, 0)
