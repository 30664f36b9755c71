"""Configurations of other programs, read as settings of the gateway. Pure: nothing is run.

An importer turns a source text into `Imported`: the settings, the variables to set, and a note for
each thing that was not carried over. A secret of the source is in none of them.
"""

from app.importing.draft import Imported, Note, SourceFault
from app.importing.litellm import from_litellm
from app.importing.llama_swap import from_llama_swap
from app.importing.rendering import rendered
from app.importing.vllm import from_vllm

__all__ = (
    "Imported",
    "Note",
    "SourceFault",
    "from_litellm",
    "from_llama_swap",
    "from_vllm",
    "rendered",
)
