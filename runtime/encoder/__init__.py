"""Encoder models: config and tokens, which need no torch, the model, and the engine that serves it."""
