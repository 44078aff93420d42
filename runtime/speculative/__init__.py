"""Speculative decoding: drafters propose tokens, and a controller decides which drafts are worth running."""

from .costs import StepCosts
from .draft_model import DraftModel, without_layers
from .drafter import Drafter, Price, Proposal, Want
from .grammar_drafter import GrammarDrafter
from .lookup import LookupDrafter
from .model_drafter import ModelDrafter
from .speculation import Speculation

__all__ = [
    "DraftModel",
    "Drafter",
    "GrammarDrafter",
    "LookupDrafter",
    "ModelDrafter",
    "Price",
    "Proposal",
    "Speculation",
    "StepCosts",
    "Want",
    "without_layers",
]
