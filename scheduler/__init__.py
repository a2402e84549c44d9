"""Every decision, pure: events and the current instant in, effects out. No clock, no random numbers, no I/O, no await.

The daemon and a simulator run these very objects.

sampling     one row of logits to one token, reproducibly
text_stream  bytes of tokens to text that may be shown
attempts     one request on the asker's side, across the leaders that come and go
requests     what enters and leaves the batcher
answer       one answer while it grows
steps        what is decoded together
slot_sharing a full queue makes room, and a slot is taken back, for clients that have little or none
fair_queue   whose request is next
batching     what the trunk decodes next, and what its logits mean for each request
constraint   what narrows an answer down to the language of a grammar
tool_calls   calls of tools in an answer
parking      requests that wait for an expert that nobody can compute now
audits       of live work, all peers': audit_choice draws which answers are recomputed, within a budget of time;
             audit_queue has them wait for the judge; audit_tests says what follows: the sequential tests
service_checks     how precisely workers add while they serve: whom to check when, and what that comes to
settling     when to place experts anew
placement    which peer holds which experts
placement_record   what of it a leader leaves to its successor
dispatch     which rows of a layer go to which peer, and where its answers belong
exchange     one layer under way: who takes over when a peer fails or is late
combine      the same with one sum a peer and token in place of rows: what is added to what, and in which order
liveness     which peers still answer
advert_book  who is in the swarm, by what peers say of themselves: the newest word of each, suspect, gone
advert_pace  when this node speaks of itself; own_word is its numbering, and whether somebody else uses its name
advert_findings   clocks, versions, addresses and copied identities that are wrong, by name
availability      whether a volunteer's machine is to work now
own_time, rates   a clock that leaves out this process's sleep; how often somebody may
allowance    how much of this machine's time others may have for comparisons
election     who leads, one object for each backbone peer: its parts are voter, candidacy, leadership and the
             backbone_ledger; election_roles, election_state, election_times, election_status, election_messages
             are what they share
placing      placement with replicas, hosts and speeds: its parts are placing_table, placing_repair and layer_cost;
             placement_report says what a placement risks, prediction what a newcomer would hold
term_guard   a worker's side of it: the newest certified term, which alone is obeyed
"""

from __future__ import annotations

from scheduler.answer import Vocabulary
from scheduler.batching import Batcher
from scheduler.combine import add_partials, sum_rows, weighted_sums
from scheduler.dispatch import LayerRouting, PeerRows, Plan, RowRate, check_reply, deadline_s, gather, plan
from scheduler.liveness import PING_INTERVAL_S, TICK_S, FailureDetector, PeerState, Transition
from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec, even_split
from scheduler.requests import (
    Effect,
    FailedEffect,
    FinishedEffect,
    QueuedEffect,
    Request,
    Timings,
    TokenEffect,
    Usage,
)
from scheduler.sampling import NonFiniteLogits, Sampled, SamplingParams, sample, uniform
from scheduler.settling import Decision, Present, decide
from scheduler.steps import BatcherStatistics, Step, StepPart
from scheduler.text_stream import TextDelta, TextStream, check_stops

__all__ = [
    "PING_INTERVAL_S",
    "TICK_S",
    "Batcher",
    "BatcherStatistics",
    "Decision",
    "Effect",
    "FailedEffect",
    "FailureDetector",
    "FinishedEffect",
    "LayerRouting",
    "LayerSpec",
    "NonFiniteLogits",
    "PeerRows",
    "PeerState",
    "Placement",
    "PlacementImpossible",
    "Plan",
    "Present",
    "QueuedEffect",
    "Request",
    "RowRate",
    "Sampled",
    "SamplingParams",
    "Step",
    "StepPart",
    "TextDelta",
    "TextStream",
    "Timings",
    "TokenEffect",
    "Transition",
    "Usage",
    "Vocabulary",
    "WorkerSpec",
    "add_partials",
    "check_reply",
    "check_stops",
    "deadline_s",
    "decide",
    "even_split",
    "gather",
    "plan",
    "sample",
    "sum_rows",
    "uniform",
    "weighted_sums",
]
