"""Models in memory: one decoder, and the families it serves by config and names. Never schedules or samples."""

from .decoder import Model
from .loading import load_model

__all__ = ["Model", "load_model"]
