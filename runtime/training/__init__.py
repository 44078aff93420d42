"""Training of an EAGLE head, which drafts for a model, on the machine that serves the model."""

from .corpus import Corpus, collect
from .eagle import EagleModule, TrainingReport, train_eagle
from .questions import QUESTIONS

__all__ = ["QUESTIONS", "Corpus", "EagleModule", "TrainingReport", "collect", "train_eagle"]
