"""The level generation: greedy answers of two models to the same prompts, and where they part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from capabilities.equivalence import FlipLimits, verdict


@dataclass(frozen=True, slots=True)
class Fork:
    """Where two greedy answers to one prompt part: the token's index, A's margin there and how far its logits moved."""

    index: int
    margin: float
    l_infinity: float


@dataclass(frozen=True, slots=True)
class Generated:
    """Greedy answers of both sides. forks: one for each prompt, None where all `tokens` of its answer agree.

    forks_predicted: how many to expect by the margins of all positions that came before a fork.
    """

    tokens: int
    forks: tuple[Fork | None, ...]
    forks_predicted: float

    @property
    def parted(self) -> tuple[Fork, ...]:
        return tuple(fork for fork in self.forks if fork is not None)

    @property
    def positions(self) -> int:
        """Tokens that were compared: of each answer up to where it parts, and that one."""
        return sum(self.tokens if fork is None else fork.index + 1 for fork in self.forks)


def generation_level(generated: Generated, floor: Generated) -> dict[str, Any]:
    """The verdict on answers of both sides, beside llama.cpp's two sets of kernels.

    Answers may part at every token that is compared, and at none after the first where they do: what is held against
    the noise is how many of these tokens part.
    """
    forks = generated.parted
    limits = FlipLimits.of(generated.forks_predicted, generated.positions, len(floor.parted), floor.positions)
    wild = sum(fork.margin > 2 * fork.l_infinity for fork in forks)
    words = f"{len(forks)} of {len(generated.forks)} answers parted, {limits.words('tokens')}"
    return {
        **verdict(
            "generation",
            f"{words}; none through the gate",
            f"{wild} answers parted where the margin exceeds twice L-infinity" if wild else None,
            words if len(forks) > limits.lower else None,
        ),
        "tolerance": {
            "text": f"none parts through the gate; {limits.text('part')}",
            "forks_through_the_gate": 0,
            "forks": limits.lower,
            "forks_beside_noise": limits.beside_noise,
        },
        **generation_figures(generated),
        "forks_predicted": generated.forks_predicted,
        "forks_through_the_gate": wild,
        "noise_floor": {**generation_figures(floor), "forks_predicted": floor.forks_predicted},
    }


def generation_figures(generated: Generated) -> dict[str, Any]:
    indices = sorted(fork.index for fork in generated.forks if fork is not None)
    return {
        "prompts": len(generated.forks),
        "tokens": generated.tokens,
        "positions": generated.positions,
        "identical": len(generated.forks) - len(indices),
        "first_differences": indices,
        "first_difference_counts": [indices.count(token) for token in range(generated.tokens)],
    }
