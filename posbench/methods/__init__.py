"""Inference-time interventions against position bias: one module and one YAML each."""

from posbench.methods.base import Method
from posbench.methods.scale_channel import ScaleChannel
from posbench.methods.unmodified import Unmodified

__all__ = ["Method", "ScaleChannel", "Unmodified"]
