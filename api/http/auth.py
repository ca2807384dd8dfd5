"""Who asks: bearer tokens (JWT), and the links by which people without a token talk to one agent.

A token is taken only with the one algorithm that is configured: HS256 with a secret, or RS256 or EdDSA with a public
key, whatever its header says. ``exp``, ``sub``, ``aud`` and ``iss`` are required; it may live a day, or 30 days when a
program carries it. There is no default key: a service without one doesn't start.

==========  ==================================================================================================
``sub``     who asks: the requester in the log, and part of the ids that are made of an Idempotency-Key
``role``    person, admin, agent, runner, upstream or system; what each may do is in ``rights.py``
``agents``  the ids of the agents that it may see and use, or ``["*"]``; absent: none
==========  ==================================================================================================

A public link is a token of its own kind: another key and another audience, so that neither is ever taken for the
other, for one agent, until a time that the owner of the agent chose. Nothing of it is stored. All links end at once
when ``BERTH_LINK_SECRET`` changes.
"""

import hashlib
import hmac
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from pydantic import BaseModel, ConfigDict, Field, StrictInt, TypeAdapter, ValidationError

from streams.rules.messages import Id
from streams.settings import Settings, SettingsRefused

Role = Literal["person", "admin", "agent", "runner", "upstream", "system"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
EVERY_AGENT: Final = "*"

AUDIENCE: Final = "berth"
LINK_AUDIENCE: Final = "berth-public-link"
TOKEN_BYTES_MAX: Final = 32 * 1024
SKEW_SECONDS: Final = 30
"""By how much the clock of who makes tokens may be ahead of ours. A token never lives on after its ``exp``."""
HOUR_SECONDS: Final = 3_600
LIFETIME_HOURS_MAX: Final = 24
PROGRAM_LIFETIME_HOURS_MAX: Final = 30 * 24
LINK_HOURS_MAX: Final = 30 * 24
RSA_BITS_MIN: Final = 2_048
_PROGRAMS: Final = ("runner", "upstream", "system")


class Unauthenticated(Exception):  # noqa: N818 - it reads as what it is
    """Nobody knows who asks. ``code``: token_required, token_expired or token_refused."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class LinksOff(Exception):  # noqa: N818 - it reads as what it is
    """This deployment has no key for public links."""


def lifetime_hours_max(role: Role) -> int:
    """How long a token of this role may live."""
    return PROGRAM_LIFETIME_HOURS_MAX if role in _PROGRAMS else LIFETIME_HOURS_MAX


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. ``agents``: those that it may see and use, None: all. ``expires_at_seconds``: epoch."""

    subject: str
    role: Role
    agents: frozenset[str] | None
    expires_at_seconds: float

    @property
    def visible(self) -> list[str] | None:
        """The agents that lists may show, in the form that the queries take: None is all."""
        return None if self.agents is None else sorted(self.agents)

    def may_use(self, agent_id: str) -> bool:
        return self.agents is None or agent_id in self.agents


@dataclass(frozen=True, slots=True)
class Link:
    """A public link to an agent. ``id``: names it in the log."""

    id: str
    agent_id: str


Instant = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
"""RFC 7519's NumericDate: seconds of the epoch."""


class _Claims(BaseModel):
    model_config = ConfigDict(frozen=True)

    sub: Id
    role: Role
    agents: list[Id] = []
    exp: Instant
    iat: Instant | None = None
    nbf: Instant | None = None


class _LinkClaims(BaseModel):
    model_config = ConfigDict(frozen=True)

    jti: Annotated[str, Field(min_length=1, max_length=100)]
    agent: Id
    exp: StrictInt


class Authentication:
    """The keys of one deployment: takes tokens and links, and makes them when it has the secret to."""

    def __init__(
        self, algorithm: Literal["HS256", "RS256", "EdDSA"], key: Any, issuer: str, link_key: bytes | None
    ) -> None:
        """``key``: bytes of the secret, or a public key; ``link_key``: signs links, None: there are none."""
        self.algorithm = algorithm
        self._key = key
        self._issuer = issuer
        self._link_key = link_key

    @classmethod
    def of(cls, settings: Settings, local_secret: str | None = None) -> "Authentication":
        """As configured. ``local_secret``: that of this data directory, when nothing is configured.

        Raises SettingsRefused when there is no key, two, or one that can't be used.
        """
        given = settings.jwt_secret.get_secret_value() if settings.jwt_secret is not None else None
        links = settings.link_secret.get_secret_value().encode() if settings.link_secret is not None else None
        if settings.jwt_public_key_file is not None:
            if given is not None:
                raise SettingsRefused(
                    "BERTH_JWT_SECRET and BERTH_JWT_PUBLIC_KEY_FILE are both set, and only one kind of token is taken.",
                    "unset the one that nobody signs tokens with, then start again.",
                )
            algorithm, key = _public_key(settings.jwt_public_key_file)
            return cls(algorithm, key, settings.jwt_issuer, links)
        secret = given or local_secret
        if secret is None:
            raise SettingsRefused(
                "Nobody could sign in: no key for tokens is known. BERTH_JWT_SECRET and BERTH_JWT_PUBLIC_KEY_FILE are "
                f"not set, and {settings.data_directory} holds no secret of its own.",
                "set BERTH_JWT_SECRET to at least 32 random bytes (python3 -c 'import secrets; "
                "print(secrets.token_urlsafe(48))'), or run `berth up` in this directory, which makes one.",
            )
        return cls("HS256", secret.encode(), settings.jwt_issuer, links or _derived(secret.encode()))

    # -- tokens ---------------------------------------------------------------------------------------------------

    def caller(self, authorization: list[str]) -> Caller:
        """Who these Authorization headers are of. Raises Unauthenticated."""
        if not authorization:
            raise Unauthenticated(
                "token_required", "This address needs a token: Authorization: Bearer …; `berth token` prints one."
            )
        scheme, _, token = authorization[0].partition(" ")
        if len(authorization) > 1 or scheme.lower() != "bearer":
            raise _refused("it must come in one header, as Authorization: Bearer …")
        return self._read(token.strip())

    def _read(self, token: str) -> Caller:
        content = self._verified(token, self.algorithm, self._key, AUDIENCE)
        try:
            claims = _Claims.model_validate(content)
        except ValidationError as error:
            field = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise _refused(f"its claim {field} can't be used") from None
        now = time.time()
        if max(claims.nbf or 0.0, claims.iat or 0.0) > now + SKEW_SECONDS:
            raise _refused("its time has not come")
        hours = lifetime_hours_max(claims.role)
        begins = now + SKEW_SECONDS if claims.iat is None else claims.iat  # unsaid: it may have been made just now
        if claims.exp - begins > hours * HOUR_SECONDS:
            raise _refused(f"it lives longer than the {hours} h that a token of role {claims.role} may")
        agents = None if EVERY_AGENT in claims.agents else frozenset(claims.agents)
        return Caller(claims.sub, claims.role, agents, claims.exp)

    def _verified(self, token: str, algorithm: str, key: Any, audience: str) -> dict[str, Any]:
        """The claims of a token whose signature, issuer, audience and end are right. Raises Unauthenticated."""
        if len(token) > TOKEN_BYTES_MAX or not token.isascii():
            raise _refused("it is not a token")
        try:
            return jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=audience,
                issuer=self._issuer,
                # nbf and iat are looked at afterwards: for them clocks may differ, for exp they may not.
                options={"require": ["exp", "sub", "aud", "iss"], "verify_nbf": False, "verify_iat": False},
            )
        except jwt.ExpiredSignatureError:
            raise _refused("it has ended", code="token_expired") from None
        except jwt.MissingRequiredClaimError as error:
            raise _refused(f"it lacks the claim {error.claim}") from None
        except jwt.InvalidAlgorithmError:
            raise _refused(f"it must be signed with {algorithm}") from None
        except jwt.InvalidAudienceError:
            raise _refused(f"its aud must be {audience}") from None
        except jwt.InvalidIssuerError:
            raise _refused(f"its iss must be {self._issuer}") from None
        except jwt.InvalidSignatureError:
            raise _refused("its signature is wrong") from None
        except jwt.PyJWTError:
            raise _refused("it is not a token") from None

    def issue(self, subject: str, role: Role, agents: Iterable[str], hours: float) -> str:
        """A token for so long from now. ValueError if it can't be: what is wrong, in words."""
        if self.algorithm != "HS256":
            raise ValueError("tokens are signed with a private key that isn't here: BERTH_JWT_PUBLIC_KEY_FILE is set")
        if not 0 < hours <= lifetime_hours_max(role):
            raise ValueError(f"a token of role {role} lives at most {lifetime_hours_max(role)} h")
        now = int(time.time())
        claims = {
            "iss": self._issuer,
            "aud": AUDIENCE,
            "sub": _id(subject, "the subject"),
            "role": role,
            "agents": [_id(agent_id, "an agent") for agent_id in agents],
            "iat": now,
            "exp": now + max(1, int(hours * HOUR_SECONDS)),
        }
        return jwt.encode(claims, self._key, "HS256")

    # -- public links ---------------------------------------------------------------------------------------------

    def issue_link(self, agent_id: str, subject: str, hours: int) -> tuple[Link, str, int]:
        """A link to an agent, its token, and when it ends (epoch seconds). Raises LinksOff."""
        now = int(time.time())
        link, ends = Link(uuid.uuid4().hex, agent_id), now + hours * HOUR_SECONDS
        claims = {
            "iss": self._issuer,
            "aud": LINK_AUDIENCE,
            "sub": subject,
            "agent": agent_id,
            "jti": link.id,
            "iat": now,
            "exp": ends,
        }
        return link, jwt.encode(claims, self._require_link_key(), "HS256"), ends

    def link(self, token: str) -> Link:
        """The link that this token is. Raises Unauthenticated, or LinksOff."""
        content = self._verified(token, "HS256", self._require_link_key(), LINK_AUDIENCE)
        try:
            claims = _LinkClaims.model_validate(content)
        except ValidationError:
            raise _refused("it is not a link") from None
        return Link(claims.jti, claims.agent)

    def _require_link_key(self) -> bytes:
        if self._link_key is None:
            raise LinksOff
        return self._link_key


def _derived(secret: bytes) -> bytes:
    """A key for links, of which the secret can't be found out, and which signs no tokens."""
    return hmac.new(secret, b"berth public links", hashlib.sha256).digest()


_ID: Final[TypeAdapter[str]] = TypeAdapter(Id)


def _id(value: str, what: str) -> str:
    try:
        return _ID.validate_python(value)
    except ValidationError:
        raise ValueError(f"{what} must have 1 to 200 characters, and no control characters") from None


def _public_key(path: Path) -> tuple[Literal["RS256", "EdDSA"], RSAPublicKey | Ed25519PublicKey]:
    allowed = f"a PEM file with one public key: RSA with {RSA_BITS_MIN} bits or more (RS256), or Ed25519 (EdDSA)"
    advice = f"BERTH_JWT_PUBLIC_KEY_FILE must name {allowed}."
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsRefused(f"{path} can't be read: {error.strerror or error}.", advice) from error
    if b"PRIVATE KEY" in content:
        raise SettingsRefused(
            f"{path} holds a private key, which has no business on this machine: this service only checks tokens.",
            f"make a new pair of keys, as this one may be known now. {advice}",
        )
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingsRefused(f"{path} holds no public key that can be read.", advice) from error
    if isinstance(key, Ed25519PublicKey):
        return "EdDSA", key
    if isinstance(key, RSAPublicKey) and key.key_size >= RSA_BITS_MIN:
        return "RS256", key
    raise SettingsRefused(f"{path} holds a public key of another kind, or a shorter one.", advice)


def _refused(why: str, code: str = "token_refused") -> Unauthenticated:
    return Unauthenticated(code, f"The token can't be used: {why}. Nothing was changed.")
