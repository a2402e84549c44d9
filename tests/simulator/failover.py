"""How long a swarm is without a leader when it loses the one it has: nothing else goes wrong."""

from __future__ import annotations

from tests.simulator.election import Parts
from tests.simulator.swarm import Swarm

LOSSES = ("crash", "stop", "cut off")
GIVE_UP_S = 10.0
POLL_S = 0.01


def time_to_replace(seed: int, size: int, parts: Parts | None = None) -> float:
    """Seconds from a leader's loss to the next one, in a backbone of `size` peers at 20 ms of round trip."""
    swarm = Swarm(seed, parts or Parts(), size, spares=0)
    world = swarm.world
    for host in swarm.hosts.values():
        world.at(0.0, host.boot)
    while not swarm.led():
        world.run(world.now + POLL_S)
    world.run(world.now + swarm.random.uniform(0.5, 3.0))
    leader, *others = swarm.leaders()
    assert not others
    loss = swarm.random.choice(LOSSES)
    if loss == "crash":
        leader.crash()
    elif loss == "stop":
        leader.stop()
    else:
        names = [name for name in swarm.hosts if name != leader.name]
        swarm.network.cut([(leader.name, name) for name in names] + [(name, leader.name) for name in names])
    lost, term = world.now, swarm.led()
    while swarm.led() <= term and world.now - lost < GIVE_UP_S:
        world.run(world.now + POLL_S)
    return world.now - lost
