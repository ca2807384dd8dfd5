"""What is stored of the causes for which triggers of an agent wait: a bounded number of queries, however many they are.

The triggers' own rows are read before; what they lead to (folders, gates, sites) is read here, all of it at once.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from api.http.database import Reading
from api.http.waiting import Facts, Row, site_of, stored_trigger
from streams.audit.causes import GateId, PlaceId, gates_of, place_of
from streams.rules.limits import HOLDERS_MAX, PARALLELISM_LIMIT_MAX

_RESERVATIONS_MAX: Final = HOLDERS_MAX
assert _RESERVATIONS_MAX >= PARALLELISM_LIMIT_MAX, "as many as fill an agent are known"
Key = TypeVar("Key", bound=Hashable)


async def read_facts(reading: Reading, agent: Row, triggers: Sequence[Row]) -> Facts:
    """The facts of these waiting triggers of the agent, from one state of the database.

    Of a single one also whether it is in a cycle of dependencies.
    """
    of_agent = {"agent_id": agent["agent_id"]}
    holders: dict[str, object] = {"max_rows": HOLDERS_MAX}
    sites = sorted({site for trigger in triggers if (site := site_of(trigger)) is not None})
    waiting = [stored_trigger(row) for row in triggers]
    places = list(dict.fromkeys(place for trigger in waiting if (place := place_of(trigger)) is not None))
    gates = list(dict.fromkeys(gate for trigger in waiting for gate in gates_of(trigger)))
    blocked = [row["trigger_id"] for row in triggers if row["dependencies"] and row["place_number"] is None]
    queries: dict[str, Mapping[str, object]] = {}
    if agent["max_parallel"] is not None and triggers:
        queries["slot_holders"] = of_agent | holders
    if agent["asking"] or agent["held"]:
        queries["reservations"] = {**of_agent, "max_rows": _RESERVATIONS_MAX}
    if blocked:
        queries["unmet_dependencies"] = {**of_agent, "trigger_ids": blocked}
    if sites:
        queries["sites_by_id"] = {"sites": sites}
        queries["sites_not_answering"] = of_agent
        queries["site_claims_of_triggers"] = of_agent | _claims_of(triggers)
        queries["worker_holders"] = {**holders, "sites": _with_workers(triggers)}
    if gates:
        queries["gates_by_key"] = _lists(gates, "sites", "scopes", "names")
    if places:
        wanted = holders | _of_places(places)
        queries["folder_holders"] = queries["folder_blockers"] = wanted
        queries["deletions_by_path"] = _of_places(dict.fromkeys(one for place in places for one in place.covering))
    found: Mapping[str, Sequence[Row]] = defaultdict(list, await reading.together(**queries) if queries else {})
    in_cycles: frozenset[str] = frozenset()
    if len(triggers) == 1 and any(row["outcome"] is None for row in found["unmet_dependencies"]):
        names = ("agent_id", "trigger_id", "conversation_id")
        if await reading.value("is_in_dependency_cycle", **{name: triggers[0][name] for name in names}):
            in_cycles = frozenset((triggers[0]["trigger_id"],))
    return Facts(
        agent=agent,
        in_cycles=in_cycles,
        slot_rows=found["slot_holders"],
        reservation_rows=found["reservations"],
        not_answering={row["site"]: row for row in found["sites_not_answering"]},
        dependencies=_grouped(found["unmet_dependencies"], lambda row: row["trigger_id"]),
        sites={row["site"]: row for row in found["sites_by_id"]},
        gates={GateId(row["site"], row["scope"], row["name"]): row for row in found["gates_by_key"]},
        claims={(row["site"], row["trigger_id"]): row for row in found["site_claims_of_triggers"]},
        deletions={_place(row, "path"): row["deleted_at"] for row in found["deletions_by_path"]},
        worker_rows=_grouped(found["worker_holders"], lambda row: row["site"]),
        folder_rows=_grouped(found["folder_holders"], lambda row: _place(row, "wanted_path")),
        blocker_rows=_grouped(found["folder_blockers"], lambda row: _place(row, "wanted_path")),
    )


def _with_workers(triggers: Iterable[Row]) -> list[str]:
    return sorted({site for trigger in triggers if trigger["worker"] and (site := site_of(trigger)) is not None})


def _claims_of(triggers: Iterable[Row]) -> dict[str, object]:
    asked = [(site, trigger["trigger_id"]) for trigger in triggers if (site := site_of(trigger)) is not None]
    return _lists(asked, "sites", "trigger_ids")


def _of_places(places: Iterable[PlaceId]) -> dict[str, object]:
    return _lists(list(places), "sites", "environment_ids", "paths")


def _lists(keys: Sequence[tuple[Any, ...]], *names: str) -> dict[str, object]:
    """The n-th parts of all keys by name, as a query takes them."""
    return {name: [key[index] for key in keys] for index, name in enumerate(names)}


def _place(row: Row, path: str) -> PlaceId:
    return PlaceId(row["site"], row["environment_id"], row[path])


def _grouped(rows: Iterable[Row], key_of: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    found: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        found[key_of(row)].append(row)
    return dict(found)
