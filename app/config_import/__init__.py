"""Importers of other programs' configurations: pure functions that run nothing.

An importer turns a text into an `ImportResult`: the settings, the variables to set, and a note for
each thing that was not imported. None of them holds a secret of the text.

    litellm, llama_swap, vllm   the importers
    builder                     collects models and notes; builds consistent, valid settings
    vllm_command                a `vllm serve` command, with `shell`, `container` and `flags`
    reading                     YAML from an untrusted file, within bounds
    rendering                   the gateway.yaml
"""

from app.config_import.builder import ImportFault, ImportResult, Note
from app.config_import.litellm import from_litellm
from app.config_import.llama_swap import from_llama_swap
from app.config_import.rendering import render_yaml
from app.config_import.vllm import from_vllm

__all__ = (
    "ImportFault",
    "ImportResult",
    "Note",
    "from_litellm",
    "from_llama_swap",
    "from_vllm",
    "render_yaml",
)
