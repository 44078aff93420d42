"""Guessing what comes next, and knowing when it pays. Never decides a token: the model does."""

from .costs import StepCosts
from .drafter import Drafter, Proposal, Want
from .lookup import LookupDrafter
from .speculation import Speculation

__all__ = ["Drafter", "LookupDrafter", "Proposal", "Speculation", "StepCosts", "Want"]
