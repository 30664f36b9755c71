"""Administrators edit models in the configuration file, where the operator lets them."""

import asyncio
import re
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.app.console.editable import PROCESS, EditableGateway, editable
from tests.app.console.visits import new_key, visiting
from tests.app.reload.gateways import LAUNCHER
from tests.app.tenants import request_as_root
from tests.engines.plan.checkpoints import write_config, write_weights
from tests.fakes.vllm import Fake
from tests.gateway import ROOT_KEY
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
FORM = "/console/configuration/model"
OUTCOME = "/console/configuration/edit"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fake() -> AsyncIterator[Fake]:
    async with Fake() as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def served(fake: Fake, tmp_path: Path) -> AsyncIterator[EditableGateway]:
    async with editable(tmp_path, fake.url, PROCESS, launcher=LAUNCHER) as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def admin(served: EditableGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with visiting(served.gateway, ROOT_KEY) as one:
        yield one


def hidden(page: httpx.Response, name: str) -> str:
    found = re.search(rf'name="{name}" value="([0-9a-f]*)"', page.text)
    assert found is not None, page.text
    return found[1]


async def send(
    admin: httpx.AsyncClient, step: str, model: str | None = None, path: str = FORM, **fields: str
) -> httpx.Response:
    """Open the form of a model and send it with some fields of it, as a browser does."""
    params = {} if model is None else {"name": model}
    page = await admin.get(path, params=params)
    assert page.status_code == 200, page.text
    sent = {one: hidden(page, one) for one in ("token", "digest")}
    sent |= {field.replace("__", "."): text for field, text in fields.items()}
    return await admin.post(path, params=params, data={**sent, "step": step})


async def outcome(admin: httpx.AsyncClient, response: httpx.Response) -> str:
    """Return the text of the page that an applied edit leads to, once it has ended."""
    assert response.status_code == 303, response.text
    assert response.headers["location"] == OUTCOME
    page = await admin.get(OUTCOME)
    async with asyncio.timeout(PATIENCE_S):
        while "refresh" in page.headers:
            page = await admin.get(OUTCOME)
    return unescape(page.text)


def remote(fake: Fake, **fields: str) -> dict[str, Any]:
    return {
        "name": "new",
        "kind": "remote",
        "engines__0__url": fake.url,
        "engines__0__served_model_name": "demo",
        **fields,
    }


async def test_a_model_is_shown_as_a_difference_and_then_added_and_serves(
    served: EditableGateway, admin: httpx.AsyncClient, fake: Fake
) -> None:
    before = served.text
    checked = await send(admin, "check", **remote(fake, aliases="n"))
    text = unescape(checked.text)
    assert "+  - name: new" in text
    assert "+    aliases: [n]" in text
    assert "+ model new (starts new-0)" in text
    assert "Write and reload" in text
    assert served.text == before
    done = await outcome(admin, await send(admin, "apply", **remote(fake, aliases="n")))
    assert "new is in force" in done
    assert served.text.startswith(before)
    assert served.names == ["demo", "own", "new"]
    assert (await served.gateway.chat("n")).status_code == 200
    assert served.file.with_name("gateway.yaml.bak").read_text() == before


async def test_a_model_is_changed_and_everything_else_of_the_file_stays(
    served: EditableGateway, admin: httpx.AsyncClient
) -> None:
    before = served.text
    page = await outcome(admin, await send(admin, "apply", "own", max_output_tokens="64"))
    assert "own is in force" in page
    assert served.text.replace("    max_output_tokens: 64\n", "") == before
    assert served.gateway.state.settings.models[1].max_output_tokens == 64


async def test_a_model_is_removed(served: EditableGateway, admin: httpx.AsyncClient) -> None:
    page = await admin.get(f"{FORM}/remove", params={"name": "own"})
    assert "Model own leaves" in unescape(page.text)
    done = await outcome(admin, await send(admin, "apply", "own", f"{FORM}/remove"))
    assert "own was removed" in done
    assert served.names == ["demo"]
    assert "# The first one." in served.text


async def test_faults_stand_beside_their_fields_and_nothing_is_written(
    served: EditableGateway, admin: httpx.AsyncClient, fake: Fake
) -> None:
    before = served.text
    for step in ("validate", "check", "apply"):
        page = await send(admin, step, "demo", queue__timeout_s="soon", idle_unload_s="5")
        text = unescape(page.text)
        fault = re.search(r'id="queue.timeout_s-fault" data-fault-of>([^<]*)', text)
        assert fault is not None
        assert fault[1] == "must be a number, not 'soon'"
        assert "Write and reload" not in text
    assert served.text == before
    used = await send(admin, "check", **{**remote(fake), "name": "demo"})
    assert "two models answer to the name 'demo'" in unescape(used.text)


async def test_a_model_that_does_not_start_puts_the_file_back(
    served: EditableGateway, admin: httpx.AsyncClient
) -> None:
    before = served.text
    fields = {"name": "gone", "kind": "process", "engines__0__model": "/nowhere"}
    page = await send(admin, "apply", **fields)
    assert "does not exist" in unescape(page.text)
    served.file.write_text(before.replace("max-model-len: 1024", "fake-start: crash"))
    crashing = served.text
    done = await outcome(admin, await send(admin, "apply", "own", load="eager"))
    assert "own was not changed" in done
    assert "the file is as it was before" in done
    again = await admin.get(FORM, params={"name": "own", "again": "true"})
    assert "<option selected>eager</option>" in again.text
    assert served.text == crashing
    assert served.gateway.state.settings.models[1].load == "on_demand"


async def test_secrets_are_neither_shown_nor_lost(
    served: EditableGateway, admin: httpx.AsyncClient
) -> None:
    for step in ("validate", "check"):
        page = await send(admin, step, "own", engines__0__args__max_model_len="", seed="1")
        assert page.status_code == 200
        assert "canary" not in page.text
    page = await admin.get(FORM, params={"name": "own"})
    assert "canary" not in page.text
    assert "<code>env</code>" in page.text
    await outcome(admin, await send(admin, "apply", "own", keep_priority="1", load_wait_s="9"))
    assert "env: {HF_TOKEN: hf_canary0123456789, PLAIN: canary}" in served.text
    removal = await admin.get(f"{FORM}/remove", params={"name": "own"})
    assert "PLAIN: …" in removal.text
    assert "canary" not in removal.text


async def test_an_edit_is_in_the_audit_with_what_it_changes(
    served: EditableGateway, admin: httpx.AsyncClient
) -> None:
    await outcome(admin, await send(admin, "apply", "own", max_output_tokens="64"))
    found = await request_as_root("/admin/audit", served.gateway, "GET", "?limit=10")
    by_action = {one["action"]: one for one in found["data"]}
    edit = by_action["configuration.edit"]
    assert (edit["target"], edit["after"]) == ("own", {"max_output_tokens": "64"})
    assert edit["who"] == by_action["configuration.reload"]["who"]
    assert "canary" not in repr(found)


async def test_a_fault_in_the_file_is_mended(
    served: EditableGateway, admin: httpx.AsyncClient
) -> None:
    """The file is not valid until the edit has been made."""
    served.file.write_text(served.text.replace("load: on_demand", "load: often"))
    page = await outcome(admin, await send(admin, "apply", "own", load="on_demand"))
    assert "own is in force" in page
    assert "load: on_demand" in served.text
    found = await request_as_root("/admin/audit", served.gateway, "GET", "?limit=10")
    edit = next(one for one in found["data"] if one["action"] == "configuration.edit")
    assert edit["target"] == "own"


async def test_a_file_that_has_changed_since_is_not_overwritten(
    served: EditableGateway, admin: httpx.AsyncClient
) -> None:
    page = await admin.get(FORM, params={"name": "demo"})
    sent = {one: hidden(page, one) for one in ("token", "digest")}
    served.file.write_text(served.text + "# somebody else\n")
    data = {**sent, "step": "apply", "load_wait_s": "3"}
    refused = await admin.post(FORM, params={"name": "demo"}, data=data)
    assert "has changed since this page was opened" in unescape(refused.text)
    assert "load_wait_s" not in served.text


async def test_a_form_of_another_page_is_refused(
    served: EditableGateway, admin: httpx.AsyncClient
) -> None:
    before = served.text
    page = await admin.get(FORM, params={"name": "demo"})
    data = {"digest": hidden(page, "digest"), "step": "apply", "load_wait_s": "3"}
    for token in ("", "0" * 64):
        refused = await admin.post(FORM, params={"name": "demo"}, data={**data, "token": token})
        assert refused.status_code == 403
    foreign = {"sec-fetch-site": "cross-site"}
    token = hidden(page, "token")
    refused = await admin.post(
        FORM, params={"name": "demo"}, data={**data, "token": token}, headers=foreign
    )
    assert refused.status_code == 403
    assert served.text == before


@pytest.mark.parametrize("role", ["client", "auditor", "manager"])
async def test_other_roles_see_none_of_it(
    served: EditableGateway, admin: httpx.AsyncClient, role: str
) -> None:
    made = await new_key(served.gateway, admin, name=f"a {role}", role=role)
    token = hidden(await admin.get(FORM), "token")
    async with visiting(served.gateway, made["key"]) as visitor:
        for path in (FORM, f"{FORM}/remove?name=demo", OUTCOME):
            assert (await visitor.get(path)).status_code == 403
        for path in (FORM, f"{FORM}/remove?name=demo"):
            sent = await visitor.post(path, data={"token": token, "step": "apply"})
            assert sent.status_code == 403
        assert "Add a model" not in (await visitor.get("/console/models")).text


async def test_without_the_operators_word_there_is_no_page(fake: Fake, tmp_path: Path) -> None:
    async with (
        editable(tmp_path, fake.url, allowed=False) as served,
        visiting(served.gateway, ROOT_KEY) as admin,
    ):
        assert (await admin.get(FORM)).status_code == 404
        assert (await admin.post(FORM, data={"step": "apply"})).status_code == 404
        for page in ("/console/models", "/console/models/demo", "/console/configuration"):
            assert FORM not in (await admin.get(page)).text


async def test_a_link_as_file_is_one_line_on_the_page(
    served: EditableGateway, admin: httpx.AsyncClient
) -> None:
    real = served.file.rename(served.file.with_name("real.yaml"))
    served.file.symlink_to(real.name)
    page = await send(admin, "apply", "demo", load_wait_s="3")
    assert "is a link, as in a ConfigMap" in unescape(page.text)
    assert "load_wait_s" not in real.read_text()


async def test_a_new_model_is_chosen_from_those_on_this_machine(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("Known", "Other"):
        (directory := tmp_path / "models" / name).mkdir(parents=True)
        write_config(directory, {})
        write_weights(directory / "model.safetensors", {"w": ("BF16", [2**20])})
    own = PROCESS.replace("model: m", f"model: {tmp_path}/models/Known")
    async with (
        editable(tmp_path, fake.url, own) as served,
        visiting(served.gateway, ROOT_KEY) as admin,
    ):
        page = (await admin.get(FORM)).text
        assert f'data-local="{tmp_path}/models/Other"' in page
        assert "2 MiB" in page
        chosen = (await admin.get(FORM, params={"model": f"{tmp_path}/models/Other"})).text
        assert 'value="other"' in chosen
        assert f'value="{tmp_path}/models/Other"' in chosen
        assert "/etc" not in (await admin.get(FORM, params={"model": "/etc"})).text
        assert "data-local" not in (await admin.get(FORM, params={"name": "own"})).text


async def test_a_new_model_is_one_of_those_that_its_server_lists(
    served: EditableGateway, admin: httpx.AsyncClient, fake: Fake
) -> None:
    before = served.text
    fields = {"kind": "remote", "engines__0__url": fake.url}
    page = await send(admin, "models", **fields)
    assert '<button name="served" value="demo"' in page.text
    chosen = await send(admin, "", served="demo", **fields)
    for field in ("name", "engines.0.served_model_name"):
        assert re.search(rf'name="{field}"[^>]* value="demo"', chosen.text), field
    assert served.text == before
    assert len(served.names) == 2


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("file:///etc/passwd", "must look like http://host:port"),
        ("http://user:secret@127.0.0.1:1", "must not hold credentials"),
    ],
)
async def test_a_server_without_models_has_its_fault_next_to_its_url(
    admin: httpx.AsyncClient, url: str, fault: str
) -> None:
    page = await send(admin, "models", kind="remote", engines__0__url=url)
    found = re.search(r'id="engines\.0\.url-fault"[^>]*>([^<]*)<', page.text)
    assert found is not None
    assert fault in unescape(found[1])
    assert 'name="served"' not in page.text
