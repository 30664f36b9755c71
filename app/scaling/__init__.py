"""Decides how many engines a model needs, and has them started and stopped.

`policy` decides, from what is measured; it knows no clock and no engine. `autoscaler` measures and
carries out.
"""

from app.scaling.autoscaler import Autoscaler
from app.scaling.policy import Load, ScalingPolicy, ScalingTerms

__all__ = ["Autoscaler", "Load", "ScalingPolicy", "ScalingTerms"]
