"""The tries of a vocabulary's short and long tokens, and where their nodes lie in the trie of all tokens.

Many states allow the same short tokens, where only long ones, which are few, run into a bound that is far away. So the
two are walked apart.
"""

import numpy as np

from .vocabulary import Trie, Vocabulary

SHORT_TOKEN = 16  # bytes; longer tokens are few


class TokenParts:
    """``short``: the trie of the tokens of at most ``SHORT_TOKEN`` bytes. ``long``: that of the others."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._whole = vocabulary.trie
        self.short = vocabulary.trie_of_lengths(1, SHORT_TOKEN)
        self.long = vocabulary.trie_of_lengths(SHORT_TOKEN + 1, 1 << 30)
        self._place = np.zeros(len(vocabulary), np.int64)  # of each token in the order of all tokens
        self._place[self._whole.token_order] = np.arange(len(self._whole.token_order))
        self._by_depth: dict[int, np.ndarray] = {}  # nodes of all tokens

    def in_whole(self, part: Trie, nodes: np.ndarray) -> np.ndarray:
        """The nodes of all tokens that spell the same as nodes of a part, both int64 [n]."""
        found = np.zeros(len(nodes), np.int64)
        depths, places = part.node_depth[nodes], self._place[part.token_order[part.first_token[nodes]]]
        for depth in np.unique(depths).tolist():
            here = depths == depth
            whole = self._nodes_at(depth)
            # the last one whose tokens do not all come after a token that the node leads to
            at = np.searchsorted(self._whole.first_token[whole], places[here], side="right") - 1
            found[here] = whole[at]
        return found

    def _nodes_at(self, depth: int) -> np.ndarray:
        found = self._by_depth.get(depth)
        if found is None:
            found = self._by_depth[depth] = np.flatnonzero(self._whole.node_depth == depth)
        return found


def parts_of(vocabulary: Vocabulary) -> TokenParts | None:
    """The vocabulary's own parts, made on first use; None if it has no long tokens."""
    if vocabulary.trie.max_depth <= SHORT_TOKEN:
        return None
    return vocabulary.shared(TokenParts, lambda: TokenParts(vocabulary))
