"""The private methods of uvicorn's protocol that `ClientConnection` overrides."""

import uvicorn

# As in pyproject.toml. uvicorn starts the application through the hook since 0.45.
SUPPORTED = "uvicorn>=0.45,<0.55"
HOOKS = ("_start_asgi_task",)


def check_hooks(protocol: type) -> None:
    """Raise ImportError unless uvicorn's protocol calls the methods that are overridden.

    Without the hook the connection would not know that a request is being answered, and would
    close it at the deadline of the next request: every long response would be cut off.
    """
    missing = [name for name in HOOKS if not hasattr(protocol, name)]
    if missing:
        raise ImportError(
            f"uvicorn {uvicorn.__version__} has no {', '.join(missing)} in its protocol; "
            f"install {SUPPORTED}"
        )
