"""The demo model: what is shipped is its recipe's, and a directory holds all of it or nothing."""

import json
from pathlib import Path

import pytest

from engines.demo import model, training
from engines.demo.dialogues import COMPLETIONS, DIALOGUES, STORY
from engines.demo.model import DemoModelError, copy_demo_model
from engines.demo.training import train_demo_model


def test_dialogues_have_unique_names_and_known_prompts() -> None:
    assert len({d.name for d in DIALOGUES}) == len(DIALOGUES)
    prompts = [json.dumps([d.messages, d.tools]) for d in DIALOGUES]
    assert len(set(prompts)) == len(prompts)
    assert len({c.prompt for c in COMPLETIONS}) == len(COMPLETIONS)


def test_dialogues_cover_the_documented_cases() -> None:
    assert len(DIALOGUES) >= 24
    assert any(d.thought and not d.call for d in DIALOGUES)
    assert any(d.call and d.tools for d in DIALOGUES)
    assert any(d.messages[0]["role"] == "system" for d in DIALOGUES)
    assert any(len(d.messages) > 2 for d in DIALOGUES)
    assert sum(not d.question.isascii() for d in DIALOGUES) >= 5
    assert 100 < len(STORY.split()) < 200


def test_every_dialogue_ends_with_a_user_message() -> None:
    for dialogue in DIALOGUES:
        assert dialogue.messages[-1]["role"] in ("user", "tool")
        assert bool(dialogue.answer) != bool(dialogue.call)


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DemoModelError, match="choose another directory"):
        copy_demo_model(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_file_in_place_of_the_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(DemoModelError):
        copy_demo_model(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"


def test_shipped_weights_are_of_this_recipe() -> None:
    assert model.recipe_of(model.WEIGHTS) == model.recipe(), "vllm-gateway demo-model --train"


def test_copy_is_what_is_shipped_and_readable_by_all(tmp_path: Path) -> None:
    (tmp_path / model.MARKER).write_text(json.dumps({"recipe": "of an older version"}))
    assert copy_demo_model(tmp_path) is True
    for file in model.WEIGHTS.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
        assert (tmp_path / file.name).stat().st_mode & 0o444 == 0o444
    assert len(list(tmp_path.iterdir())) == len(list(model.WEIGHTS.iterdir())) > 5


def test_finished_model_of_this_recipe_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / model.MARKER).write_text(json.dumps({"recipe": model.recipe()}))
    assert copy_demo_model(tmp_path) is False
    assert [p.name for p in tmp_path.iterdir()] == [model.MARKER]


@pytest.mark.slow
def test_failed_training_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    with pytest.raises(DemoModelError, match="did not learn"):
        train_demo_model(tmp_path / "model", lambda step, total: steps.append((step, total)), 1)
    assert steps == [(1, 1)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_shipped_weights_know_all_dialogues() -> None:
    training.check(model.WEIGHTS)


@pytest.mark.slow
def test_weights_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        training._make(tmp_path / name, lambda step, total: None, 2)
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "two"))
    assert one == two
