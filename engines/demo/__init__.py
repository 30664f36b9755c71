"""The demo model: a tiny chat model with known answers, and how it is trained."""

from engines.demo.model import DemoModelError, copy_demo_model
from engines.demo.training import train_demo_model

__all__ = ["DemoModelError", "copy_demo_model", "train_demo_model"]
