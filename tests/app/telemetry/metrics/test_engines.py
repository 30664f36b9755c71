"""What a scrape tells of engines, with labels that no engine can make unbounded or unreadable."""

from app.telemetry.metrics.engines import LONGEST_LABEL, EngineFigures, EngineSeries, label
from app.telemetry.metrics.gateway import Metrics
from app.telemetry.metrics.series import Registry

ONE = {"model": "demo", "gateway_engine": "demo-0"}


def registry_of(*figures: EngineFigures) -> Registry:
    registry = Registry()
    EngineSeries(registry).watch_figures(lambda: figures)
    return registry


def test_an_engine_that_told_all() -> None:
    registry = registry_of(
        EngineFigures(
            "demo", "demo-0", 3, "0.32.0", "Qwen2ForCausalLM", "bfloat16", "fp8", "FLASH_ATTN",
            1024, 16384, 0.5, 2.5,
        )
    )  # fmt: skip
    info = {
        "version": "0.32.0",
        "architecture": "Qwen2ForCausalLM",
        "dtype": "bfloat16",
        "quantization": "fp8",
        "attention_backend": "FLASH_ATTN",
    }
    assert registry.get_sample_value("gateway_engine_info", {**ONE, **info}) == 1
    for name, value in (
        ("restarts_total", 3),
        ("max_model_len", 1024),
        ("kv_cache_tokens", 16384),
        ("weights_gib", 0.5),
        ("memory_gib", 2.5),
    ):
        assert registry.get_sample_value(f"gateway_engine_{name}", ONE) == value


def test_what_was_not_told_is_not_there() -> None:
    registry = registry_of(EngineFigures("demo", "demo-0", 0))
    samples = [sample.name for family in registry.collect() for sample in family.samples]
    assert samples == ["gateway_engine_restarts_total"]


def test_figures_are_read_when_somebody_scrapes() -> None:
    figures: list[EngineFigures] = []
    metrics = Metrics()
    metrics.watch_figures(lambda: figures)
    figures.append(EngineFigures("demo", "demo-0", 7))
    assert metrics.registry.get_sample_value("gateway_engine_restarts_total", ONE) == 7
    assert b"gateway_engine_restarts_total" in metrics.exposition()[0]


def test_a_state_is_one_of_all() -> None:
    states = {"demo-0": "ready", "demo-1": "failed"}
    metrics = Metrics()
    metrics.watch_engines(
        lambda: [("demo", engine, state) for engine, state in states.items()], ["ready", "failed"]
    )

    def seen(engine: str, state: str) -> float | None:
        labels = {"model": "demo", "gateway_engine": engine, "state": state}
        return metrics.registry.get_sample_value("gateway_engine_state", labels)

    assert [seen("demo-0", "ready"), seen("demo-0", "failed")] == [1, 0]
    states["demo-0"] = "failed"
    assert [seen("demo-0", "ready"), seen("demo-0", "failed")] == [0, 1]
    del states["demo-1"]
    assert seen("demo-1", "failed") is None


def test_a_figure_that_is_told_no_more_is_gone_from_the_page() -> None:
    figures = [EngineFigures("demo", "demo-0", 0, version=f"0.{n}") for n in range(3)]
    registry = Registry()
    EngineSeries(registry).watch_figures(lambda: figures[:1])
    for _ in range(3):
        told = [line for line in registry.page().splitlines() if b"engine_info{" in line]
        assert len(told) == 1
        assert f'version="{figures[0].version}"'.encode() in told[0]
        figures.append(figures.pop(0))


def test_a_label_is_short_and_printable() -> None:
    assert label(None) == ""
    assert label("a\n\x1b\"é'") == "a??\"?'"
    assert len(label("x" * 10_000)) == LONGEST_LABEL
