"""Tokens of the tests: a secret of this run, and headers of whoever a test wants to be."""

import json
import secrets
import time
from typing import Any

import jwt

from api.http.auth import EVERY_AGENT, Authentication, Role

SECRET = secrets.token_urlsafe(48)
AUTHENTICATION = Authentication("HS256", SECRET.encode(), "berth", b"k" * 32)
TESTER = "tester"


def bearer(role: Role = "admin", subject: str = TESTER, agents: tuple[str, ...] = (EVERY_AGENT,)) -> dict[str, str]:
    """The header of a token for an hour; without arguments that of an admin for every agent."""
    return {"Authorization": f"Bearer {AUTHENTICATION.issue(subject, role, agents, 1)}"}


def claims(**changes: Any) -> dict[str, Any]:
    """The claims of a token that is taken; a change to None leaves one out."""
    now = int(time.time())
    usual = {"iss": "berth", "aud": "berth", "sub": "ann", "role": "person", "agents": ["a"], "iat": now}
    return {name: value for name, value in {**usual, "exp": now + 600, **changes}.items() if value is not None}


def signed(content: dict[str, Any], key: Any = SECRET, algorithm: str = "HS256", **headers: Any) -> str:
    """A token of any claims, also of such that can't be."""
    return jwt.api_jws.encode(json.dumps(content).encode(), key, algorithm, headers=headers or None)
