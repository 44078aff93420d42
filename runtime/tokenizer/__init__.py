"""Text to tokens and back, chat templates, and stop strings. Imports no torch."""

from .chat_template import ModelTemplate
from .detokenizer import Detokenizer
from .loading import load_chat_template, load_tokenizer
from .tokenizer import Tokenizer

__all__ = ["ModelTemplate", "Detokenizer", "Tokenizer", "load_chat_template", "load_tokenizer"]
