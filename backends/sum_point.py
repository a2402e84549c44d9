"""Finds where llama.cpp weights a layer's expert rows and adds them up, so that a total can take their place.

What follows the rows must be exactly this: one product with the router's weights, a number a (token, expert); a view of
each slot; the slots added in order. Then a token's total in slot 0 and zeros in the others come out as that total. The
weights are computed before the experts and used after them, so their memory is untouched in between. Where a layer does
anything else with its rows there is no sum point, and its experts can only be answered row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from backends.ggml import Library, Tensor, tensor_at


@dataclass(frozen=True, slots=True)
class SumPoint:
    """Two nodes of a layer.

    weights   the router's final weights [1, K, T]: of the nodes of this name and operator (`weights_op`,
              ggml's number) the last before the layer's dispatch point
    weighted  the weighted rows [n_out, K, T]: the first node of this name after it
    """

    weights: bytes
    weights_op: int
    weighted: bytes


@dataclass
class SumSearch:
    """Looks at the nodes that follow a layer's collect point `rows` (an address), in graph order.

    `point` is there once the last slot is added, and gone again if a later node reads rows or slots too. `before` has
    the nodes that came before the dispatch point, the last of each name; `after` the names of those that came since.
    """

    lib: Library
    rows: int
    before: Mapping[bytes, int]
    after: Set[bytes]
    point: SumPoint | None = None
    _found: SumPoint | None = None
    _weighted: int = 0
    _slots: list[int] = field(default_factory=list)
    _total: int = 0  # the sum of the first `_added` slots
    _added: int = 0
    _failed: bool = False

    def see(self, node: int, tensor: Tensor) -> None:
        """The next node and the tensor that it is."""
        sources = [address for address in tensor.src if address]
        if self._failed or not any(map(self._is_ours, sources)):
            return
        op = self.lib.op_names.get(tensor.op, "")
        if self._weighted:
            fits = self._slot(op, node, tensor) or self._sum(op, node, sources)
        else:
            fits = self._product(op, node)
        self._failed = not fits
        self.point = self._found if fits and self._added == self._n_used else None

    def _is_ours(self, address: int) -> bool:
        if not self._weighted and _copied(address) == tensor_at(self.rows).name:
            return True
        return address in (self.rows, self._weighted) or address in self._slots

    @property
    def _n_used(self) -> int:
        return int(tensor_at(self.rows).ne[1])

    def _product(self, op: str, node: int) -> bool:
        """Whether the node multiplies the rows by the router's weights."""
        tensor, rows = tensor_at(node), tensor_at(self.rows)
        if op != "MUL" or tensor.name in self.after:
            return False
        copied = _copied(tensor.src[1])
        name = copied or tensor_at(tensor.src[1]).name
        address = self.before.get(name)
        if address is None or (address != tensor.src[1] and not copied):
            return False
        weights = tensor_at(address)
        n_used, n_tokens = rows.ne[1:3]
        if list(weights.ne) != [1, n_used, n_tokens, 1]:
            return False
        self._found, self._weighted = SumPoint(name, weights.op, tensor.name), node
        return True

    def _slot(self, op: str, node: int, tensor: Tensor) -> bool:
        """Whether the node is the view of the next slot."""
        whole, place = tensor_at(self._weighted), len(self._slots)
        if op != "VIEW" or tensor.src[0] != self._weighted or place == self._n_used:
            return False
        shape = list(tensor.ne) == [whole.ne[0], whole.ne[2], 1, 1] and tensor.nb[1] == whole.nb[2]
        if not shape or tensor.view_offs - whole.view_offs != place * whole.nb[1]:
            return False
        self._slots.append(node)
        return True

    def _sum(self, op: str, node: int, sources: list[int]) -> bool:
        """Whether the node adds the next slot to those before it."""
        slots, added = self._slots, self._added or 1
        if self._n_used == 1:  # the only slot is the total, whoever reads it
            self._added = 1
            return True
        if op != "ADD" or added >= len(slots) or sources != [self._total or slots[0], slots[added]]:
            return False
        self._total, self._added = node, added + 1
        return True


def _copied(address: int) -> bytes:
    """The name of the node whose copy from another device this is (DEVICE#NAME#NUMBER), b"" if it is none."""
    return b"#".join(tensor_at(address).name.split(b"#")[1:-1])
