"""The contract between language and runtime: operations, messages, errors, and the client's half of the wire."""
