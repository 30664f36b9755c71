"""The models on a machine: in the cache of Hugging Face, and next to known ones."""

import os
from pathlib import Path

import pytest

from engines.plan import LocalModel, local_models
from tests.engines.plan.checkpoints import write_config


def model(directory: Path, weights: int, name: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True)
    write_config(directory, {})
    (directory / name).write_bytes(bytes(weights))
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of Hugging Face."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_models_next_to_a_known_one_are_listed_with_their_size(tmp_path: Path) -> None:
    one = model(tmp_path / "models" / "Qwen3-4B", 30)
    two = model(tmp_path / "models" / "gemma", 7, "pytorch_model.bin")
    (tmp_path / "models" / "not-a-model").mkdir()
    write_config(model(tmp_path / "models" / "empty", 0), {})
    model(tmp_path / "elsewhere" / "secret", 9)
    found = [LocalModel(str(one), 30), LocalModel(str(two), 7)]
    assert local_models([str(one), "Qwen/Qwen3-0.6B", "/no/such/model"]) == found
    assert [one.name for one in found] == ["qwen3-4b", "gemma"]
    assert local_models([]) == []


def test_repositories_of_the_cache_are_listed_by_their_name(cache: Path) -> None:
    repository = cache / "models--Qwen--Qwen3-0.6B"
    model(repository / "snapshots" / "abc", 12)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (cache / "models--half--downloaded").mkdir()
    (cache / "datasets--some--data").mkdir()
    assert local_models([]) == [LocalModel("Qwen/Qwen3-0.6B", 12)]


def test_names_that_no_page_can_show_are_left_out(tmp_path: Path) -> None:
    plain = model(tmp_path / "models" / "plain", 3)
    for name in (b"not-\xff\xfe-utf-8", b"two\nlines"):
        model(tmp_path / "models" / os.fsdecode(name), 5)
    assert local_models([str(plain)]) == [LocalModel(str(plain), 3)]


@pytest.mark.parametrize("known", ["x" * 300, "/" + "y" * 5000, "~no-such-user/m", "a\0b"])
def test_a_known_model_that_is_no_path_hides_no_other(tmp_path: Path, known: str) -> None:
    other = model(tmp_path / "models" / "other", 3)
    assert local_models([known, str(other)]) == [LocalModel(str(other), 3)]
