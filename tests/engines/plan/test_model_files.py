"""Reading a model's directory, also one that was made to hurt."""

import json
import os
from pathlib import Path

import pytest

from engines.plan import PlanError
from engines.plan.model_files import INDEX, MAX_CONFIG_BYTES, MAX_HEADER_BYTES, read_model_files
from tests.engines.plan.checkpoints import write_config, write_header, write_weights

CONFIG = {"model_type": "llama"}


def refused(directory: Path) -> str:
    with pytest.raises(PlanError) as caught:
        read_model_files(str(directory))
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text.replace(str(directory), "DIR")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a directory with a configuration and no weights."""
    write_config(tmp_path, CONFIG)
    return tmp_path


class TestWeights:
    def test_files_of_the_index_are_read_and_no_others(self, model: Path) -> None:
        for name in ("a", "b", "copy"):
            write_weights(model / f"{name}.safetensors", {name: ("BF16", [2, 3])})
        (model / INDEX).write_text(
            json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}})
        )
        found = read_model_files(str(model))
        assert [(one.name, one.size) for one in found.tensors] == [("a", 12), ("b", 12)]
        assert found.files == 2

    def test_mistrals_copy_of_the_weights_is_left_out(self, model: Path) -> None:
        for name in ("consolidated", "model"):
            write_weights(model / f"{name}.safetensors", {name: ("BF16", [1])})
        assert [one.name for one in read_model_files(str(model)).tensors] == ["model"]

    def test_another_format_is_named(self, model: Path) -> None:
        (model / "pytorch_model.bin").touch()
        assert read_model_files(str(model)).unread == "pytorch_model.bin"

    def test_links_of_the_cache_are_followed(self, model: Path) -> None:
        (blobs := model / "blobs").mkdir()
        write_weights(blobs / "0a1b", {"w": ("BF16", [4])})
        (model / "model.safetensors").symlink_to("blobs/0a1b")
        assert len(read_model_files(str(model)).tensors) == 1

    def test_repository_is_found_in_the_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (refs := tmp_path / "models--org--name" / "refs").mkdir()
        (refs / "main").write_text("abc")
        write_config(snapshot, CONFIG)
        assert read_model_files("org/name").directory == snapshot
        (refs / "main").write_text("../../../..")
        assert "neither a directory nor a repository" in refused(Path("org/name"))


class TestIncomplete:
    def test_cut_file_is_an_incomplete_download(self, model: Path) -> None:
        write_weights(path := model / "model.safetensors", {"w": ("BF16", [1000])})
        os.truncate(path, size := path.stat().st_size - 1)
        expected = f"has {size:,} of {size + 1:,} bytes: the download is not complete"
        assert refused(model) == f"DIR/model.safetensors {expected}"

    def test_missing_shard_is_named(self, model: Path) -> None:
        (model / INDEX).write_text(json.dumps({"weight_map": {"w": "../../etc/passwd"}}))
        assert refused(model).startswith("DIR lacks '../../etc/passwd', one of 1 missing of the 1")

    def test_directory_without_a_configuration_is_refused(self, tmp_path: Path) -> None:
        assert refused(tmp_path).startswith("DIR holds no config.json")


class TestHostile:
    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
    def test_fifo_does_not_block(self, model: Path, name: str) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)
        assert refused(model) == f"DIR/{name} is not a regular file"

    @pytest.mark.parametrize("target", ["/dev/zero", "/", "model.safetensors", "nowhere"])
    def test_link_to_something_else_is_refused(self, model: Path, target: str) -> None:
        (model / "model.safetensors").symlink_to(target)
        assert refused(model).startswith("DIR/model.safetensors")

    def test_huge_configuration_is_not_read(self, model: Path) -> None:
        os.truncate(model / "config.json", 100_000_000)
        assert refused(model) == (
            f"DIR/config.json has 100,000,000 bytes, more than the {MAX_CONFIG_BYTES:,} of any "
            "real one"
        )

    @pytest.mark.parametrize(
        "text", [b"", b"[]", b"{", b"\xff", b"[" * 1_000_000, b'{"a": ' + b"9" * 10_000 + b"}"]
    )
    def test_configuration_that_is_no_object_is_refused(self, model: Path, text: bytes) -> None:
        (model / "config.json").write_bytes(text)
        assert refused(model) == "DIR/config.json does not hold a JSON object"

    def test_header_longer_than_any_is_not_read(self, model: Path) -> None:
        path = model / "model.safetensors"
        path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        os.truncate(path, 2**40)
        assert "is too long to be one" in refused(model)

    @pytest.mark.parametrize("text", [b"", b"1234567", (2**63).to_bytes(8, "little")])
    def test_file_without_its_header_is_refused(self, model: Path, text: bytes) -> None:
        (model / "model.safetensors").write_bytes(text)
        assert "is cut short or no safetensors file" in refused(model)

    @pytest.mark.parametrize(
        "entry",
        [
            None,
            {"dtype": "BF16", "shape": [2], "data_offsets": [0, 5]},
            {"dtype": "BF16", "shape": [-2], "data_offsets": [0, 4]},
            {"dtype": "BF16", "shape": [True], "data_offsets": [0, 2]},
            {"dtype": "BF16", "shape": [2**60] * 9, "data_offsets": [0, 4]},
            {"dtype": "BF16", "shape": [1] * 100, "data_offsets": [0, 2]},
            {"dtype": "Q9", "shape": [2], "data_offsets": [0, 4]},
            {"dtype": ["BF16"], "shape": [2], "data_offsets": [0, 4]},
        ],
    )
    def test_tensor_that_cannot_be_is_refused(self, model: Path, entry: object) -> None:
        write_header(model / "model.safetensors", json.dumps({"w": entry}).encode(), 8)
        assert "tensor 'w'" in refused(model)
