"""Guessing the next tokens from what followed the same tokens before (prompt lookup decoding, arXiv 2304.04487).

The agent's turns are full of repetitions: templates, and numbers copied from observations. A sampler that reads a guess
along with the last token gets, for each guessed token that it would have sampled anyway, one pass of the network for
free. The guess decides nothing: the tokens are those that the policy samples without it.
"""

from __future__ import annotations

from collections.abc import Sequence

CONTEXTS = (8, 4, 2)  # tokens that must agree; a longer context is trusted before a shorter one


class Drafts:
    """What came after each context, seen last in any of the texts that were learned."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}

    def learn(self, ids: Sequence[int], begin: int) -> None:
        """Take in the tokens from `begin` on; those before are context."""
        for at in range(max(begin, CONTEXTS[-1]), len(ids)):
            for length in CONTEXTS:
                if length <= at:
                    self._next[tuple(ids[at - length : at])] = ids[at]

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may come after `ids`; fewer, or none, where nothing like it was seen."""
        text = list(ids[-CONTEXTS[0] :])
        begun = len(text)
        while len(text) - begun < most:
            contexts = (tuple(text[-length:]) for length in CONTEXTS if length <= len(text))
            following = next((self._next[c] for c in contexts if c in self._next), None)
            if following is None:
                break
            text.append(following)
        return text[begun:]
