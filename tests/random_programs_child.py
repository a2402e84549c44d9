"""A child that runs random programs on ggml and in NumPy. It ends early where ggml aborts over one of them."""

from __future__ import annotations

import sys

import numpy as np

from backends.device import Device
from backends.experts import GgmlExperts
from backends.numpy_reference import NumpyExperts
from backends.program import GLU, OPERATORS, UNARY, ExpertProgram, Node
from capabilities.agreement import compare
from capabilities.errors import PeerMistake, UnsupportedModel
from tests.expert_models import made_up_layer

WIDTH = 32
N_EXPERT = 4
# Jumps turn the last bit of their argument into all of their value: no agreement can be asked for.
SMOOTH = sorted(UNARY - {"SGN", "STEP", "EXP"})


def random_node(random: np.random.Generator, index: int) -> Node:
    op = str(random.choice(sorted(OPERATORS.keys() - {"x"})))
    low, high, _ = OPERATORS[op]
    # Late nodes first: programs become deep rather than broad.
    inputs = tuple(
        index - 1 - int(i) for i in np.minimum(random.geometric(0.5, random.integers(low, high + 1)) - 1, index - 1)
    )
    weights = ["ffn_up_exps.weight", "ffn_gate_up_exps.weight", "ffn_down_exps.weight"]
    name = {
        "mul_mat_id": str(random.choice(weights)),
        "add_id": str(random.choice(["ffn_up_exps.bias", "ffn_gate_up_exps.bias"])),
        "expert_scale": "ffn_up_exps.scale",
        "unary": str(random.choice(SMOOTH)),
        "glu": str(random.choice(sorted(GLU))),
    }.get(op, "")
    parameters: dict[str, tuple[float, ...]] = {
        "mul_mat_id": (float(random.choice([0, 10])), float(random.choice([0, 10]))),
        "half": (float(random.integers(2)),),
        "glu": (float(random.integers(2)) if len(inputs) == 1 else 0.0, 1.5, 2.0),
        "clamp": (-1.0, 0.5),
        "scale": (0.5, float(random.integers(2))),
    }
    return Node(op, inputs, name, parameters.get(op, ()))


def random_program(random: np.random.Generator) -> ExpertProgram:
    nodes = (random_node(random, index) for index in range(1, int(random.integers(2, 9))))
    return ExpertProgram((Node("x"), *nodes))


def main(count: int) -> None:
    random = np.random.default_rng(7)
    tensors = {
        "ffn_down_exps.weight": random.standard_normal((N_EXPERT, WIDTH, WIDTH)) / 6,
        "ffn_gate_up_exps.bias": random.standard_normal((N_EXPERT, 2 * WIDTH)),
        "ffn_gate_up_exps.weight": random.standard_normal((N_EXPERT, 2 * WIDTH, WIDTH)) / 6,
        "ffn_up_exps.bias": random.standard_normal((N_EXPERT, WIDTH)),
        "ffn_up_exps.scale": random.standard_normal(N_EXPERT),
        "ffn_up_exps.weight": random.standard_normal((N_EXPERT, WIDTH, WIDTH)) / 6,
    }
    layer, read = made_up_layer({name: values.astype(np.float32) for name, values in tensors.items()}, WIDTH, WIDTH)
    kernels, oracle = GgmlExperts(Device("CPU")), NumpyExperts("float64", quantize_activations=True)
    x = random.standard_normal((5, WIDTH), dtype=np.float32)
    tokens, experts = np.array([0, 4, 4, 2, 0, 1], np.int32), np.array([3, 0, 1, 1, 2, 0], np.int32)
    one_token = x[:1], np.zeros(3, np.int32), np.array([2, 0, 3], np.int32)
    agreed, used = 0, set()
    while agreed < count:
        program = random_program(random)
        try:
            program = ExpertProgram.from_bytes(program.to_bytes())
            kernels.load_layer(layer, program, range(N_EXPERT), read)
        except (PeerMistake, UnsupportedModel):
            continue
        oracle.load_layer(layer, program, range(N_EXPERT), read)
        for rows in ((x, tokens, experts), one_token):
            expected = oracle.compute(0, *rows)
            if np.isfinite(expected).all() and np.abs(expected).max() < 1e4:
                difference = compare(kernels.compute(0, *rows), expected)
                assert difference.worst_relative_l2 < 2e-3, (difference, program)
        agreed += 1
        used |= {node.op for node in program.nodes}
    assert used == OPERATORS.keys()
    print(f"{agreed} programs agree")


if __name__ == "__main__":
    main(int(sys.argv[1]))
