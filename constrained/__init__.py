"""Grammar in, token bitmask out: JSON Schema, regex, EBNF, Lark, choices."""
