"""The HTTP server: the OpenAI-compatible API, the native API, health and metrics.

Every request becomes one program with ops, sent through ``protocol.client.Client``. The
application itself is in ``app``, which imports FastAPI.
"""

from .lifetime import serve

__all__ = ["serve"]
