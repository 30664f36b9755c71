"""The bodies of requests: parsed, checked, and planned for a model and its engine.

`parse` reads a body that is quick to read; `BodyScan` reads any other in slices. `plan_body` says
for one model what changes in the body (`rewrite`, `field_rules`, `cache_salts`,
`response_storage`), which media it may name (`media_rules`), and what it may cost (`token_cost`;
for images and speech `unit_cost`). `BodyMemory` bounds the bytes of all bodies in memory. Nothing
here knows a service or a socket.
"""

from app.request_body.body import (
    JSON,
    SLICE_BYTES,
    BodyScan,
    ParsedBody,
    is_form,
    is_json,
    is_quick,
    parse,
)
from app.request_body.body_memory import SMALL_BYTES, BodyMemory, BodyMemoryBounds, HeldBody
from app.request_body.cache_salts import CacheSalts
from app.request_body.content_coding import JsonText, decoder_of
from app.request_body.endpoint import (
    BATCH,
    CHAT,
    COMPLETIONS,
    RESPONSES,
    SPEECH,
    STREAMED,
    Endpoint,
)
from app.request_body.field_rules import FieldRuleCache
from app.request_body.form_scan import Part as FormPart
from app.request_body.form_scan import scan_form
from app.request_body.media_kinds import check_taken, media_kinds
from app.request_body.plan import BodyPlan, BodyRules, plan_body
from app.request_body.response_storage import new_response_id, with_response_id
from app.request_body.rewrite import ABSENT, ConstantRewrite, Rewrite, as_bool
from app.request_body.token_cost import Cost, UsualCost, reserved_tokens
from app.request_body.unit_cost import pcm_rate

__all__ = [
    "ABSENT",
    "BATCH",
    "CHAT",
    "COMPLETIONS",
    "JSON",
    "RESPONSES",
    "SLICE_BYTES",
    "SMALL_BYTES",
    "SPEECH",
    "STREAMED",
    "BodyMemory",
    "BodyMemoryBounds",
    "BodyPlan",
    "BodyRules",
    "BodyScan",
    "CacheSalts",
    "ConstantRewrite",
    "Cost",
    "Endpoint",
    "FieldRuleCache",
    "FormPart",
    "HeldBody",
    "JsonText",
    "ParsedBody",
    "Rewrite",
    "UsualCost",
    "as_bool",
    "check_taken",
    "decoder_of",
    "is_form",
    "is_json",
    "is_quick",
    "media_kinds",
    "new_response_id",
    "parse",
    "pcm_rate",
    "plan_body",
    "reserved_tokens",
    "scan_form",
    "with_response_id",
]
