"""Images as a model's input: decoded, cut into tiles, encoded, and their place among the tokens."""
