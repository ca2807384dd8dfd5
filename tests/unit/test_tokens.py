"""Who is let in: which tokens are taken, and that nothing else is, whatever it looks like (cases 132, 134)."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from api.cli import local_secret
from api.http.auth import (
    LIFETIME_HOURS_MAX,
    PROGRAM_LIFETIME_HOURS_MAX,
    ROLES,
    SKEW_SECONDS,
    Authentication,
    Caller,
    Role,
    Unauthenticated,
)
from streams.settings import Settings, SettingsRefused, load_settings
from tests.tokens import AUTHENTICATION, SECRET, claims, signed
from tests.unit.test_http_requests import client

HOUR = 3600
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
RSA_PUBLIC = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
ED_KEY = ed25519.Ed25519PrivateKey.generate()
ED_PUBLIC = ED_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def caller(token: str, authentication: Authentication = AUTHENTICATION) -> Caller:
    return authentication.caller([f"Bearer {token}"])


def refusal(token: str, authentication: Authentication = AUTHENTICATION) -> str:
    with pytest.raises(Unauthenticated) as refused:
        caller(token, authentication)
    return refused.value.code


def unsigned(content: Any, **header: Any) -> str:
    """A token of these parts without a signature."""
    parts = (json.dumps(part).encode() for part in (header, content))
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts) + "."


def test_a_token_says_who_asks_and_what_they_may_use() -> None:
    content = claims(agents=["a", "b"])
    assert caller(signed(content)) == Caller("ann", "person", frozenset("ab"), content["exp"])
    assert caller(signed(claims(agents=["*"]))).agents is None
    assert caller(signed(claims(agents=None))).agents == frozenset()
    assert caller(signed(claims(aud=["other", "berth"]))).subject == "ann"
    assert AUTHENTICATION.caller([f"bEaReR {signed(claims())}"]).subject == "ann"


@pytest.mark.parametrize("claim", ["exp", "sub", "aud", "iss", "role"])
def test_a_token_without_a_claim_that_is_required_is_refused(claim: str) -> None:
    assert refusal(signed(claims(**{claim: None}))) == "token_refused"


WRONG_CLAIMS: list[dict[str, Any]] = [
    {"aud": "other"},
    {"aud": "berth-public-link"},
    {"aud": ["x"]},
    {"aud": {}},
    {"iss": "other"},
    {"iss": ["berth"]},
    {"sub": ""},
    {"sub": 7},
    {"sub": "a\nb"},
    {"sub": "\ud800"},
    {"sub": "x" * 201},
    {"role": "root"},
    {"role": ["admin"]},
    {"role": "ADMIN"},
    {"agents": "a"},
    {"agents": [1]},
    {"agents": [""]},
    {"agents": {"a": 1}},
    {"exp": "soon"},
    {"exp": str(int(time.time()) + 12 * HOUR)},
    {"iat": True},
    {"nbf": "1"},
    {"exp": 1e300},
    {"exp": float("inf")},
    {"exp": float("nan")},
    {"exp": 10**400},
    {"exp": []},
    {"iat": "now"},
    {"iat": -1},
    {"nbf": {}},
    {"nbf": time.time() + 12 * HOUR},
    {"iat": time.time() + 12 * HOUR, "exp": time.time() + 13 * HOUR},
]


@pytest.mark.parametrize("changes", WRONG_CLAIMS, ids=range(len(WRONG_CLAIMS)))
def test_a_claim_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    assert refusal(signed(claims(**changes))) == "token_refused"


@pytest.mark.parametrize("seconds", [0, 1, HOUR])
def test_a_token_ends_when_it_says(seconds: int) -> None:
    assert refusal(signed(claims(iat=time.time() - 2 * HOUR, exp=int(time.time()) - seconds))) == "token_expired"


def test_clocks_may_differ_a_little_for_the_beginning_of_a_token() -> None:
    later = time.time() + SKEW_SECONDS - 5
    assert caller(signed(claims(iat=later, nbf=later))).subject == "ann"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("says_when_it_was_made", [True, False])
def test_a_token_lives_a_day_and_that_of_a_program_a_month(role: Role, says_when_it_was_made: bool) -> None:
    hours = PROGRAM_LIFETIME_HOURS_MAX if role in ("runner", "upstream", "system") else LIFETIME_HOURS_MAX
    now = int(time.time())
    made = now if says_when_it_was_made else None
    assert caller(signed(claims(role=role, iat=made, exp=now + hours * HOUR))).role == role
    assert refusal(signed(claims(role=role, iat=made, exp=now + hours * HOUR + 120))) == "token_refused"
    if says_when_it_was_made:
        assert refusal(signed(claims(role=role, iat=now - hours * HOUR, exp=now + 60))) == "token_refused"


# 134: the token chooses the algorithm


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "nOnE", "", None, [], ["HS256"], {}, 0, "HS256 "])
def test_without_a_signature_nothing_is_taken_whatever_the_header_says(algorithm: Any) -> None:
    assert refusal(unsigned(claims(), alg=algorithm, typ="JWT")) == "token_refused"
    signature = signed(claims()).rpartition(".")[2]
    assert refusal(unsigned(claims(), alg=algorithm) + signature) == "token_refused"


def test_a_header_without_an_algorithm_is_refused() -> None:
    assert refusal(unsigned(claims(), typ="JWT")) == "token_refused"
    assert refusal(unsigned(claims())) == "token_refused"


@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
@pytest.mark.parametrize("algorithm", ["HS384", "HS512"])
def test_another_algorithm_with_the_right_secret_is_refused(algorithm: str) -> None:
    assert refusal(signed(claims(), algorithm=algorithm)) == "token_refused"


def test_another_key_is_refused() -> None:
    assert refusal(signed(claims(), SECRET + "x")) == "token_refused"
    assert refusal(signed(claims(), RSA_KEY, "RS256")) == "token_refused"


def test_a_public_key_is_no_secret() -> None:
    """HS256 with the bytes of the public key, which everybody has, as the secret."""
    for algorithm, public in (("RS256", RSA_PUBLIC), ("EdDSA", ED_PUBLIC)):
        authentication = with_public_key(algorithm)
        header = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "typ": "JWT"}).encode()).rstrip(b"=")
        body = base64.urlsafe_b64encode(json.dumps(claims()).encode()).rstrip(b"=")
        forged = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(header + b"." + body, public)
        signature = base64.urlsafe_b64encode(forged).rstrip(b"=")
        assert refusal(b".".join((header, body, signature)).decode(), authentication) == "token_refused"


def with_public_key(algorithm: str) -> Authentication:
    key: Any = (RSA_KEY if algorithm == "RS256" else ED_KEY).public_key()
    return Authentication(algorithm, key, "berth", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("algorithm", "key", "other"), [("RS256", RSA_KEY, "EdDSA"), ("EdDSA", ED_KEY, "RS256")])
def test_with_a_public_key_only_what_its_owner_signed_is_taken(algorithm: str, key: Any, other: str) -> None:
    token = signed(claims(), key, algorithm, kid="any key at all", jku="https://example.org/keys")
    assert caller(token, with_public_key(algorithm)).subject == "ann"
    assert refusal(token, with_public_key(other)) == "token_refused"
    assert refusal(token) == "token_refused"
    assert refusal(signed(claims()), with_public_key(algorithm)) == "token_refused"
    with pytest.raises(ValueError, match="private key"):
        with_public_key(algorithm).issue("ann", "person", ["a"], 1)


# What isn't a token at all


GARBAGE = [
    "",
    ".",
    "..",
    "...",
    "a.b.c",
    "e30.e30.e30",
    "x" * 100_000,
    ".".join(["e30"] * 10_000),
    "ß.ß.ß",
    "\ud800",
    "\x00",
    unsigned([1, 2], alg="HS256"),
    unsigned("text", alg="HS256"),
    unsigned(None, alg="HS256"),
    signed(claims())[:-1],
    signed(claims()) + "x",
    signed(claims()).swapcase(),
    signed(claims(agents=["x" * 200] * 1000)),
]


@pytest.mark.parametrize("token", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused(token: str) -> None:
    assert refusal(token) == "token_refused"


@given(st.text(max_size=80) | st.from_regex(r"[A-Za-z0-9_=-]{0,60}(\.[A-Za-z0-9_=-]{0,60}){0,4}", fullmatch=True))
def test_any_text_is_refused(token: str) -> None:
    assert refusal(token) == "token_refused"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CLAIMS = st.sampled_from(["exp", "iat", "nbf", "sub", "aud", "iss", "role", "agents", "jti"])


@given(st.dictionaries(CLAIMS, VALUES, min_size=1, max_size=4))
def test_any_claims_that_are_signed_are_taken_or_refused(changes: dict[str, Any]) -> None:
    token = signed({**claims(), **changes})
    try:
        taken = caller(token)
    except Unauthenticated:
        return
    assert taken.expires_at_seconds <= time.time() + PROGRAM_LIFETIME_HOURS_MAX * HOUR + SKEW_SECONDS
    assert taken.role in ROLES and taken.subject


@given(st.dictionaries(st.sampled_from(["alg", "typ", "kid", "crit", "b64", "jwk", "x5u", "cty"]), VALUES, max_size=4))
def test_any_header_without_the_right_signature_is_refused(header: dict[str, Any]) -> None:
    assert refusal(unsigned(claims(), **header)) == "token_refused"


# Over HTTP


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], "token_required"),
        ([("Authorization", "")], "token_refused"),
        ([("Authorization", "Bearer")], "token_refused"),
        ([("Authorization", "Bearer ")], "token_refused"),
        ([("Authorization", "Basic YW5uOng=")], "token_refused"),
        ([("Authorization", signed(claims()))], "token_refused"),
        ([("Authorization", f"Bearer {signed(claims())}"), ("Authorization", "Bearer x")], "token_refused"),
        ([("Authorization", b"Bearer \xff\xfe")], "token_refused"),
        ([("Authorization", f"Bearer {signed(claims(exp=1))}")], "token_expired"),
        ([("X-User", "admin"), ("Cookie", f"token={signed(claims())}")], "token_required"),
    ],
)
async def test_without_a_token_that_is_taken_there_is_a_401_with_a_challenge(headers: Any, code: str) -> None:
    async with client() as http:
        del http.headers["authorization"]
        answer = await http.get("/api/agents", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, code)
    assert answer.headers["content-type"] == "application/problem+json"
    challenge = answer.headers["www-authenticate"]
    assert challenge.startswith('Bearer realm="berth"')
    assert ("invalid_token" in challenge) == (code != "token_required")


@pytest.mark.parametrize("path", ["/api/agents?access_token=", "/api/agents?token="])
async def test_a_token_in_an_address_is_not_looked_at(path: str) -> None:
    async with client() as http:
        del http.headers["authorization"]
        assert (await http.get(path + signed(claims()))).status_code == 401


@given(st.binary(max_size=60))
async def test_any_authorization_is_answered_with_401(value: bytes) -> None:
    async with client() as http:
        request = http.build_request("GET", "/api/agents")
        request.headers = httpx.Headers([(b"host", b"127.0.0.1"), (b"authorization", value)])
        assert (await http.send(request)).status_code == 401


# 132: the secret from the example file works in production

SAMPLES = [
    "",
    "secret",
    "change-me",
    "x" * 31,
    "x" * 64,
    "abababababababababababababababababababab",
    "change-me-change-me-change-me-change-me",
    "ChangeThisSecretToSomethingRandom1234",
    "your-256-bit-secret-your-256-bit-secret",
    "a-string-secret-at-least-256-bits-long",
    "my-super-secret-key-that-is-long-enough",
    "0123456789abcdef0123456789abcdef",
    "${BERTH_JWT_SECRET:?set it to your secret}",
]


@pytest.mark.parametrize("variable", ["BERTH_JWT_SECRET", "BERTH_LINK_SECRET"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_known_or_short_secret_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, variable: str, sample: str
) -> None:
    monkeypatch.setenv(variable, sample)
    with pytest.raises(SettingsRefused) as refused:
        load_settings()
    assert refused.value.happened.startswith(f"{variable} can't be used. Allowed: at least 32 random bytes")
    assert not sample or sample not in str(refused.value)


def test_a_random_secret_is_taken_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_JWT_SECRET", SECRET)
    settings = load_settings()
    assert SECRET not in repr(settings) + str(settings.model_dump())
    assert caller(signed(claims()), Authentication.of(settings)).subject == "ann"


def test_without_a_key_nobody_can_sign_in_so_nothing_starts(tmp_path: Path) -> None:
    settings = Settings(data_directory=tmp_path)
    with pytest.raises(SettingsRefused, match="no key for tokens is known"):
        Authentication.of(settings, local_secret.find(settings))


def test_nothing_in_the_repository_is_a_secret_that_would_be_taken() -> None:
    root = Path(__file__).parents[2]
    files = [root / "docker-compose.yml", root / "README.md", root / "Dockerfile", *(root / "docs").rglob("*.md")]
    for file in files:
        for line in file.read_text().splitlines():
            for name in ("BERTH_JWT_SECRET", "BERTH_LINK_SECRET"):
                value = line.partition(f"{name}=")[2] or line.partition(f"{name}: ")[2]
                assert not value or "${" in value or "$(" in value or len(value) < 32, f"{file}: {line}"


def test_two_kinds_of_keys_are_one_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_JWT_SECRET", SECRET)
    monkeypatch.setenv("BERTH_JWT_PUBLIC_KEY_FILE", str(written(tmp_path, RSA_PUBLIC)))
    with pytest.raises(SettingsRefused, match="both set"):
        Authentication.of(load_settings())


def written(directory: Path, content: bytes) -> Path:
    path = directory / "key.pem"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("algorithm", "public", "key"), [("RS256", RSA_PUBLIC, RSA_KEY), ("EdDSA", ED_PUBLIC, ED_KEY)])
def test_the_algorithm_is_that_of_the_public_key(tmp_path: Path, algorithm: str, public: bytes, key: Any) -> None:
    settings = Settings(jwt_public_key_file=written(tmp_path, public), jwt_issuer="https://id.example.org")
    authentication = Authentication.of(settings)
    assert authentication.algorithm == algorithm
    token = signed(claims(iss="https://id.example.org"), key, algorithm)
    assert caller(token, authentication).subject == "ann"
    assert refusal(signed(claims(), key, algorithm), authentication) == "token_refused"


PRIVATE = RSA_KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
SHORT = rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()
CURVE = ec.generate_private_key(ec.SECP256R1()).public_key()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no public key"),
        (b"\xff\xfe", "no public key"),
        (RSA_PUBLIC[:100], "no public key"),
        (PRIVATE, "private key"),
        (SHORT.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), "another kind, or a shorter one"),
        (CURVE.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), "another kind, or a shorter one"),
    ],
    ids=["empty", "no text", "cut", "private", "1024 bits", "P-256"],
)
def test_a_key_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(SettingsRefused, match=words):
        Authentication.of(Settings(jwt_public_key_file=written(tmp_path, content)))
    with pytest.raises(SettingsRefused, match="can't be read"):
        Authentication.of(Settings(jwt_public_key_file=tmp_path / "none.pem"))


# The secret of a data directory


def test_the_secret_of_a_directory_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    settings = Settings(data_directory=tmp_path / "data")
    assert local_secret.find(settings) is None
    local_secret.ensure(settings)
    made = local_secret.find(settings)
    local_secret.ensure(settings)
    assert made is not None and local_secret.find(settings) == made and len(made) >= 32
    (file,) = settings.data_directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    other = Settings(data_directory=tmp_path / "other")
    local_secret.ensure(other)
    assert local_secret.find(other) != made


def test_a_secret_that_others_may_have_read_is_refused(tmp_path: Path) -> None:
    settings = Settings(data_directory=tmp_path)
    local_secret.ensure(settings)
    (file,) = tmp_path.iterdir()
    file.chmod(0o640)
    with pytest.raises(SettingsRefused, match="can be read by others"):
        local_secret.find(settings)
    file.chmod(0o600)
    file.write_text("cut")
    with pytest.raises(SettingsRefused, match="is not what berth up writes"):
        local_secret.find(settings)


def test_with_a_key_configured_no_secret_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_JWT_SECRET", SECRET)
    monkeypatch.setenv("BERTH_DATA_DIRECTORY", str(tmp_path))
    local_secret.ensure(load_settings())
    assert list(tmp_path.iterdir()) == []
