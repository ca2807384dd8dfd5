"""Berth decides who may start: the stream processor and its vocabulary.

Words, used alike in code, topics, SQL, HTTP and docs (admission rules are numbered A1..G5 in docs/concepts.md):

agent         who does the work; owns a parallelism limit and a queue.
conversation  a thread of work of one agent: (agent_id, conversation_id).
trigger       one request for a turn: (agent_id, trigger_id).
attempt       one execution of a trigger, known by its execution_id (a fencing token).
slot          one of the agent's places, held by an attempt from its dispatch until it ends.
site          a place where work runs: a shared worker pool and environments with folders.
runner        the program that executes attempts: reads dispatches, writes statuses.
decision      one handled command with its events, or its refusal, or why it was ignored.
partition     partition n of every topic, its state and its single writer.

States of a trigger::

                  +--------- failed, retryable, or lease expired -----------+
                  v                                                         |
    accepted -> waiting -----------------> running -+-> finished            |
                  |  ^                       | | |  +-> failed (no more)    |
                  |  +--- resumed -- paused <+ | +--------------------------+
                  |                    |       +-> stopped (after stop_requested)
                  +-> stopped, expired +-> finished (replied), stopped

    refused at once: no trigger, no queue entry, only a decision in the log.
    finished, failed, stopped and expired are final and never change.
"""

from dataclasses import dataclass
from typing import Literal

APPLICATION_ID = "berth"
"""Name of the Faust app and its consumer group; transactional ids are ``berth-{partition}``."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One Kafka topic that Berth owns; every one has the same number of partitions."""

    name: str
    key: Literal["agent_id", "site", "worker_id", "original key", "row key"]
    cleanup: Literal["delete", "compact", "kept for ever"]
    retention_days: int | None
    writers: tuple[Literal["upstream", "runner", "api", "processor"], ...]


TRIGGERS = Topic("berth.triggers", "agent_id", "delete", 7, ("upstream", "api", "processor"))
STATUSES = Topic("berth.statuses", "agent_id", "delete", 7, ("runner", "api", "processor"))
CONTROLS = Topic("berth.controls", "agent_id", "delete", 30, ("api", "processor"))
SITE_CONTROLS = Topic("berth.site-controls", "site", "delete", 30, ("api", "processor"))
CLAIMS = Topic("berth.claims", "site", "delete", 7, ("processor",))
SIGNALS = Topic("berth.signals", "agent_id", "delete", 7, ("processor",))
DISPATCHES = Topic("berth.dispatches", "agent_id", "delete", 7, ("processor",))
DECISIONS = Topic("berth.decisions", "agent_id", "kept for ever", None, ("processor",))
SITE_DECISIONS = Topic("berth.site-decisions", "site", "kept for ever", None, ("processor",))
TEXTS = Topic("berth.texts", "agent_id", "delete", 30, ("processor",))
WORKERS = Topic("berth.workers", "worker_id", "compact", None, ("processor",))
DEAD_LETTERS = Topic("berth.dead-letters", "original key", "delete", 30, ("processor",))
CHANGELOG = Topic("berth-state-changelog", "row key", "compact", None, ("processor",))

TOPICS: tuple[Topic, ...] = (
    TRIGGERS,
    STATUSES,
    CONTROLS,
    SITE_CONTROLS,
    CLAIMS,
    SIGNALS,
    DISPATCHES,
    DECISIONS,
    SITE_DECISIONS,
    TEXTS,
    WORKERS,
    DEAD_LETTERS,
    CHANGELOG,
)
INPUT_TOPICS: tuple[Topic, ...] = (TRIGGERS, STATUSES, CONTROLS, SITE_CONTROLS, CLAIMS, SIGNALS)
"""What the processor reads; partition n of each belongs to the same owner."""
