"""The endpoints that an engine serves, by the tasks of its model."""

import pytest

from app.api import ENDPOINTS as DATA_PLANE
from app.routing.catalogue import Model
from app.routing.endpoints import ENDPOINTS, endpoints_of, list_endpoints
from app.routing.replica import Replica
from engines.base import EngineCapabilities, EngineFacts
from tests.app.routing.fakes import FakeEngine


def model(*tasks: tuple[str, ...] | None, managed: bool = True) -> Model:
    capabilities = EngineCapabilities(managed=managed)
    engines = (
        FakeEngine(facts=EngineFacts(supported_tasks=one), capabilities=capabilities)
        for one in tasks
    )
    return Model("demo", (), tuple(Replica(engine, "demo") for engine in engines))


def test_table_has_exactly_the_endpoints_of_the_data_plane() -> None:
    known = {path for paths in ENDPOINTS.values() for path in paths}
    of_no_task = {"/tokenize", "/detokenize", "/v1/images/generations", "/v1/images/edits"}
    assert known.isdisjoint(of_no_task)
    assert known | of_no_task == set(DATA_PLANE)


@pytest.mark.parametrize("tasks", list(ENDPOINTS))
def test_every_task_serves_tokenize(tasks: str) -> None:
    served = endpoints_of((tasks,))
    assert served is not None
    assert {"/tokenize", "/detokenize"} <= served


@pytest.mark.parametrize("tasks", [(), ("generate", "a task of vLLM 1.0")])
def test_unknown_task_makes_the_endpoints_unknown(tasks: tuple[str, ...]) -> None:
    assert endpoints_of(tasks) is None


class TestModel:
    def test_chat_model_serves_no_embeddings(self) -> None:
        chat = model(("generate",))
        assert chat.serves("/v1/chat/completions")
        assert chat.serves("/v1/messages")
        assert not chat.serves("/v1/embeddings")
        assert not chat.serves("/v1/audio/transcriptions")

    def test_embedding_model_serves_no_chat(self) -> None:
        assert not model(("embed", "token_embed")).serves("/v1/chat/completions")

    @pytest.mark.parametrize(
        "one", [model(None), model(("generate",), None), model(("generate",), managed=False)]
    )
    def test_uncertain_endpoint_counts_as_served(self, one: Model) -> None:
        assert one.serves("/v1/embeddings")

    def test_one_engine_that_serves_the_endpoint_is_enough(self) -> None:
        assert model(("generate",), ("embed",)).serves("/v1/embeddings")

    def test_error_lists_what_the_model_serves(self) -> None:
        refusal = model(("generate",)).not_served("/v1/embeddings", "gpt-4o-mini")
        assert (refusal.status, refusal.code, refusal.param) == (
            404,
            "endpoint_not_served",
            "model",
        )
        assert refusal.message == (
            "the model 'gpt-4o-mini' does not serve /v1/embeddings; it serves "
            "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages"
        )

    def test_error_lists_nothing_when_the_tasks_are_unknown(self) -> None:
        refusal = model(None).not_served("/v1/embeddings")
        assert refusal.message == "the model 'demo' does not serve /v1/embeddings"


def test_each_endpoint_is_listed_once_without_second_names() -> None:
    assert list_endpoints(("classify", "embed", "no such task")) == [
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/pooling",
        "/classify",
    ]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("org/demo:7b", b"x-gateway-model: org/demo:7b\r\n"),
        ("модель 1", b"x-gateway-model: %D0%BC%D0%BE%D0%B4%D0%B5%D0%BB%D1%8C%201\r\n"),
        ("a\r\nset-cookie: b%", b"x-gateway-model: a%0D%0Aset-cookie:%20b%25\r\n"),
    ],
)
def test_model_header_is_one_line_of_visible_ascii(name: str, line: bytes) -> None:
    assert Model(name, (), ()).header_line == line
