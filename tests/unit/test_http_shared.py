"""Work that is shared: nobody gets a result that was begun before they asked, and little is done twice."""

import asyncio

import pytest

from api.http.database import Shared


async def test_whoever_asks_gets_what_began_after_they_asked_and_many_share_it() -> None:
    begun: list[int] = []
    may_end = asyncio.Semaphore(0)

    async def work() -> int:
        begun.append(len(begun))
        await may_end.acquire()
        return begun[-1]

    shared: Shared[int] = Shared(work)
    first = asyncio.create_task(shared.result())
    while not begun:
        await asyncio.sleep(0)
    later = [asyncio.create_task(shared.result()) for _ in range(50)]
    await asyncio.sleep(0)
    assert begun == [0]
    may_end.release()
    may_end.release()
    assert await first == 0
    assert await asyncio.gather(*later) == [1] * 50
    assert begun == [0, 1]


async def test_a_failure_reaches_all_who_asked_and_the_next_tries_again() -> None:
    outcomes = [ConnectionError("away"), None]

    async def work() -> str:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return "there"

    shared: Shared[str] = Shared(work)
    failed = await asyncio.gather(*(shared.result() for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in failed] == ["away"] * 3
    assert await shared.result() == "there"


async def test_who_gives_up_takes_it_from_nobody() -> None:
    may_end = asyncio.Event()

    async def work() -> str:
        await may_end.wait()
        return "there"

    shared: Shared[str] = Shared(work)
    impatient, patient = asyncio.create_task(shared.result()), asyncio.create_task(shared.result())
    await asyncio.sleep(0)
    impatient.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    assert await patient == "there"
