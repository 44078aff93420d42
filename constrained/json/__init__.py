"""Reads JSON Schema and builds the machine states of the values that it allows."""
