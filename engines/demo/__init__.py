"""The demo model: a tiny chat model with known answers, trained on the user's machine."""

from engines.demo.model import DemoModelError, build_demo_model

__all__ = ["DemoModelError", "build_demo_model"]
