"""A runner over HTTP: TOKEN=... python http_runner.py http://127.0.0.1:8080 AGENT...   See docs/runner.md."""

import asyncio
import os
import sys
from typing import Any

import aiohttp

URL, AGENTS, HEADERS = sys.argv[1], sys.argv[2:], {"Authorization": f"Bearer {os.environ['TOKEN']}"}
jobs: dict[str, asyncio.Task[Any]] = {}  # every one since the start, by execution_id


async def work(dispatch: dict[str, Any]) -> Any:
    """Your part: do what `message` and `payload` ask for. It is cancelled when the attempt is no longer wanted."""
    return await asyncio.sleep((dispatch.get("payload") or {}).get("work_seconds", 1), "done")


async def attend(api: aiohttp.ClientSession, dispatch: dict[str, Any], job: asyncio.Task[Any]) -> None:
    status = {name: dispatch[name] for name in ("agent_id", "conversation_id", "execution_id")} | {"status": "running"}
    while not job.done():
        await ask(api, "POST", "/api/statuses", json=status)
        status["status"] = "heartbeat"
        await asyncio.wait({job}, timeout=dispatch.get("heartbeat_seconds", 90) / 3)
    if job.cancelled():  # if it was revoked, this is ignored
        status["status"] = "stopped"
    elif error := job.exception():
        status |= {"status": "failed", "error": repr(error)}
    else:
        status |= {"status": "finished", "result": job.result()}
    await ask(api, "POST", "/api/statuses", json=status)


async def ask(api: aiohttp.ClientSession, method: str, path: str, **request: Any) -> Any:
    while True:  # the same again until it is answered; said twice it does no harm
        try:
            async with api.request(method, path, raise_for_status=True, **request) as answer:
                return await answer.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            if 400 <= getattr(error, "status", 0) < 500:
                raise  # asking again wouldn't help
            await asyncio.sleep(1)


async def main() -> None:
    after: dict[str, str] = {}  # at first none: what comes first are the attempts that run now
    async with aiohttp.ClientSession(URL, headers=HEADERS) as api, asyncio.TaskGroup() as attempts:
        while True:
            read = await ask(api, "GET", "/api/runners/dispatches", params={"agents": AGENTS, **after})
            for message in read["dispatches"]:
                execution_id, is_dispatch = message["execution_id"], message["type"] == "dispatch"
                if is_dispatch and execution_id not in jobs:  # else it has come before
                    jobs[execution_id] = job = asyncio.create_task(work(message))
                    attempts.create_task(attend(api, message, job))
                elif not is_dispatch and execution_id in jobs:  # stop_requested or revoked
                    jobs[execution_id].cancel()
            after = {"after": read["position"]}


asyncio.run(main())
