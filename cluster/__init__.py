"""Whole programs over several engines: which engine gets a program, and how a program outlives its engine."""
