"""The checks of the node: its data folder, its daemon, and what the swarm says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from scheduler.advert_findings import FindingKind
from swarmnode.doctor.checks import Check, Found
from swarmnode.doctor.facts import Facts, Fault, Problem
from swarmnode.swarm.invites import duration
from swarmnode.swarm.reachability import LOCAL, scope_of

_NO_DAEMON: Final = "no daemon answers"
_NO_SWARM: Final = "this node belongs to no swarm"
_AWAY: Final = frozenset(("suspect", "gone"))


def configuration(facts: Facts) -> Found:
    return _fault(facts.node.configuration)


def identity(facts: Facts) -> Found:
    return _fault(facts.node.identity)


def daemon(facts: Facts) -> Found:
    node = facts.node
    if node.daemon == "silent":
        who = f"process {node.daemon_pid}" if node.daemon_pid else "a process"
        cause = f"a daemon ({who}) has this data folder and does not answer: {node.daemon_words}"
        return [Problem("fail", cause, "`swarmctl logs` may say why; end that process and start it again.")]
    if node.daemon == "stale":
        cause = "a daemon that died left its control socket behind"
        return [Problem("warn", cause, "`swarmctl doctor --fix` removes it; the next daemon does, too.")]
    if node.daemon == "absent":
        return [Problem("warn", "no daemon runs", "Start it: `swarmnode run`.")] if node.membership else _NO_SWARM
    return []


def record(facts: Facts) -> Found:
    return _fault(facts.node.record)


def membership(facts: Facts) -> Found:
    member = facts.node.membership
    if member is None:
        return _NO_SWARM
    if member.banned:
        mend = "Only the swarm's owner can lift that (`swarmctl ban PEER --lift`); `swarmctl leave` frees this node."
        return [Problem("fail", "the owner has banned this node from the swarm", mend)]
    if member.expired_s is not None:
        cause = f"this node's membership expired {duration(member.expired_s)} ago, by this machine's clock"
        return [Problem("fail", cause, "Check the clock; then `swarmctl leave` and join with a new invite.")]
    if member.loose_issuer:
        cause = "the peer that admitted this node has left the backbone"
        mend = "The daemon has it renewed once it reaches another backbone peer: let it run."
        return [Problem("warn", cause, mend)]
    return []


def owner_key(facts: Facts) -> Found:
    return _fault(facts.node.owner_key)


def votes(facts: Facts) -> Found:
    return [*_fault(facts.node.votes), *_findings(facts, FindingKind.NO_VOTE, only_own=True)]


def models(facts: Facts) -> Found:
    mend = "`swarmctl model remove NAME` and add it again, so that its hashes are right; or put the old file back."
    return [Problem("fail" if each.active else "warn", each.cause, mend) for each in facts.node.models]


def addresses(facts: Facts) -> Found:
    """Whether others reach this node where it says that it listens."""
    node = facts.node
    if not node.listens:
        return "node.listen is empty: this node dials out only"
    status = node.status
    if status is None:
        return _NO_DAEMON
    found = _findings(facts, FindingKind.UNREACHABLE, only_own=True)
    mend = "Open the port in the firewall, or correct node.listen. Workers need no inbound connections."
    found += [Problem("fail", f"{each} does not even answer on this machine", mend) for each in node.unanswered]
    listened = [each for each in status.get("addresses") or [] if isinstance(each, str)]
    if listened and all(scope_of(each) == LOCAL for each in listened):
        mend = "Set node.listen to an address of the network, for example /ip4/0.0.0.0/tcp/11436."
        found.append(Problem("warn", "this node listens on this machine alone", mend))
    return found


def invite(facts: Facts) -> Found:
    invitation = facts.invitation
    if invitation is None:
        return "no invite was named (--invite TOKEN)"
    found = []
    if invitation.expired_s is not None:
        cause = f"the invite to {invitation.name} expired {duration(invitation.expired_s)} ago, by this machine's clock"
        found.append(Problem("fail", cause, "Ask for a new one; if it was made just now, set this machine's clock."))
    if not invitation.reached:
        tried = "; ".join(f"{address}: {why}" for address, why in invitation.unreached.items())
        mend = "Whoever made it should run the daemon, open its port, or name an address: `swarmctl invite --address`."
        found.append(Problem("fail", f"no address in the invite to {invitation.name} answers ({tried})", mend))
    return found


def clock(facts: Facts) -> Found:
    return _of_daemon(facts, lambda: _findings(facts, FindingKind.SKEWED_CLOCK))


def duplicate_identity(facts: Facts) -> Found:
    return _of_daemon(facts, lambda: _findings(facts, FindingKind.CLONED_IDENTITY))


def versions(facts: Facts) -> Found:
    """Of swarmnode and of the wire, among peers and between daemon and command line."""

    def look() -> list[Problem]:
        found = _findings(facts, FindingKind.WIRE_VERSION)
        row, ours = _own_row(facts), facts.machine.swarmnode
        theirs = row.get("version")
        if isinstance(theirs, str) and theirs != ours:
            cause = f"the daemon is swarmnode {theirs} and this command {ours}"
            found.append(Problem("warn", cause, "Restart the daemon, so that it runs what is installed."))
        return found

    return _of_daemon(facts, look)


def precision(facts: Facts) -> Found:
    return _of_daemon(facts, lambda: _findings(facts, FindingKind.PRECISION))


def fitness(facts: Facts) -> Found:
    """What the leader thinks of this node's answers."""

    def look() -> list[Problem]:
        row = _own_row(facts)
        word, error = row.get("fitness"), _object(row.get("error"))
        if word not in ("unfit", "quarantined") and not error:
            return []
        cause = f"the leader finds this node {word}" if word in ("unfit", "quarantined") else "this node serves nothing"
        if message := error.get("message"):
            cause += f": {message}"
        mend = str(error.get("hint") or "`swarmctl peer NAME` shows the evidence; another device or driver may do.")
        return [Problem("warn" if word == "unfit" else "fail", cause, mend)]

    return _of_daemon(facts, look)


def backbone(facts: Facts) -> Found:
    """Whether enough of those who elect a leader are there."""
    member, status = facts.node.membership, facts.node.status
    if member is None:
        return _NO_SWARM
    if status is None:
        return _NO_DAEMON
    rows = {row.get("peer_id"): row for row in map(_object, status.get("peers") or [])}
    away = [p for p in member.backbone if p != member.peer and (p not in rows or rows[p].get("state") in _AWAY)]
    here = len(member.backbone) - len(away)
    if not away:
        return []
    names = ", ".join(str(rows.get(peer, {}).get("name") or peer) for peer in away)
    if here < member.quorum:
        cause = f"{here} of {len(member.backbone)} backbone peers are in reach and {member.quorum} elect a leader"
        mend = "Start those, or connect this machine to them; nobody leads before."
        return [Problem("fail", f"{cause}; away: {names}", mend)]
    return [Problem("warn", f"away from the backbone: {names}", "Start them: one more loss may leave no majority.")]


def ready(facts: Facts) -> Found:
    status = facts.node.status
    if facts.node.membership is None:
        return _NO_SWARM
    if status is None:
        return _NO_DAEMON
    if status.get("ready") is True:
        return []
    prefix = "the swarm is not ready: "  # the leader's own reasons begin so
    reason = str(status.get("reason")).removeprefix(prefix)
    return [Problem("warn", prefix + reason, "`swarmctl status` shows what it lacks.")]


# -- what they share ---------------------------------------------------------------------------------------------------


def _fault(fault: Fault | None) -> list[Problem]:
    return [] if fault is None else [Problem("fail", fault.cause, fault.mend)]


def _of_daemon(facts: Facts, look: Callable[[], list[Problem]]) -> Found:
    return _NO_DAEMON if facts.node.status is None else look()


def _findings(facts: Facts, kind: FindingKind, *, only_own: bool = False) -> list[Problem]:
    return list(_of_kind(facts, kind, only_own))


def _of_kind(facts: Facts, kind: FindingKind, only_own: bool) -> Iterator[Problem]:
    """The daemon's findings: this node's own as failures, others' as warnings, or left out."""
    status = facts.node.status or {}
    names = {row.get("peer_id"): row.get("name") for row in map(_object, status.get("peers") or [])}
    for finding in map(_object, status.get("findings") or []):
        peer = finding.get("peer")
        own = peer == status.get("self")
        if finding.get("kind") != kind or (only_own and not own):
            continue
        who = "this node" if own else f"{names.get(peer) or peer}" if peer else "some peer"
        state: Any = "fail" if own else "warn"
        yield Problem(state, f"{who}: {finding.get('message')}", str(finding.get("hint") or ""))


def _own_row(facts: Facts) -> Mapping[str, Any]:
    status = facts.node.status or {}
    rows = [row for row in map(_object, status.get("peers") or []) if row.get("peer_id") == status.get("self")]
    return rows[0] if rows else {}


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


NODE_CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("configuration", configuration),
    ("identity", identity),
    ("daemon", daemon),
    ("record", record),
    ("membership", membership),
    ("owner_key", owner_key),
    ("votes", votes),
    ("models", models),
    ("addresses", addresses),
    ("invite", invite),
    ("clock", clock),
    ("duplicate_identity", duplicate_identity),
    ("versions", versions),
    ("precision", precision),
    ("fitness", fitness),
    ("backbone", backbone),
    ("ready", ready),
)
