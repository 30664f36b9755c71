"""Any source yields valid settings or a fault in one line, and never a secret."""

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.config_import import (
    ImportFault,
    ImportResult,
    from_litellm,
    from_llama_swap,
    from_vllm,
    render_yaml,
)
from app.config_import.reading import read_mapping
from app.settings import load_settings
from tests.app.configuration import isolate

SECRET = "sk-aVeryLongSecretOfSomebody0123456789"
few = settings(max_examples=60, deadline=None)

words = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["vllm", "serve", "m", "--model", "-tp", "2", "--port", "99999", "&&", ";", ">", "docker",
     "run", "vllm/vllm-openai", "-e", "A=b", "-v", "/a:/b", "bash", "-c", "$X", "--api-key", SECRET,
     "{", '{"a": 1}', "--x.y+", "-O3", "--lora-modules", "--gpus", "device=1", "env",
     "CUDA_VISIBLE_DEVICES=7"]
)  # fmt: skip
commands = st.builds(
    lambda before, after: shlex.join([*before, "vllm", "serve", "m", *after]),
    st.lists(words, max_size=4),
    st.lists(words, max_size=8),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | commands,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


def mapping(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return mappings with some known keys, of the right type or of any other."""
    return st.fixed_dictionaries(
        {}, optional={name: value | values for name, value in known.items()}
    )


names = st.sampled_from(["a", "b", "org/m", "a b", "é", "*"])
litellm = mapping(
    model_list=st.lists(
        st.fixed_dictionaries(
            {
                "model_name": names,
                "litellm_params": st.fixed_dictionaries(
                    {
                        "model": st.sampled_from(["openai/x", "hosted_vllm/org/m", "other/x"]),
                        "api_base": st.sampled_from(["http://h:1/v1", "https://h/v1", "http://h"]),
                    },
                    optional={
                        "api_key": words | st.sampled_from([SECRET, "os.environ/KEY"]),
                        "rpm": values,
                        "timeout": values,
                    },
                ),
            },
            optional={"model_info": values},
        ),
        min_size=1,
        max_size=4,
    ),
    router_settings=mapping(
        model_group_alias=st.dictionaries(names, names),
        fallbacks=st.lists(st.dictionaries(names, st.lists(names))),
        redis_host=words,
        redis_port=values,
    ),
    litellm_settings=mapping(default_fallbacks=st.lists(names), request_timeout=st.integers()),
    general_settings=mapping(master_key=st.just(SECRET)),
)
llama_swap = mapping(
    macros=st.dictionaries(st.sampled_from(["a", "b", "c"]), words | st.just("${a}${b}")),
    models=st.dictionaries(
        names,
        mapping(
            cmd=commands | st.just("${a} ${PORT}"),
            env=st.lists(words),
            aliases=st.lists(names),
            ttl=st.integers(),
            filters=mapping(setParams=st.dictionaries(words, values, max_size=2)),
            timeouts=mapping(connect=st.integers()),
            concurrencyLimit=st.integers(),
        ),
        max_size=3,
    ),
    peers=st.dictionaries(
        names,
        mapping(proxy=st.just("http://h:1"), models=st.lists(names), apiKey=st.just(SECRET)),
        max_size=2,
    ),
    healthCheckTimeout=st.integers(),
    groups=values,
)


def outcome(source: Callable[[str], ImportResult], text: str) -> tuple[ImportResult | None, str]:
    try:
        return source(text), ""
    except ImportFault as fault:
        return None, str(fault)


def read(
    source: Callable[[str], ImportResult], text: str, patch: pytest.MonkeyPatch, directory: Path
) -> None:
    """Import a text; fail unless the gateway reads what is written, or the fault is one line."""
    imported, fault = outcome(source, text)
    if imported is None:
        assert len(fault.splitlines()) == 1
        assert SECRET not in fault
        return
    written = render_yaml(imported, "vllm-gateway import")
    assert SECRET not in written
    for note in imported.notes:
        assert len(str(note).splitlines()) == 1
        assert SECRET not in str(note)
    isolate(patch, directory)
    for name in imported.variables:
        patch.setenv(name, "sk-of-another-box-0123456789")
    file = directory / "gateway.yaml"
    file.write_text(written, encoding="utf-8")
    assert load_settings(file).models


def run(source: Callable[[str], ImportResult], text: str, directory: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        read(source, text, patch, directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("imports")


@pytest.mark.slow
@few
@given(text=commands | st.text(max_size=60))
@example(text="vllm serve m --a '{\"b\": NaN}'")
@example(text='vllm serve m --a \'{"b": "\\ud800"}\'')
@example(text="vllm serve m " + "bash -c " * 50)
@example(text="vllm serve m --a.b 1 --a.b.c 2 --a '{}' --a.d+ 3 --a.d 4")
@example(text="docker run -p : -v : --gpus '' vllm/vllm-openai m")
def test_any_command_line(text: str, directory: Path) -> None:
    run(from_vllm, text, directory)


@pytest.mark.slow
@few
@given(data=litellm)
def test_any_litellm_configuration(data: dict[str, Any], directory: Path) -> None:
    run(lambda text: from_litellm(text, {}), yaml.safe_dump(data), directory)


@pytest.mark.slow
@few
@given(data=llama_swap)
def test_any_llama_swap_configuration(data: dict[str, Any], directory: Path) -> None:
    run(lambda text: from_llama_swap(text, {}), yaml.safe_dump(data), directory)


@pytest.mark.slow
@few
@given(text=st.text(st.characters(codec="utf-8")))
def test_any_text(text: str, directory: Path) -> None:
    run(lambda text: from_litellm(text, {}), text, directory)
    run(lambda text: from_llama_swap(text, {}), text, directory)


def test_merged_mappings_are_counted_before_they_are_expanded() -> None:
    """PyYAML copies them: thirty lines took longer than 40 s."""
    lines = ["k0: &k0 {y: 1}"]
    for number in range(1, 30):
        merged = ", ".join(f"*k{earlier}" for earlier in range(max(0, number - 9), number))
        lines.append(f"k{number}: &k{number} {{<<: [{merged}], x{number}: 1}}")
    began = time.thread_time()
    with pytest.raises(ImportFault, match="holds more than 100000 values"):
        read_mapping("\n".join([*lines, "model_list: [*k29]"]))
    assert time.thread_time() - began < 1
