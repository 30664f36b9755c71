"""Where versions of vLLM have the parser of their flags."""

from types import ModuleType

import pytest

from engines.inside import vllm_gateway_parser
from engines.inside.vllm_gateway_parser import import_cli_args


@pytest.mark.parametrize(
    ("packages", "found"),
    [
        ({"openai"}, "openai"),  # 0.28
        ({"openai", "launchers"}, "launchers"),  # 0.32
        ({"openai", "launchers", "common"}, "common"),  # 0.33
    ],
)
def test_parser_is_found(monkeypatch: pytest.MonkeyPatch, packages: set[str], found: str) -> None:
    def import_module(name: str) -> ModuleType:
        if name.split(".")[2] not in packages:
            raise ModuleNotFoundError(name=name)
        return ModuleType(name)

    monkeypatch.setattr(vllm_gateway_parser, "import_module", import_module)
    assert import_cli_args().__name__ == f"vllm.entrypoints.{found}.cli_args"


def test_a_package_that_vllm_misses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(vllm_gateway_parser, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        import_cli_args()
