"""Rounding a model's weights to few bits, writing them for this and other runtimes, and measuring what was lost."""

from .quality import TextReader, TextScores, score_text
from .quantize import Quantized, quantize_model
from .stored_forms import FORMATS, SCHEMES

__all__ = ["FORMATS", "SCHEMES", "Quantized", "TextReader", "TextScores", "quantize_model", "score_text"]
