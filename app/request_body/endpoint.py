"""The routes of the data plane, and the paths of those that the relay treats specially."""

from dataclasses import dataclass

CHAT = "/v1/chat/completions"
# Several conversations in one request; the response has a choice for each.
BATCH = "/v1/chat/completions/batch"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
# Those of vllm-omni, whose answers are images or sound and no tokens of text.
IMAGES = "/v1/images/generations"
IMAGE_EDITS = "/v1/images/edits"
SPEECH = "/v1/audio/speech"
IN_UNITS = frozenset({IMAGES, IMAGE_EDITS, SPEECH})
# Those whose answers are events where `stream` of a JSON body is true. Others ignore it, or may
# answer with sound.
STREAMED = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route of the data plane. `label` is its bounded name in metrics and logs."""

    label: str
    methods: tuple[str, ...] = ("POST",)
    # By its body, a GET by its query. False: it names a stored response by its ID.
    names_model: bool = True
    # False: it generates no tokens; a part of the prompt's tokens counts against limits.
    metered: bool = True
