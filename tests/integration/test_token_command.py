"""``berth token`` as a person meets it: what it prints, for whom, and what it never prints."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from api.cli import local_secret
from api.http.auth import Authentication, Caller
from streams.settings import Settings
from tests.integration.test_http_command import address_of, berth_api
from tests.tokens import SECRET

ROOT = Path(__file__).parents[2]


def berth_token(directory: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    return subprocess.run(
        [sys.executable, "-m", "api.cli", "token", *words],
        cwd=ROOT,
        env=kept | {"BERTH_DATA_DIRECTORY": str(directory), "COLUMNS": "200"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A data directory as berth up leaves it."""
    local_secret.ensure(Settings(data_directory=tmp_path))
    return tmp_path


def read(directory: Path, token: str) -> Caller:
    settings = Settings(data_directory=directory)
    return Authentication.of(settings, local_secret.find(settings)).caller([f"Bearer {token}"])


def test_it_prints_a_token_of_an_admin_for_every_agent_and_nothing_else(directory: Path) -> None:
    done = berth_token(directory)
    assert (done.returncode, done.stderr) == (0, "")
    caller = read(directory, done.stdout.removesuffix("\n"))
    assert (caller.subject, caller.role, caller.agents) == ("local", "admin", None)
    secret = local_secret.find(Settings(data_directory=directory))
    assert secret is not None and secret not in done.stdout


def test_it_prints_a_token_for_whom_and_what_is_asked_for(directory: Path) -> None:
    words = ("--role", "upstream", "--subject", "ci", "--agents", "writer,editor", "--hours", "720")
    caller = read(directory, berth_token(directory, *words).stdout.strip())
    assert (caller.subject, caller.role, caller.agents) == ("ci", "upstream", frozenset(("writer", "editor")))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--hours", "25"), "lives at most 24 h"),
        (("--role", "runner", "--hours", "721"), "lives at most 720 h"),
        (("--hours", "0"), "lives at most"),
        (("--hours", "nan"), "lives at most"),
        (("--subject", ""), "the subject must have"),
        (("--agents", ""), "an agent must have"),
        (("--page",), "No page is known"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_to_do(directory: Path, words: tuple[str, ...], reason: str) -> None:
    done = berth_token(directory, *words)
    assert done.returncode == 1 and done.stdout == ""
    assert reason in done.stderr and "To do:" in done.stderr and "Traceback" not in done.stderr


def test_without_a_secret_it_says_how_to_get_one(tmp_path: Path) -> None:
    done = berth_token(tmp_path)
    assert done.returncode == 1
    assert "no key for tokens is known" in done.stderr and "berth up" in done.stderr


def test_a_configured_secret_comes_before_that_of_the_directory(directory: Path) -> None:
    token = berth_token(directory, BERTH_JWT_SECRET=SECRET).stdout.strip()
    assert Authentication("HS256", SECRET.encode(), "berth", None).caller([f"Bearer {token}"]).role == "admin"


def test_an_api_takes_the_tokens_of_its_directory_and_starts_with_no_key_at_all_never(directory: Path) -> None:
    with berth_api(directory, "--port", "0", BERTH_JWT_SECRET=SECRET) as process:
        address = address_of(process)
        page = berth_token(directory, "--page", BERTH_JWT_SECRET=SECRET).stdout.strip()
        assert page.startswith(f"{address}#token=")
        token = page.partition("#token=")[2]
        request = urllib.request.Request(
            f"{address}api/agents/a/capacity", headers={"Authorization": f"Bearer {token}"}
        )
        with pytest.raises(urllib.error.HTTPError) as answered:
            urllib.request.urlopen(request)
        assert json.load(answered.value)["code"] == "database_unavailable"  # let in; the rest isn't there
    (directory / "jwt-secret").unlink()
    with berth_api(directory, "--port", "0", without=("BERTH_JWT_SECRET",)) as process:
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 1 and "no key for tokens is known" in said and "Traceback" not in said


@pytest.mark.parametrize("secret", ["", "secret", "change-me", "your-256-bit-secret-your-256-bit-secret"])
def test_an_api_with_a_known_secret_does_not_start(tmp_path: Path, secret: str) -> None:
    with berth_api(tmp_path, "--port", "0", BERTH_JWT_SECRET=secret) as process:
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert "BERTH_JWT_SECRET can't be used" in said and "Traceback" not in said
