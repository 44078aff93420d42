"""The runtime: programs of operations in, text and numbers out."""
