"""Speculative decoding: drafters propose tokens, and a controller decides which drafts are worth running."""

from .costs import StepCosts
from .draft_model import DraftModel, without_layers
from .drafter import Drafter, Price, Proposal, Want
from .eagle import EagleGuesser, EagleHead, EagleShape, load_eagle
from .grammar_drafter import GrammarDrafter
from .lookup import LookupDrafter
from .model_drafter import ModelDrafter
from .speculation import Speculation

__all__ = [
    "DraftModel",
    "Drafter",
    "EagleGuesser",
    "EagleHead",
    "EagleShape",
    "GrammarDrafter",
    "LookupDrafter",
    "ModelDrafter",
    "Price",
    "Proposal",
    "Speculation",
    "StepCosts",
    "Want",
    "load_eagle",
    "without_layers",
]
