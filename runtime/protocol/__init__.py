"""The contract between language and runtime: operations, messages, errors, and the client's half of the wire.

The only part of the runtime that ``lang`` may import. Never imports torch.
"""
