"""The series of engines, with labels that no engine can make long or unprintable."""

from typing import Any

from app.telemetry.metrics import EngineFigures, Metrics
from app.telemetry.metrics.engine_series import MAX_LABEL_CHARS, EngineSeries, clean_label
from app.telemetry.metrics.series import Registry

LABELS = {"model": "demo", "gateway_engine": "demo-0"}


def figures(restarts: int = 0, **reported: Any) -> EngineFigures:
    return EngineFigures(model="demo", engine="demo-0", restarts=restarts, **reported)


def registry_of(*engines: EngineFigures) -> Registry:
    registry = Registry()
    EngineSeries(registry).watch_figures(lambda: engines)
    return registry


def test_engine_that_reports_every_figure() -> None:
    info = {
        "version": "0.32.0",
        "architecture": "Qwen2ForCausalLM",
        "dtype": "bfloat16",
        "quantization": "fp8",
        "attention_backend": "FLASH_ATTN",
    }
    registry = registry_of(
        figures(
            restarts=3, **info, max_model_len=1024, kv_cache_tokens=16384, weights_gib=0.5,
            memory_gib=2.5,
        )
    )  # fmt: skip
    assert registry.get_sample_value("gateway_engine_info", {**LABELS, **info}) == 1
    for name, value in (
        ("restarts_total", 3),
        ("max_model_len", 1024),
        ("kv_cache_tokens", 16384),
        ("weights_gib", 0.5),
        ("memory_gib", 2.5),
    ):
        assert registry.get_sample_value(f"gateway_engine_{name}", LABELS) == value


def test_missing_figures_have_no_series() -> None:
    registry = registry_of(figures())
    samples = [sample.name for family in registry.collect() for sample in family.samples]
    assert samples == [
        "gateway_engine_restarts_total",
        "gateway_engine_ejected",
        "gateway_engine_ejections_total",
    ]


def test_figures_are_read_at_each_scrape() -> None:
    engines: list[EngineFigures] = []
    metrics = Metrics()
    metrics.engines.watch_figures(lambda: engines)
    engines.append(figures(restarts=7))
    assert metrics.registry.get_sample_value("gateway_engine_restarts_total", LABELS) == 7
    assert b"gateway_engine_restarts_total" in metrics.exposition()


def test_current_state_is_1_and_the_others_are_0() -> None:
    states = {"demo-0": "ready", "demo-1": "failed"}
    metrics = Metrics()
    metrics.engines.watch_states(
        lambda: [("demo", engine, state) for engine, state in states.items()], ["ready", "failed"]
    )

    def value(engine: str, state: str) -> float | None:
        labels = {"model": "demo", "gateway_engine": engine, "state": state}
        return metrics.registry.get_sample_value("gateway_engine_state", labels)

    assert [value("demo-0", "ready"), value("demo-0", "failed")] == [1, 0]
    states["demo-0"] = "failed"
    assert [value("demo-0", "ready"), value("demo-0", "failed")] == [0, 1]
    del states["demo-1"]
    assert value("demo-1", "failed") is None


def test_figure_that_is_no_longer_reported_leaves_the_page() -> None:
    engines = [figures(version=f"0.{n}") for n in range(3)]
    registry = Registry()
    EngineSeries(registry).watch_figures(lambda: engines[:1])
    for _ in range(3):
        lines = [line for line in registry.page().splitlines() if b"engine_info{" in line]
        assert len(lines) == 1
        assert f'version="{engines[0].version}"'.encode() in lines[0]
        engines.append(engines.pop(0))


def test_label_is_short_and_printable() -> None:
    assert clean_label(None) == ""
    assert clean_label("a\n\x1b\"é'") == "a??\"?'"
    assert len(clean_label("x" * 10_000)) == MAX_LABEL_CHARS
