"""Writes swarmnode/schemas/*.json from the tables of docs/status.md: `python -m tests.make_schemas`.

The tables name every key and say what it means; what type a key has follows from its name, its meaning, or the list of
exceptions here. tests/test_schemas.py holds the files against the tables, and real answers against the files.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from tests.documents import ROOT, rows, section

FOLDER: Final = ROOT / "swarmnode" / "schemas"

TABLES: Final = {
    "status": ("`swarmctl status --json`", 0),
    "peer show": ("`swarmctl peer --json`", 0),
    "audit show": ("`swarmctl audit`", 0),
    "audit experiment": ("`swarmctl audit`", 1),
    "placement": ("`swarmctl placement --json`", 0),
    "top": ("`swarmctl top --json`", 0),
    "ask": ("`swarmctl ask --json`", 0),
    "requests": ("`swarmctl requests --json`", 0),
    "verify": ("`swarmctl verify --json`", 0),
    "model check": ("`swarmctl model`", 0),
    "model show": ("`swarmctl model`", 1),
    "equivalence": ("`swarmctl equivalence --json`", 0),
    "kernels list": ("`swarmctl kernels`", 0),
    "kernels compare": ("`swarmctl kernels`", 1),
    "kernels swarm": ("`swarmctl kernels`", 2),
    "service status": ("`swarmctl service --json`", 0),
    "bench": ("`swarmctl bench --json`", 0),
    "doctor": ("`swarmctl doctor --json`", 0),
    "predict": ("`swarmctl predict --json`", 0),
    "demo": ("`swarmctl demo --json`", 0),
}
"""Command: the section of docs/status.md, and which of its tables."""

OTHERS: Final = "The other commands"
ALIASES: Final = {
    "chat": "ask", "model add": "model show", "kernels build": "kernels list", "service install": "service status"
}  # fmt: skip

BOOLEANS: Final = frozenset((
    "ready", "ok", "pass", "healthy", "fast", "kept", "identical", "supported", "bit_identical", "batch_invariant",
    "repeatable", "active", "daemon", "banned", "draining", "mixed_classes", "tokens_identical", "installed", "enabled",
    "built", "verified", "accumulates_f32", "revoked", "battery", "metered", "bit_identical_to_leader",
    "prefill_bit_identical", "decode_bit_identical", "survives_logout", "tainted",
))  # fmt: skip
NUMBERS: Final = re.compile(
    r".*(_s|_ms|_per_s|ratio|_l2|l2|_diff|cosine|kl_mean|kl_max|l_infinity|perplexity\w*|nll_difference|_error|load"
    r"|agreement|exponent|_changed|predicted|slowdown|tolerance\.\w+|to_exact\.\w|to_rounded\.\w|limit|per_token|out|back"
    r"|l2_median|l2_max|_ago|quantiles|edges)"
)
INTEGERS: Final = re.compile(
    r".*(bytes|count|counts|experts|layers?|term|epoch|tokens|copies|running|waiting|accepted|finished|failed|cancelled"
    r"|streams_\w+|connections_\w+|handshakes_\w+|peer_mistakes|handler_errors|junk_connections|hellos_refused|dispatches"
    r"|rows|refused|computed|pid|seed|workers|rounds|threads_per_process|experts_used|mixed|context_length|moe_layers"
    r"|min_copies|experts_held|held|expert|flips\w*|positions\w*|prompts|choices|token|length|first_layer|flipped|wire"
    r"|audits_\w+|sequence|keep|restarts|uses|used|expires_at_s|issued_at_s|at_s|version_number|quorum|rotation"
    r"|released|forgotten|new|forks\w*|first_differences|first_difference|\w*_tokens|last_at_s|identical_answers)"
)
AUDIT_COUNTS: Final = (
    "agreed", "differed", "self_differed", "answers", "answered", "audited", "dropped", "repeated", "rows",
    "rows_recomputed",
)  # fmt: skip
EXACT: Final[dict[str, Any]] = {
    "peers[].error": "object?", "error": "object?", "checks[].cause": "string?", "fault": "string?", "seed": "integer",
    "tokens[]": "integer", "undivided_tokens[]": "integer", "answer": "object", "status": "object",
    "foretold": "object?", "swarm.first_difference": "object?", "undivided.first_difference": "object?",
    "first_difference": "integer?", "peers[].http": "any", "token": "string", "members[]": "any",
    "members[].vote_file": "string", "invite": "object", "invites[]": "object", "kernels[].missing": "any",
    "built[]": "string", "used": "string", "seconds": "number", "running": "integer?", "waiting": "integer?",
    "requests.running": "integer", "requests.waiting": "integer", "model.coverage.min_copies": "integer",
    "logprobs[].logprob": "number", "logprobs[].top[].logprob": "number",
    "peers[].dispatches_per_s": "number?", "requests[].mixed_classes": "boolean?",
    "requests[].completion_tokens": "integer?", "swarm.token_hash": "string?", "swarm.reason": "string?",
    "undivided.token_hash": "string?", "undivided.reason": "string?", "undivided.completion_tokens": "integer?",
    "without.token_ms_before": "number", "without.token_ms_after": "number?",
    "requests[].asked_at": "number", "asked_at": "number",
    "without.bytes_to_move": "integer?", "without.peer_id": "string",
    "placement: mixed_classes": "integer", "layers_ms_now": "number?", "predicted.tokens_per_s_max": "number?",
    "offer.accumulates_f32": "boolean", "bytes_per_token_per_layer.out": "number",
    "backbone list: version": "integer", "backbone add: version": "integer", "backbone remove: version": "integer",
    "leave: owner_key": "string?", "invite: uses": "integer",
    "peer show: experts.proven": "integer?", "peer show: fitness": "string?", "peer show: version": "string?",
    "peer show: state": "string?", "peer show: dispatches": "integer?", "peer show: memory.used_bytes": "integer?",
    "peer show: memory.budget_bytes": "integer?", "peer show: bit_identical_to_leader": "boolean?",
    "verdict.evidence[].limit": "number", "verdict.evidence[].at_s": "integer",
    "model check: experts": "integer?", "model check: experts_used": "integer?", "model check: workers": "integer?",
    "model check: bit_identical": "boolean?", "model check: prefill_bit_identical": "boolean?",
    "model check: decode_bit_identical": "boolean?", "model check: reason": "string?",
    "levels[].level": "string", "levels[].noise_floor": "any", "levels[].skipped[]": "any",
    "levels[].widths[]": "integer", "levels[].references_apart": "number?", "levels[].ops[].worst_width": "integer",
    "levels[].ops[].references_apart": "number", "levels[].first_beyond_limit": "integer?",
    "levels[].first_difference_counts[]": "integer",
    "levels[].identical": "integer", "levels[].tokens": "integer", "levels[].positions": "integer",
    "levels[].ops[].length": "integer", "levels[].ops[].alone.a": "boolean?", "levels[].ops[].alone.b": "boolean?",
    "levels[].tolerance.relative_l2[]": "number", "levels[].pinned.relative_l2[]": "number",
    "levels[].pinned.l2[]": "number", "levels[].free.relative_l2[]": "number", "levels[].free.l2[]": "number",
    "levels[].free.first_layer": "integer?", "levels[].margin_quantiles[]": "number",
    "levels[].margin_histogram.edges[]": "number", "levels[].routing.first.experts_a[]": "integer",
    "levels[].routing.first.experts_b[]": "integer", "levels[].choices.questions": "integer",
    "levels[].choices.accuracy_a": "number", "levels[].choices.accuracy_b": "number",
    "levels[].choices.changed": "number?", "levels[].choices.spread": "number?",
    "equivalence: experts.a": "object?", "equivalence: experts.b": "object?", "levels[].tolerance.flips": "number",
    "levels[].ops[].causes[]": "string", "levels[].ops[].left": "number?",
    "levels[].ops[].nearest.a.left": "number?", "levels[].ops[].nearest.b.left": "number?",
    "levels[].ops[].nearest.b.setting": "string?", "levels[].divergence.first.layer": "integer",
    "levels[].divergence.first.peer_b": "string?", "levels[].divergence.worst.peer_b": "string?",
    "workers[].fitness": "string?", "workers[].bit_identical_to_leader": "boolean?", "workers[].error": "object?",
    "workers[].numeric_class": "string?", "workers[].dispatches": "integer?",
    "requests.tainted": "integer", "requests[].tainted": "boolean?", "model.audits.overhead": "number",
    "self_differed": "integer?",
    "peers[].audits.share": "number", "peer show: audits.share": "number", **dict.fromkeys(
        (f"{where}audits.{count}" for where in ("peers[].", "model.", "peer show: ") for count in AUDIT_COUNTS),
        "integer",
    ),
    "levels[].tolerance.forks": "number", "levels[].tolerance.text": "string",
    "levels[].tolerance.limits[].widths[]": "integer", "levels[].ops[].limit_share": "number",
    "levels[].tolerance.changed_beside_noise": "integer", "peers[].numeric_class": "string?",
    "audit show: peers[].audits": "object?", "audit show: peers[].verdict": "object?",
    "cheats[].every": "integer", "cheats[].trials": "integer", "cheats[].missed": "integer",
    "cheats[].missed_bound": "number?", "cheats[].late": "integer?", "cheats[].suspected.p50": "integer?",
    "cheats[].suspected.p99": "integer?", "cheats[].suspected.max": "integer?", "cheats[].out.p50": "integer?",
    "cheats[].out.p99": "integer?", "cheats[].out.max": "integer?", "honest[].audits": "integer",
    "honest[].minutes": "number",
    "honest[].restarts": "integer", "honest[].quarantined": "integer", "honest[].quarantined_bound": "number?",
    "honest[].suspected": "integer", "honest[].unfit": "integer", "honest[].wrong_audits": "integer",
    "honest[].wrong_audits_bound": "number?", "honest[].rows.same": "integer", "honest[].rows.within": "integer",
    "honest[].rows.coarse": "integer", "honest[].rows.wrong": "integer",
}  # fmt: skip
NULL_OBJECTS: Final = frozenset(
    ("network", "without", "measured", "levels[].routing.first", "memory", "undivided", "swarm", "peers[].audits",
     "audits", "levels[].divergence.first", "levels[].divergence.worst", "levels[].tolerance")
)
"""Objects that may be null, where no row of their own says so."""


def tables(heading: str) -> list[list[tuple[str, str]]]:
    """(key, meaning) of each table in a section whose first column holds keys."""
    found: list[list[tuple[str, str]]] = []
    for cells in rows(section("status.md", heading)):
        if cells[0] == "key":
            found.append([])
        elif cells[0] in ("check", "command"):
            break
        elif found and (code := re.fullmatch(r"`([^`]+)`", cells[0])):
            found[-1].append((code[1], cells[1] if len(cells) > 1 else ""))
    return found


def schema_of(command: str, keys: list[tuple[str, str]]) -> dict[str, Any]:
    """A JSON Schema of an object with these keys (paths: `peers[].state`). Other keys are allowed."""
    root: dict[str, Any] = {"type": "object", "properties": {}}
    for path, meaning in keys:
        if any(other.startswith(f"{path}.") for other, _ in keys):
            _put_object(root, path, meaning)
        else:
            _put(root, path, meaning, _kind(command, path, meaning))
    return root


def _put_object(root: dict[str, Any], path: str, meaning: str) -> None:
    """An object with a row of its own, besides those of its keys."""
    at = root
    for part in path.split("."):
        at = at.setdefault("properties", {}).setdefault(part.removesuffix("[]"), {})
        if part.endswith("[]"):
            at.setdefault("type", "array")
            at = at.setdefault("items", {"type": "object"})
    at["properties"] = {}
    at["type"] = ["object", "null"] if "null" in meaning else "object"
    at["description"] = _plain(meaning)


def _put(root: dict[str, Any], path: str, meaning: str, leaf: dict[str, Any]) -> None:
    at, walked = root, ""
    parts = path.split(".")
    for index, part in enumerate(parts):
        name, is_list = part.removesuffix("[]"), part.endswith("[]")
        walked = f"{walked}.{part}" if walked else part
        last = index == len(parts) - 1
        known = at["properties"].setdefault(name, {})
        if last and not is_list:
            at["properties"][name] = {**leaf, **known}
            if meaning:
                at["properties"][name].setdefault("description", _plain(meaning))
            return
        if is_list:
            known.setdefault("type", "array")
            if last:
                known.setdefault("items", leaf)
                if meaning:
                    known.setdefault("description", _plain(meaning))
                return
            known = known.setdefault("items", {})
        _make_object(known, walked)
        at = known


def _make_object(schema: dict[str, Any], path: str) -> None:
    if "object" not in schema.get("type", ()):
        schema["type"] = ["object", "null"] if path in NULL_OBJECTS else "object"
    schema.setdefault("properties", {})


def _kind(command: str, path: str, meaning: str) -> dict[str, Any]:
    kind = EXACT.get(f"{command}: {path}") or EXACT.get(path) or _guess(path, meaning)
    if kind == "any":
        return {}
    name = kind.removesuffix("?")
    if path.endswith("[]"):
        return {"type": name}
    if kind.endswith("?") or "null" in meaning or "likewise" in meaning:
        return {"type": [name, "null"]}
    return {"type": name}


def _guess(path: str, meaning: str) -> str:
    name = path.removesuffix("[]").rsplit(".", 1)[-1]
    if name in BOOLEANS or meaning.startswith("whether "):
        return "boolean"
    if name.endswith("_at_s") or (INTEGERS.fullmatch(name) and not NUMBERS.fullmatch(name)):
        return "integer"
    if NUMBERS.fullmatch(path):
        return "number?"
    return "integer" if INTEGERS.fullmatch(name) else "string"


def _plain(meaning: str) -> str:
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", meaning).replace("`", "")


def small() -> dict[str, list[tuple[str, str]]]:
    """The commands that have a row in place of a table: its second column names their keys."""
    found = {}
    for cells in rows(section("status.md", OTHERS)):
        if code := re.fullmatch(r"`swarmctl ([a-z ]+)`", cells[0]):
            found[code[1]] = [(key, "") for key in re.findall(r"`([^`]+)`", cells[1])]
    return found


def schemas() -> dict[str, dict[str, Any]]:
    """Of the result of every command, by its name."""
    made = {name: schema_of(name, tables(heading)[number]) for name, (heading, number) in TABLES.items()}
    made["verify"] = _merged(made["verify"], made["requests"]["properties"]["requests"]["items"])
    made |= {name: schema_of(name, keys) for name, keys in small().items()}
    made["model list"] = {"type": "object", "properties": {"models": {"type": "array", "items": made["model show"]}}}
    made |= {name: made[same] for name, same in ALIASES.items()}
    return made


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {**second["properties"], **first["properties"]}}


def text_of(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    made = schemas()
    for old in FOLDER.glob("*.json"):
        if old.stem.replace("-", " ") not in made:
            old.unlink()
    for name, schema in made.items():
        (FOLDER / f"{name.replace(' ', '-')}.json").write_text(text_of(schema))


if __name__ == "__main__":
    main()
