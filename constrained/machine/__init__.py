"""The pushdown automaton over bytes, its tables, its walks over the token trie and its masks."""
