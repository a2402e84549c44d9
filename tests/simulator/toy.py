"""A toy language model whose tokens show every mistake: each depends on all bits of everything before it.

Its trunk hashes. A layer's activations are a hash of the layer's inputs at all positions so far, which is its cache;
the router's choice and weights come from the same hash; the experts are float32 products, and their rows are weighted
and added in the router's order. So a row in the wrong slot, a sum in another order, a lost or repeated token or a stale
cell of the cache gives other tokens from there on.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import permutations
from random import Random

import numpy as np
from numpy.typing import NDArray

from scheduler.answer import Vocabulary
from scheduler.requests import Request
from scheduler.sampling import sample
from scheduler.steps import Step, StepPart
from scheduler.text_stream import TextStream
from tests.simulator.checks import Breach

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

LAYERS, EXPERTS, USED = (0, 3), 6, 3  # MoE layers by their numbers, routed experts of each, chosen ones
WIDTH, TOKENS = 8, 32
CHUNK_TOKENS = 3  # of a layer in one frame; a larger batch takes several
EXPERT_BYTES = 1_000
END = 0

_CHOICES = tuple(permutations(range(EXPERTS), USED))

_PIECES = tuple(
    b"\xc3" if token % 8 == 6 else b"\xa9" if token % 8 == 7 else b"abcdef"[token % 8 :][:1] for token in range(TOKENS)
)
VOCABULARY = Vocabulary(TOKENS, lambda token: _PIECES[token], lambda token: token == END)
"""Letters, and halves of a character."""


class Experts:
    """The routed experts of a seed's model: y = a * x + b * reversed(x), for each expert its own a and b."""

    def __init__(self, random: Random) -> None:
        shape = (len(LAYERS), EXPERTS, WIDTH)
        values = np.array([random.uniform(-1, 1) for _ in range(2 * int(np.prod(shape)))], np.float32)
        self._a, self._b = values.reshape(2, *shape)

    def rows(self, layer: int, x: F32, tokens: I32, experts: I32) -> F32:
        """float32 [R, WIDTH] from x [Tp, WIDTH], tokens [R] (rows of x) and experts [R]."""
        n = LAYERS.index(layer)
        given = x[tokens]
        rows: F32 = given * self._a[n, experts] + given[:, ::-1] * self._b[n, experts]
        return rows


@dataclass(frozen=True, slots=True)
class Choice:
    """What a layer wants computed: x float32 [T, WIDTH], ids int32 [T, USED], weights float32 [T, USED]."""

    layer: int
    x: F32
    ids: I32
    weights: F32

    def part(self, start: int) -> Choice:
        """Of CHUNK_TOKENS tokens from `start` on."""
        some = slice(start, start + CHUNK_TOKENS)
        return Choice(self.layer, self.x[some], self.ids[some], self.weights[some])

    def add(self, rows: F32) -> F32:
        """The layer's output [T, WIDTH] from the experts' rows [T, USED, WIDTH], in the router's order; or from their
        sums [T, WIDTH]."""
        if rows.ndim == 2:
            return self.x + rows
        out = self.x.copy()
        for k in range(USED):
            out += self.weights[:, k, None] * rows[:, k]
        return out


class Trunk:
    """The cache of every sequence, and decoding. A pass is driven: see `begin`.

    can_cut: a sequence can be cut back to an earlier position; else nothing is left of one whose pass was broken off.
    """

    def __init__(self, *, can_cut: bool = False) -> None:
        self._can_cut = can_cut
        self._cells: dict[int, list[tuple[bytes, ...]]] = {}  # sequence -> for each position a hash per layer

    def clear(self, sequence: int) -> None:
        self._cells.pop(sequence, None)

    def begin(self, step: Step) -> Pass:
        """Decode the rows of a step. Raises Breach for positions that are not the cache's next ones."""
        for sequence in step.clear:
            self.clear(sequence)
        for sequence, position in step.cut:
            del self._cells[sequence][position:]
        rows = [
            (self._cells.setdefault(sequence, []), token)
            for token, sequence in zip(step.tokens.tolist(), step.sequences.tolist(), strict=True)
        ]
        for part in step.parts:
            first = int(step.positions[step.sequences == part.sequence][0])
            if len(self._cells[part.sequence]) != first:
                raise Breach(f"cache: position {first} after {len(self._cells[part.sequence])} of {part.request}")
        return Pass(self, step, rows)

    def spoil(self, step: Step) -> None:
        """What a pass that was broken off leaves in its sequences: nothing that anybody may use."""
        broken = (b"broken off",) * len(LAYERS)
        for part in step.parts:
            cells = self._cells[part.sequence]
            kept = cells if self._can_cut and step.kind == "decode" else [broken] * len(cells)
            self._cells[part.sequence] = [*kept, *[broken] * part.rows]

    def grow(self, step: Step, chains: list[list[bytes]]) -> None:
        for row, sequence in enumerate(step.sequences.tolist()):
            self._cells[sequence].append(tuple(chain[row] for chain in chains))


class Pass:
    """One decode: `choice` says what the present layer needs, `combined` goes on to the next one; then `logits`."""

    def __init__(self, trunk: Trunk, step: Step, rows: list[tuple[list[tuple[bytes, ...]], int]]) -> None:
        self._trunk, self._step, self._rows = trunk, step, rows
        self._chains: list[list[bytes]] = []  # of each layer done, for each row
        self._hidden = [bytes((token,)) for _, token in rows]
        self.choice: Choice | None = self._next()

    def combined(self, rows: F32) -> None:
        """The layer's experts, float32 [T, USED, WIDTH], or their weighted sums [T, WIDTH]."""
        assert self.choice is not None
        self._hidden = [row.tobytes() for row in self.choice.add(rows)]
        if len(self._chains) < len(LAYERS):
            self.choice = self._next()
        else:
            self.choice = None
            self._trunk.grow(self._step, self._chains)

    @property
    def logits(self) -> F32:
        """float32 [rows that want them, TOKENS], once there is no choice left."""
        wanted = [hidden for hidden, wants in zip(self._hidden, self._step.wants_logits, strict=True) if wants]
        return np.array([_numbers(hidden, TOKENS, 4.0) for hidden in wanted], np.float32).reshape(-1, TOKENS)

    def _next(self) -> Choice:
        layer = len(self._chains)
        chains: list[bytes] = []
        here: dict[int, bytes] = {}  # by the identity of a sequence's cells: its newest chain within this pass
        for (cells, _), hidden in zip(self._rows, self._hidden, strict=True):
            before = here.get(id(cells)) or (cells[-1][layer] if cells else b"")
            chains.append(blake2b(before + hidden, digest_size=16, salt=bytes((layer,))).digest())
            here[id(cells)] = chains[-1]
        self._chains.append(chains)
        x = np.array([_numbers(chain, WIDTH, 2.0) for chain in chains], np.float32)
        ids = np.array([_chosen(chain) for chain in chains], np.int32)
        weights = np.array([[0.1 + byte / 512 for byte in chain[2 : 2 + USED]] for chain in chains], np.float32)
        return Choice(LAYERS[layer], x, ids, weights)


def _numbers(seed: bytes, count: int, spread: float) -> F32:
    """Numbers from -spread to spread that a hash gives."""
    digest = blake2b(seed, digest_size=2 * count).digest()
    numbers: F32 = np.frombuffer(digest, "<i2").astype(np.float32) * np.float32(spread / 32_768)
    return numbers


def _chosen(seed: bytes) -> tuple[int, ...]:
    return _CHOICES[int.from_bytes(seed[:2], "little") % len(_CHOICES)]


def undisturbed(experts: Experts, request: Request, context_tokens: int) -> tuple[tuple[int, ...], str]:
    """The answer as one machine gives it that holds everything and serves nobody else: its tokens and its text."""
    prompt, params, trunk, done = request.prompt_tokens, request.params, Trunk(), 0
    tokens, stream, text = list(prompt), TextStream(request.stop), ""
    while len(tokens) - len(prompt) < request.max_tokens and len(tokens) <= context_tokens:
        step = _step(tokens, done)
        running = trunk.begin(step)
        while (choice := running.choice) is not None:
            n = len(choice.x)
            every = np.repeat(np.arange(n, dtype=np.int32), USED)
            running.combined(experts.rows(choice.layer, choice.x, every, choice.ids.reshape(-1)).reshape(n, USED, -1))
        done = len(tokens)
        token = sample(running.logits[0], params, len(tokens), request.choice, tokens[len(prompt) :]).token
        if token == END:
            break
        tokens.append(token)
        delta = stream.feed(_PIECES[token])
        text += delta.text
        if delta.stopped:
            break
    return tuple(tokens[len(prompt) :]), text + stream.finish().text


def _step(tokens: list[int], done: int) -> Step:
    new = np.array(tokens[done:], np.int32)
    wants = np.zeros(len(new), np.bool_)
    wants[-1] = True
    positions = np.arange(done, len(tokens), dtype=np.int32)
    part = StepPart("alone", 0, len(new), True)
    return Step(
        number=1,
        kind="decode",
        clear=(),
        parts=(part,),
        tokens=new,
        positions=positions,
        sequences=np.zeros(len(new), np.int32),
        wants_logits=wants,
        cut=(),
    )
