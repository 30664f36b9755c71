"""`vllm-gateway owners`, with the gateway down."""

import pytest

from tests.app.cli.gateway import fault, output, output_json

pytestmark = pytest.mark.usefixtures("database")


def test_owner_is_set_shown_listed_and_deleted() -> None:
    made = output_json(
        "owners", "set", "research", "--daily-tokens", "7", "--tokens-per-minute", "0"
    )
    assert (made["daily_tokens"], made["tokens_per_minute"], made["keys"]) == (7, 0, 0)
    output("keys", "create", "--name", "alice", "--owner", "research")
    shown = output_json("owners", "show", "research")
    assert shown == {**made, "keys": 1}
    assert output_json("owners", "list") == {"data": [shown], "has_more": False}
    (_, row) = output("owners", "list").splitlines()
    assert row.split() == ["research", "1", "-", "0", "-", "7", "-", "-", "-"]
    assert output("owners", "delete", "research") == "deleted 'research'\n"
    assert fault("owners", "show", "research") == "there is no such owner"
    assert output_json("keys", "list")["data"][0]["owner"] == "research"


def test_set_changes_only_the_given_values_and_none_removes() -> None:
    output("owners", "set", "a", "--daily-tokens", "7", "--concurrent-requests", "3")
    changed = output_json("owners", "set", "a", "--daily-tokens", "none", "--monthly-tokens", "8")
    given = ("daily_tokens", "monthly_tokens", "concurrent_requests")
    assert [changed[name] for name in given] == [None, 8, 3]


def test_list_is_read_page_by_page() -> None:
    for name in ("a", "b", "c"):
        output("owners", "set", name)
    *_, note = output("owners", "list", "--limit", "2").splitlines()
    assert note == "there are more: --after 'b'"
    page = output_json("owners", "list", "--after", "b")
    assert [owner["name"] for owner in page["data"]] == ["c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("set", "a", "--daily-tokens", "x"), "daily_tokens: must be a whole number or `none`"),
        (("set", "a", "--daily-tokens", "-1"), "daily_tokens: "),
        (("set", "a", "--requests-per-minute", "9" * 12), "requests_per_minute: "),
        (("set", " a"), "name: begins or ends with a space"),
        (("set", ""), "name: "),
        (("delete", "a"), "there is no such owner"),
    ],
)
def test_invalid_value_is_one_line_and_sets_nothing(
    arguments: tuple[str, ...], message: str
) -> None:
    assert fault("owners", *arguments).startswith(message)
    assert output_json("owners", "list")["data"] == []


def test_markup_in_names_is_printed_as_text() -> None:
    assert "[red]x" in output("owners", "set", "[red]x")
    assert "[red]x" in output("owners", "list")
