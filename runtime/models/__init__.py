"""Models in memory: one decoder for all families, which differ in config and tensor names."""

from .decoder import Model
from .loading import load_model

__all__ = ["Model", "load_model"]
