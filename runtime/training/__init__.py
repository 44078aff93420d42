"""Training of what makes a model faster, on the machine that serves it. Never changes the model."""

from .corpus import Corpus, collect
from .eagle import EagleModule, Report, train_eagle
from .questions import QUESTIONS

__all__ = ["QUESTIONS", "Corpus", "EagleModule", "Report", "collect", "train_eagle"]
