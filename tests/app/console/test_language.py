"""The language of a page: the browser's, or the one that was chosen; live parts are in it too."""

import asyncio
import json

import httpx
import pytest

from app.console.actions import ModelAbilities, model_actions
from app.console.formats import ago, clock
from app.console.language import (
    Language,
    chosen_language,
    current_language,
    gettext,
    in_language,
    ngettext,
    pgettext,
)
from app.console.rendering import Renderer
from tests.app.console.test_actions import model_row
from tests.app.console.visits import SAME_ORIGIN, visiting
from tests.app.tenants import make_key
from tests.gateway import KEY, ROOT_KEY, Gateway

CHINESE = {"accept-language": "zh-CN,zh;q=0.9,en;q=0.8"}
LANGUAGE = "/console/language"


@pytest.mark.parametrize(
    ("cookie", "accepted", "expected"),
    [
        ("", "", "en"),
        ("", "zh-CN,zh;q=0.9,en;q=0.8", "zh-CN"),
        ("", "zh-TW", "zh-CN"),
        ("", "ZH-hans-cn", "zh-CN"),
        ("", "en-US,en;q=0.9,zh;q=0.8", "en"),
        ("", "de-DE,de;q=0.9,zh;q=0.5,en;q=0.4", "zh-CN"),
        ("", "en;q=0.4, zh;q=0.5", "zh-CN"),
        ("", "en; q=0.4, zh ; Q=0.5", "zh-CN"),
        ("", "zh; q=0.1, en; q=0.9", "en"),
        ("", "zh;q=nan, zh;q=inf, zh;q=2, en", "en"),
        ("", "fr, *;q=0.1", "en"),
        ("", "zh;q=0", "en"),
        ("", "zh;q=much, nonsense;;=,\x00", "en"),
        ("", ",".join(["de"] * 1000) + ",zh", "en"),  # longer than any browser sends
        ("en", "zh-CN", "en"),
        ("zh-CN", "en", "zh-CN"),
        ('zh"><b>', "en", "en"),
    ],
)
def test_the_language_is_the_chosen_one_or_the_first_that_we_have(
    cookie: str, accepted: str, expected: str
) -> None:
    assert chosen_language(cookie, accepted) == expected


def test_texts_numbers_and_times_are_in_the_language() -> None:
    assert gettext("Overview") == "Overview"
    with in_language(Language.CHINESE):
        assert gettext("Overview") == "概览"
        assert gettext("a text without a translation") == "a text without a translation"
        assert gettext("Restart engine %(name)s?", name="demo-0") == "重启引擎 demo-0？"
        assert pgettext("time", "From") != gettext("From")
        counted = [ngettext("1 request is", "%(number)s requests are", n, number=n) for n in (1, 2)]
        assert counted == ["1 个请求", "2 个请求"]
        assert ago(0, 90) == "1 分钟前"
        assert clock(0, day=True) == "01-01"
    assert (ago(0, 90), clock(0, day=True)) == ("1 min ago", "01 Jan")
    assert current_language() is Language.ENGLISH


async def test_tasks_and_threads_of_a_request_have_its_language() -> None:
    with in_language(Language.CHINESE):
        task = asyncio.create_task(asyncio.to_thread(gettext, "Overview"))
    assert await task == "概览"


def test_a_confirmation_says_in_each_language_what_happens_to_requests() -> None:
    row, abilities = model_row(in_flight=3), ModelAbilities(unloadable=True)
    english = model_actions(row, abilities)
    with in_language(Language.CHINESE):
        chinese = model_actions(row, abilities)
    assert [one.name for one in english] == [one.name for one in chinese]
    assert [one.path for one in english] == [one.path for one in chinese]
    for one in chinese:
        assert "3 个请求进行中" in one.confirm
        assert "%(" not in one.confirm


def test_values_in_a_text_of_a_template_are_escaped() -> None:
    template = Renderer()._environment.from_string(
        "{{ _('Key %(id)s', id=name) }}{{ name|translated }}"
    )
    for language in Language:
        with in_language(language):
            assert "<b>" not in template.render(name="<b>")


async def test_a_page_is_in_the_language_of_the_browser(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as visitor:
        english = await visitor.get("/console/account")
        chinese = await visitor.get("/console/account", headers=CHINESE)
    assert '<html lang="en"' in english.text
    assert "Limits now" in english.text
    assert '<html lang="zh-CN"' in chinese.text
    assert "当前限额" in chinese.text
    assert "Limits now" not in chinese.text
    assert chinese.headers["vary"] == "accept-language, cookie"


async def test_a_chosen_language_stays_and_leads_back_to_the_open_page(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as visitor:
        headers = {"referer": f"{visitor.base_url}/console/requests?outcome=failed"}
        answer = await visitor.post(LANGUAGE, data={"language": "zh-CN"}, headers=headers)
        assert answer.headers["location"] == "/console/requests?outcome=failed"
        assert "当前限额" in (await visitor.get("/console/account")).text
        assert "API 密钥" in (await visitor.get("/console/login")).text
        await visitor.post(LANGUAGE, data={"language": "en"})
        page = await visitor.get("/console/account", headers=CHINESE)
        assert "Limits now" in page.text
        other = {"sec-fetch-site": "cross-site"}
        refused = await visitor.post(LANGUAGE, data={"language": "zh-CN"}, headers=other)
        assert refused.status_code == 403


async def test_faults_of_pages_are_in_the_language_and_those_of_the_api_in_english(
    gateway: Gateway,
) -> None:
    async with visiting(gateway, KEY) as visitor:
        page = await visitor.get("/console/keys", headers=CHINESE)
        assert page.status_code == 403
        assert "角色 client 不能查看此页面。" in page.text
        answer = await visitor.get("/console/api/admin/keys", headers=CHINESE)
        assert answer.json()["error"]["message"].isascii()
    url = str(gateway.client.base_url)
    async with httpx.AsyncClient(base_url=url, headers={**SAME_ORIGIN, **CHINESE}) as stranger:
        login = await stranger.post("/console/login", data={"key": "sk-wrong"})
    assert "此密钥在这里无效" in login.text


async def test_the_log_says_in_english_what_a_page_says_in_its_language(
    gateway: Gateway, capfd: pytest.CaptureFixture[str]
) -> None:
    header = await make_key(gateway, "reads keys", role="auditor")
    async with visiting(gateway, header["authorization"].removeprefix("Bearer ")) as visitor:
        page = await visitor.get("/console/keys/new", headers=CHINESE)
    assert page.status_code == 403
    assert "角色 auditor 不能查看此页面。" in page.text
    gateway.state.access.flush()
    logged = capfd.readouterr().err
    assert '"fault":"The role auditor does not see this page."' in logged


async def test_live_parts_are_in_the_language_of_each_viewer(gateway: Gateway) -> None:
    async def regions(visitor: httpx.AsyncClient, **headers: str) -> str:
        async with visitor.stream("GET", "/console/api/events/models", headers=headers) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    return str(json.loads(line.removeprefix("data: ")))
        raise AssertionError("no event")

    async with visiting(gateway, ROOT_KEY) as admin:
        english, chinese = await asyncio.gather(regions(admin), regions(admin, **CHINESE))
        assert ("Load mode" in english, "加载方式" in english) == (True, False)
        assert ("Load mode" in chinese, "加载方式" in chinese) == (False, True)
        tables = [
            (await admin.get("/console/api/requests", headers=headers)).json()["in-flight"]
            for headers in ({}, CHINESE, {})
        ]
    assert ["进行中" in table for table in tables] == [False, True, False]


async def test_the_texts_of_scripts_are_a_file_that_may_be_kept(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as visitor:
        page = await visitor.get("/console/account")
        static = page.text.partition('href="')[2].partition("/console.css")[0]
        texts = await visitor.get(f"{static}/texts.zh-CN.js")
    assert texts.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in texts.headers["cache-control"]
    assert '"Log in again": "重新登录"' in texts.text
    assert "Rotate the secret?" not in texts.text  # which only a template says
