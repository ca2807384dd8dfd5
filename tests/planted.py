"""Logs with one planted violation each, of an agent and of a site: where it is, and how it may be called.

What nobody could have written with the right digests is planted as it is; what breaks a rule is planted with a chain
that fits it, so that only the rule can find it.
"""

import hashlib
import json
from typing import Final, NamedTuple

from streams import DECISIONS, SITE_DECISIONS, codec
from streams.audit.verify import Head
from tests.driving import Driven, Json


class Planted(NamedTuple):
    """``rows``: the decider's header as it is stored beside the log, by key: only with it a cut tail is known."""

    topic: str
    decider: str
    values: list[bytes]
    rows: dict[bytes, bytes]
    heads: dict[str, Head]
    offset: int | None
    kinds: tuple[str, ...]


WRITTEN: Final = ("edited record", "missing record", "reordered records", "cut tail", "cut tail of everything", "head")
OF_AGENTS: Final = ("limit", "double dispatch", "double end", "order", *WRITTEN)
OF_SITES: Final = ("folder", "pool", "double dispatch", "double end", "order", *WRITTEN)


def rechained(decisions: list[Json]) -> list[bytes]:
    """The decisions with a chain that fits them."""
    prev, values = None, []
    for decision in decisions:
        decision["prev"] = prev
        values.append(json.dumps(decision, separators=(",", ":"), ensure_ascii=False).encode())
        prev = hashlib.sha256(values[-1]).hexdigest()
    return values


def of_agent(kind: str) -> Planted:
    """Five decisions: three triggers, of which the first runs, and two ends, each of which starts the next one."""
    driven = Driven(default_limit=2 if kind == "double dispatch" else 1)
    for number in range(3):
        driven.trigger(f"t{number}")
    driven.finish("t0")
    driven.finish("t1")
    heads = {"A": Head(driven.agent().row.seq, driven.agent().row.prev)}
    about = DECISIONS.name, "A"
    if kind in WRITTEN:
        values, offset, kinds = _written(kind, list(driven.values))
        return Planted(*about, values, _headers(driven, "agent"), heads, offset, kinds)
    decisions = [json.loads(value) for value in driven.values]
    match kind:
        case "limit":
            decisions[1]["events"].append(_dispatch(decisions[0], "t1", 2, 2))
            where: tuple[int, tuple[str, ...]] = 1, ("I1",)
        case "double dispatch":  # there is room for it
            decisions[1]["events"][-1] = _dispatch(decisions[0], "t0", 2, 2) | {"attempt": 2}
            where = 1, ("I4",)
        case "double end":
            decisions[4]["events"].insert(0, decisions[3]["events"][0])
            where = 4, ("I5",)
        case _:
            decisions[3]["events"][-1].update(trigger_id="t2")
            where = 3, ("I6",)
    return Planted(*about, rechained(decisions), {}, {}, *where)


def _dispatch(of: Json, trigger_id: str, seq: int, slot: int) -> Json:
    event: Json = dict(of["events"][-1])
    prefix = event["execution_id"].partition("-")[0]
    return event | {"trigger_id": trigger_id, "execution_id": f"{prefix}-{seq}-2", "slot_number": slot}


def of_site(kind: str) -> Planted:
    """Four decisions: t1 is granted, t2 waits for its folder, t3 for its worker, and t1's end grants both."""
    driven = Driven(pool=1)
    driven.trigger("t1", "A1", worker=True, environment_id="e", folder="/a")
    driven.trigger("t2", "A2", environment_id="e", folder="/a/b")
    driven.trigger("t3", "A3", worker=True)
    driven.finish("t1", "A1")
    heads = {"default": Head(driven.site().row.seq, driven.site().row.prev)}
    about = SITE_DECISIONS.name, "default"
    written = [output.value or b"" for output in driven.outputs if output.topic == SITE_DECISIONS.name]
    if kind in WRITTEN:
        values, offset, kinds = _written(kind, written)
        return Planted(*about, values, _headers(driven, "site"), heads, offset, kinds)
    decisions = [json.loads(value) for value in written]
    grant = {"type": "claim_granted", "n": 1}
    match kind:
        case "folder":
            decisions[1]["events"].append(grant | {"agent_id": "A2", "trigger_id": "t2"})
            where: tuple[int, tuple[str, ...]] = 1, ("I2",)
        case "pool":
            decisions[2]["events"].append(grant | {"agent_id": "A3", "trigger_id": "t3"})
            where = 2, ("I3",)
        case "double dispatch":
            decisions[1].setdefault("events", []).append(grant | {"agent_id": "A1", "trigger_id": "t1"})
            where = 1, ("I4",)
        case "double end":
            decisions[3]["events"].append(decisions[3]["events"][0])
            where = 3, ("I4",)
        case _:
            decisions[3]["events"][1].update(agent_id="A3", trigger_id="t3")
            where = 3, ("I6",)
    return Planted(*about, rechained(decisions), {}, {}, *where)


def _headers(driven: Driven, kind: str) -> dict[bytes, bytes]:
    return {key: row for key, row in driven.rows.items() if codec.read_key(key)[0] == kind}


def _written(kind: str, values: list[bytes]) -> tuple[list[bytes], int | None, tuple[str, ...]]:
    match kind:
        case "edited record":
            return [values[0], _edited(values[1]), *values[2:]], 1, ("chain", "recomputed")
        case "missing record":
            return values[:1] + values[2:], 1, ("seq",)
        case "reordered records":
            return [values[0], values[2], values[1], *values[3:]], 1, ("seq",)
        case "cut tail":
            return values[:-1], None, ("tail",)
        case "cut tail of everything":
            return [], None, ("tail",)
        case _:  # the last one, which no other is chained to
            return [*values[:-1], _edited(values[-1])], len(values) - 1, ("head", "recomputed")


def _edited(value: bytes) -> bytes:
    decision = json.loads(value)
    decision["via"] = "timer"
    edited = json.dumps(decision, separators=(",", ":"), ensure_ascii=False).encode()
    assert edited != value
    return edited
