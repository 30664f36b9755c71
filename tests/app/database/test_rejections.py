"""A database that rejects values: callers learn that retrying does not help."""

from tests.gateway import ROOT, Gateway, demo_gateway

gateway = demo_gateway(model={"stores_responses": True})


async def reject_inserts(gateway: Gateway, table: str) -> None:
    trigger = (
        f"CREATE TRIGGER reject BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'no room'); END"
    )
    async with gateway.state.database.write() as connection:
        await connection.exec_driver_sql(trigger)


async def test_rejected_admin_values_are_a_bad_request(gateway: Gateway) -> None:
    await reject_inserts(gateway, "api_keys")
    response = await gateway.client.post("/admin/keys", json={"name": "a"}, headers=ROOT)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")
    assert "retrying will not help" in response.json()["error"]["message"]
    assert "retry-after" not in response.headers


async def test_rejected_response_owner_is_an_internal_error(gateway: Gateway) -> None:
    await reject_inserts(gateway, "stored_responses")
    response = await gateway.client.post("/v1/responses", json={"model": "demo", "input": "hi"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "try again" not in response.json()["error"]["message"]
    assert "retry-after" not in response.headers
