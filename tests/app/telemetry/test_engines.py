"""What a scrape tells of engines, with labels that no engine can make unbounded or unreadable."""

from prometheus_client import CollectorRegistry

from app.telemetry.engines import LONGEST_LABEL, EngineFigures, EngineSeries, label
from app.telemetry.metrics import Metrics

ONE = {"model": "demo", "gateway_engine": "demo-0"}


def registry_of(*figures: EngineFigures) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineSeries(lambda: figures))
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


def test_a_label_is_short_and_printable() -> None:
    assert label(None) == ""
    assert label("a\n\x1b\"é'") == "a??\"?'"
    assert len(label("x" * 10_000)) == LONGEST_LABEL
