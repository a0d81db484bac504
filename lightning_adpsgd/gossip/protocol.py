"""The rules of asynchronous exchange: when a round is due, who may ask, what weight.

Pure values, without threads, networks or clocks, so that the engine (`gossip`,
`exchange`) and the virtual cluster (`timeline`) follow the same ones.
"""

from collections import Counter


def due_round(step: int, every: int) -> int | None:
    """The number of the round that a learner calls after its step number `step`.

    Args:
        step: Optimizer steps made, this one counted.
        every: Steps per round.

    Returns:
        None where no round is due.
    """
    round, rest = divmod(step, every)
    return round if rest == 0 else None


def exchange_weight(gain: float, num_mine: int, num_theirs: int) -> float:
    """a in ``d += a (theirs - mine)``, the same at both ends (Metropolis' weights).

    Two that meet alone take their mean, a = gain / 2. Exchanges that overlap would
    overshoot it together; these weights make the sum of them an average again.

    Args:
        gain: gamma.
        num_mine: Exchanges that this end had under way when it began, this one counted.
        num_theirs: The same of the other end.
    """
    return gain / (1 + max(num_mine, num_theirs))


class UnderWay:
    """The exchanges that one learner has under way; who shares it guards it.

    Who is exchanging with a peer just now does not ask that peer: the exchange under
    way is as good. Who is asked never refuses.
    """

    def __init__(self) -> None:
        self._with = Counter[int]()

    def enter(self, peer: int, asked: bool = False) -> int:
        """Begins an exchange.

        Returns:
            How many are under way, this one counted, or 0 if it must not begin.
        """
        if self._with[peer] and not asked:
            return 0
        self._with[peer] += 1
        return self._with.total()

    def leave(self, peer: int) -> None:
        """Ends an exchange with a peer."""
        self._with[peer] -= 1

    def total(self) -> int:
        """How many are under way."""
        return self._with.total()
