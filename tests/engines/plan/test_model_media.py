"""Which media a model takes, by its config.json."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engines.plan import media_of_model
from engines.plan.model_media import ELSEWHERE, MEDIA, TEXT_ONLY


def directory(path: Path, names: object) -> str:
    (path / "config.json").write_text(json.dumps({"architectures": names}))
    return str(path)


@pytest.mark.parametrize(
    ("name", "media"),
    [
        ("LlamaForCausalLM", ()),
        ("Qwen2_5_VLForConditionalGeneration", ("image", "video")),
        ("WhisperForConditionalGeneration", ("audio",)),
    ],
)
def test_a_listed_architecture_takes_what_vllm_says(
    name: str, media: tuple[str, ...], tmp_path: Path
) -> None:
    assert media_of_model(directory(tmp_path, [name]), {}, {}) == frozenset(media)


@pytest.mark.parametrize(
    "names", [["SomethingForCausalLM"], [], None, "LlamaForCausalLM", [1], ["LlamaForCausalLM"] * 2]
)
def test_nothing_is_assumed_of_another(names: object, tmp_path: Path) -> None:
    assert media_of_model(directory(tmp_path, names), {}, {}) is None


@pytest.mark.parametrize(
    ("args", "env"),
    [
        *[({name: "x"}, {}) for name in sorted(ELSEWHERE)],
        ({}, {"HF_HOME": "/elsewhere"}),
        ({}, {"VLLM_USE_MODELSCOPE": "1"}),
    ],
)
def test_nothing_is_assumed_where_vllm_reads_another_configuration(
    args: dict[str, Any], env: dict[str, str], tmp_path: Path
) -> None:
    assert media_of_model(directory(tmp_path, ["LlamaForCausalLM"]), args, env) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_nothing_is_assumed_of_a_broken_file_or_none(text: str, tmp_path: Path) -> None:
    assert media_of_model(str(tmp_path), {}, {}) is None
    (tmp_path / "config.json").write_text(text)
    assert media_of_model(str(tmp_path), {}, {}) is None
    assert media_of_model("owner/not-downloaded", {}, {}) is None


def test_names_are_those_of_vllms_registry() -> None:
    """Read from its source: to import it takes seconds."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    source = Path(vllm.origin).parent / "model_executor" / "models" / "registry.py"
    tables = {
        target.id: {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    texts, media = tables["_TEXT_GENERATION_MODELS"], tables["_MULTIMODAL_MODELS"]
    assert {*TEXT_ONLY} <= texts - media
    assert MEDIA.keys() - {*TEXT_ONLY} <= media - texts
