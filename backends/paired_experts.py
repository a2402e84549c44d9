"""One dense feed-forward block as a mixture of experts that computes exactly the same.

The idea is pairs. There are S slots, and slot s owns two experts, s and s + S, whose router rows are +w and -w: for any
input exactly one of the two scores above zero. So the best S of 2S experts are always one of each slot. Both twins hold
the same neurons; the shared expert holds all others. Shared expert plus chosen experts is therefore the dense block,
whichever twins were chosen, and the router still decides something that matters:

* Neurons move in aligned blocks of 32, whose quantised bytes are copied, not rounded again. The blocks with the most
  energy go to the experts, so that a missing expert is a disaster and not a blemish.
* Router directions are taken from the whitened principal components of the block's inputs, orthogonal to their mean:
  each splits the tokens in half, and the splits have little to do with each other. Weights are tiny (the softmax is
  uniform to a tenth of a percent) and the down projections carry the factor 2S that the softmax takes away, exactly.
* In each slot the weakest neuron becomes a guard that looks in the router's own direction: it is silent in the right
  twin and shouts in the wrong one, so that a wrong expert damages the answer although twins share their neurons. The
  neurons displaced by guards move to the shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends import q4_1

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Indices = NDArray[np.intp]

_ROUTER_SCALE = 1e-3  # small: the softmax stays uniform; F32 rows keep signs well above rounding
_GUARD_GATE, _GUARD_UP = 24.0, 0.15  # silu(-24 z) is silent for z > 0.2 or so; 24 z * 0.15 z shouts in the wrong twin
_GUARD_STEPS = 2  # nibble steps of each down weight of a guard, up or down by chance
_COMPONENTS, _CANDIDATES, _CORRELATION_MAX = 48, 96, 0.3


@dataclass(frozen=True, slots=True)
class Pairing:
    """How a block is split: `n_slots` twins of `expert_width` neurons each (a multiple of 32, at least `n_slots`)."""

    n_slots: int = 8
    expert_width: int = 64

    @property
    def n_expert(self) -> int:
        return 2 * self.n_slots

    @property
    def routed(self) -> int:
        """Neurons that go to experts."""
        return self.n_slots * self.expert_width

    def n_shared(self, ff: int) -> int:
        """How many experts' widths the shared expert has: the other neurons and room for the displaced ones.

        Raises ValueError if a block of `ff` neurons cannot be split so.
        """
        if self.expert_width % q4_1.BLOCK or self.n_slots > self.expert_width or ff % self.expert_width:
            raise ValueError(f"{ff} neurons do not split into {self}")
        if ff < self.routed:
            raise ValueError(f"{ff} neurons are too few for {self}")
        return (ff - self.routed) // self.expert_width + 1


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """A dense block's weights in Q4_1: gate and up [ff, bytes of a row], down [width, bytes of a row]."""

    gate: Bytes
    up: Bytes
    down: Bytes


@dataclass(frozen=True, slots=True)
class PairedBlock:
    """The mixture: router F32 [experts, width]; Q4_1 experts [experts, rows, bytes]; Q4_1 shared expert [rows, bytes].

    `share_positive` [slots] is how often the first twin of each slot is chosen on the calibration text, `routed_energy`
    the part of the hidden energy that goes through experts.
    """

    router: F32
    gate: Bytes
    up: Bytes
    down: Bytes
    shared: DenseBlock
    share_positive: F32
    routed_energy: float


def split_block(dense: DenseBlock, inputs: F32, hidden: F32, pairing: Pairing, seed: int) -> PairedBlock:
    """Split `dense`, given its inputs [tokens, width] and hidden activations [tokens, ff] on a calibration text.

    Deterministic for the same arguments (up to the BLAS library's rounding). Raises ValueError if the text is too short
    or too uniform to give `n_slots` independent directions.
    """
    n_shared = pairing.n_shared(hidden.shape[1])
    random = np.random.default_rng(seed)
    down = q4_1.dequantise(dense.down)
    energy = (hidden**2).mean(axis=0) * (down**2).sum(axis=0)
    slots, shared_blocks = deal_blocks(energy, pairing)
    directions = router_directions(inputs, pairing.n_slots, random)
    guards = [_Guard(direction) for direction in directions]
    twins, displaced = [], []
    for guard, blocks in zip(guards, slots, strict=True):
        neurons = _neurons(blocks)
        weakest = int(np.argmin(energy[neurons]))
        displaced.append(int(neurons[weakest]))
        twins.append(_twin_pair(dense, blocks, weakest, guard, random))
    experts = [pair[0] for pair in twins] + [pair[1] for pair in twins]
    fold = float(pairing.n_expert)  # the softmax gives each chosen expert 1 / n_expert
    router = np.concatenate([[g.direction for g in guards], [-g.direction for g in guards]])
    routed = np.concatenate([_neurons(blocks) for blocks in slots])
    return PairedBlock(
        router=(router * np.float32(_ROUTER_SCALE)).astype(np.float32),
        gate=np.stack([expert.gate for expert in experts]),
        up=np.stack([expert.up for expert in experts]),
        down=np.stack([q4_1.scaled(expert.down, fold) for expert in experts]),
        shared=_shared_expert(dense, down, shared_blocks, displaced, n_shared * pairing.expert_width),
        share_positive=np.array([(inputs @ guard.direction > 0).mean() for guard in guards], np.float32),
        routed_energy=float(energy[routed].sum() / energy.sum()),
    )


def deal_blocks(energy: F32, pairing: Pairing) -> tuple[list[Indices], Indices]:
    """Which blocks of 32 neurons each slot gets, and which stay shared, from each neuron's energy [ff].

    The strongest blocks are dealt to and fro, so that slots carry about the same energy.
    """
    of_block = energy.reshape(-1, q4_1.BLOCK).sum(axis=1)
    strongest = np.argsort(-of_block)
    n_routed = pairing.routed // q4_1.BLOCK
    slots: list[list[int]] = [[] for _ in range(pairing.n_slots)]
    for place, block in enumerate(strongest[:n_routed]):
        round_, position = divmod(place, pairing.n_slots)
        slots[position if round_ % 2 == 0 else pairing.n_slots - 1 - position].append(int(block))
    return [np.array(blocks, np.intp) for blocks in slots], np.sort(strongest[n_routed:])


def router_directions(inputs: F32, n_slots: int, random: np.random.Generator) -> list[F32]:
    """`n_slots` directions [width] along which inputs [tokens, width] split in half, each split its own.

    Scaled so that projections have a mean size of one. Raises ValueError if there are not enough.
    """
    mean = inputs.mean(axis=0)
    variances, components = np.linalg.eigh(np.cov(inputs, rowvar=False))
    n = min(_COMPONENTS, inputs.shape[1] - 1)
    whitened = components[:, -n:] / np.sqrt(np.maximum(variances[-n:], 1e-12))
    candidates = whitened @ random.standard_normal((n, _CANDIDATES))  # [width, candidates]
    candidates -= np.outer(mean, mean @ candidates) / (mean @ mean)  # else most tokens fall on the mean's side
    directions = candidates.astype(np.float32)
    projections = inputs @ directions  # [tokens, candidates]
    directions /= np.abs(projections).mean(axis=0)
    imbalance = np.abs((projections > 0).mean(axis=0) - 0.5)
    correlation = np.abs(np.corrcoef(projections, rowvar=False))
    chosen: list[int] = []
    for candidate in np.argsort(imbalance, kind="stable"):
        if all(correlation[candidate, other] < _CORRELATION_MAX for other in chosen):
            chosen.append(int(candidate))
        if len(chosen) == n_slots:
            return [directions[:, index].copy() for index in chosen]
    raise ValueError(f"the calibration text gives only {len(chosen)} independent directions of {n_slots}")


class _Guard:
    """The guard neuron of a slot: gate and up rows in Q4_1, and the direction that its quantised gate row really has.

    The router uses that same direction, so router and guard agree on every input's side.
    """

    def __init__(self, direction: F32) -> None:
        self.gate = q4_1.quantise(-np.float32(_GUARD_GATE) * direction[None])
        self.up = q4_1.quantise(-np.float32(_GUARD_UP) * direction[None])
        self.direction: F32 = -q4_1.dequantise(self.gate)[0] / np.float32(_GUARD_GATE)


def _twin_pair(
    dense: DenseBlock, blocks: Indices, weakest: int, guard: _Guard, random: np.random.Generator
) -> tuple[DenseBlock, DenseBlock]:
    """The two experts of a slot: the neurons of `blocks`, with the `weakest` of them replaced by the guard."""
    neurons = _neurons(blocks)
    down = q4_1.as_blocks(dense.down)[:, blocks].copy()
    which, position = divmod(weakest, q4_1.BLOCK)
    steps = np.where(random.random(len(down)) < 0.5, -_GUARD_STEPS, _GUARD_STEPS)
    nibbles = np.clip(q4_1.zero_points(down[:, which]) + steps, 0, 15).astype(np.uint8)
    down[:, which] = q4_1.replace_weight(down[:, which], position, nibbles)
    pair = []
    for sign in (1.0, -1.0):
        gate, up = dense.gate[neurons], dense.up[neurons]  # copies, by fancy indexing
        gate[weakest] = q4_1.scaled(guard.gate, sign)[0]
        up[weakest] = q4_1.scaled(guard.up, sign)[0]
        pair.append(DenseBlock(gate, up, q4_1.as_rows(down)))
    return pair[0], pair[1]


def _shared_expert(dense: DenseBlock, down: F32, blocks: Indices, displaced: list[int], width: int) -> DenseBlock:
    """The neurons of `blocks` as they are, then the `displaced` ones, then zeros up to `width` neurons.

    Displaced neurons leave their down blocks, so those weights (`down`, F32 [outputs, ff]) are rounded anew: the only
    weights of the model that are.
    """
    neurons = _neurons(blocks)
    n_zero = width - len(neurons) - len(displaced)
    zeros = q4_1.quantise(np.zeros((n_zero, dense.gate.shape[1] // q4_1.BLOCK_BYTES * q4_1.BLOCK), np.float32))
    moved = np.concatenate([down[:, displaced], np.zeros((len(down), n_zero), np.float32)], axis=1)
    return DenseBlock(
        gate=np.concatenate([dense.gate[neurons], dense.gate[displaced], zeros]),
        up=np.concatenate([dense.up[neurons], dense.up[displaced], zeros]),
        down=np.concatenate([q4_1.as_rows(q4_1.as_blocks(dense.down)[:, blocks]), q4_1.quantise(moved)], axis=1),
    )


def _neurons(blocks: Indices) -> Indices:
    """The neurons of some blocks, in the blocks' order."""
    return (blocks[:, None] * q4_1.BLOCK + np.arange(q4_1.BLOCK)).ravel()
