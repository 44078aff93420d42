"""HTTP for strangers: the OpenAI-compatible API, the native API, health and metrics, over the runtime's own protocol.

Never generates anything itself: every request becomes one program with ops, sent through ``protocol.client.Client``.
"""

from .app import create_app, serve

__all__ = ["create_app", "serve"]
