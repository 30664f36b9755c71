"""Serves HTTP: the routes of FastAPI, and the dispatch of the data plane to the relay.

The data plane bypasses FastAPI: `data_plane` maps its paths to handlers of the relay. Each other
module with a router has the routes of one resource: `models`, `llama_cpp`, `usage`, `health` and,
under /admin, `admin_engines`, `admin_keys`, `admin_models`, `admin_owners`, `admin_requests`,
`audit`, `captures`, `logs` and `reload`. `client_key` and `admin_auth` authenticate their callers;
`middleware`, `cors` and `exception_handlers` apply to all of them. `schema` makes the OpenAPI
document, with the help of `error_responses` and `data_plane_schema`.
"""

from app.api.act_limits import ActLimiter
from app.api.admin_auth import (
    MANAGED_ROLES,
    MAX_BODY_BYTES,
    SESSION_CALLER,
    SESSION_CHECK,
    AdminAuth,
    RequireRight,
    Right,
    bound_body,
    client_address,
    error_response,
    has_right,
    still_allowed,
)
from app.api.admin_engines import engines_router
from app.api.admin_keys import keys_router
from app.api.admin_models import ModelAction, admin_models_router, model_row, model_rows
from app.api.admin_owners import owners_router
from app.api.admin_requests import (
    DEFAULT_SPAN,
    cursor_of,
    key_in_scope,
    parse_cursor,
    parse_moment,
    requests_of,
    requests_router,
    status_range,
)
from app.api.audit import audit_router, parse_audit_cursor
from app.api.captures import captures_routers, own_capture
from app.api.client_key import ClientKey, require_client_key
from app.api.cors import CorsHeaders
from app.api.data_plane import ENDPOINTS, DataPlaneDispatcher, endpoint_of, find_none
from app.api.exception_handlers import EXCEPTION_HANDLERS
from app.api.health import metrics_router, ops_router
from app.api.key_bounds import check_may_manage
from app.api.llama_cpp import llama_cpp_router, status_of
from app.api.log_stream import wait_for_disconnect
from app.api.logs import logs_router
from app.api.middleware import (
    AccessLogMiddleware,
    HeadMiddleware,
    PreflightMiddleware,
    RequestMetricsMiddleware,
    notes_of,
)
from app.api.models import models_router
from app.api.reload import reload_router
from app.api.schema import schema_router
from app.api.usage import (
    MAX_DAYS,
    MAX_ROWS,
    check_names,
    owner_within,
    parse_day,
    parse_groups,
    usage_router,
)

__all__ = [
    "DEFAULT_SPAN",
    "ENDPOINTS",
    "EXCEPTION_HANDLERS",
    "MANAGED_ROLES",
    "MAX_BODY_BYTES",
    "MAX_DAYS",
    "MAX_ROWS",
    "SESSION_CALLER",
    "SESSION_CHECK",
    "AccessLogMiddleware",
    "ActLimiter",
    "AdminAuth",
    "ClientKey",
    "CorsHeaders",
    "DataPlaneDispatcher",
    "HeadMiddleware",
    "ModelAction",
    "PreflightMiddleware",
    "RequestMetricsMiddleware",
    "RequireRight",
    "Right",
    "admin_models_router",
    "audit_router",
    "bound_body",
    "captures_routers",
    "check_may_manage",
    "check_names",
    "client_address",
    "cursor_of",
    "endpoint_of",
    "engines_router",
    "error_response",
    "find_none",
    "has_right",
    "key_in_scope",
    "keys_router",
    "llama_cpp_router",
    "logs_router",
    "metrics_router",
    "model_row",
    "model_rows",
    "models_router",
    "notes_of",
    "ops_router",
    "own_capture",
    "owner_within",
    "owners_router",
    "parse_audit_cursor",
    "parse_cursor",
    "parse_day",
    "parse_groups",
    "parse_moment",
    "reload_router",
    "requests_of",
    "requests_router",
    "require_client_key",
    "schema_router",
    "status_of",
    "status_range",
    "still_allowed",
    "usage_router",
    "wait_for_disconnect",
]
