"""What narrows an answer down to a language: a grammar's state, as the sampler sees it.

Its whole state follows from the answer's tokens, so one that was begun elsewhere goes on under the same rules. The
implementation is backends/grammar.py's; decisions stay here.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """A constraint that has seen the answer so far."""

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, bool [n_vocab]: at least one. An end token is among them where it may end.

        Raises UsageError where finding that out is more work than a request may cause.
        """

    def accept(self, token: int) -> None:
        """The next token of the answer; one of those that are allowed, and no end token."""

    @property
    def complete(self) -> bool:
        """The answer can only end now."""
