"""Every setting of a deployment: one frozen object, read from the environment once, by the program that starts.

A setting is named by its environment variable (``BERTH_`` and the field's name in capitals), has a default that works
on one machine, and a range. A value outside it, and a variable that looks like a setting and is none, stop the program
before any work with a sentence that names the variable: a misspelt BERTH_PARTITIONS would otherwise show only after
the topics were made with the wrong count, which is for life.
"""

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from streams.rules.limits import PARALLELISM_LIMIT_MAX, PARALLELISM_LIMIT_MIN, POOL_CAPACITY_MAX

ENDPOINTS_FILE_NAME: Final = "endpoints.json"
"""In the data directory: where the servers that ``berth up`` started listen: ``kafka``, ``database_url``, ``api``."""
SECRET_FIELDS: Final = frozenset({"jwt_secret", "link_secret", "token"})
"""Their values are never shown."""
NOT_SETTINGS: Final = frozenset({"BERTH_REQUIRE_SERVICES", "BERTH_SEED"})
"""Variables with our prefix that are for the tests and not for a deployment."""


class SettingsRefused(ValueError):  # noqa: N818 - it reads as what it is
    """A setting can't be used: ``happened`` names the variables and what is allowed, ``advice`` says what to do."""

    def __init__(self, happened: str, advice: str) -> None:
        super().__init__(f"{happened}\nTo do: {advice}")
        self.happened = happened
        self.advice = advice


class NoServerKnown(SettingsRefused):
    """No address of a server is set, and none runs in the data directory."""


def _addresses(text: str) -> str:
    """``host:port`` or several, separated by commas."""
    for address in text.split(","):
        host, colon, port = address.strip().rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65_536):
            raise ValueError("not host:port")
    return ",".join(address.strip() for address in text.split(","))


Addresses = Annotated[str, AfterValidator(_addresses)]


SECRET_BYTES_MIN: Final = 32
SECRET_CHARACTERS_MIN: Final = 8
"""A secret has more different characters than words and repetitions have."""
_SAMPLES: Final = (
    "changeme", "changethis", "replaceme", "replacethis", "yoursecret", "yourjwtsecret", "yourkey", "supersecret",
    "mysecret", "topsecret", "secretkey", "jwtsecret", "thisisasecret", "stringsecret", "256bitsecret", "notsosecret",
    "placeholder", "example", "password", "letmein", "insecure", "default", "12345678", "abcdefgh",
)  # fmt: skip
"""What the secrets of manuals and sample files are made of; a random one holds none of these."""


def _secret(secret: SecretStr) -> SecretStr:
    text = secret.get_secret_value()
    letters = "".join(character for character in text.lower() if character.isalnum())
    if len(text.encode()) < SECRET_BYTES_MIN:
        raise ValueError(f"shorter than {SECRET_BYTES_MIN} bytes")
    if len(set(text)) < SECRET_CHARACTERS_MIN or any(sample in letters for sample in _SAMPLES):
        raise ValueError("a known sample")
    return secret


Secret = Annotated[SecretStr, AfterValidator(_secret)]


def _names(text: str) -> str:
    """Names of hosts, separated by commas, or ``*``."""
    names = [name.strip().lower() for name in text.split(",")]
    if not all(re.fullmatch(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]|\*", name) for name in names):
        raise ValueError("not names of hosts")
    return ",".join(names)


def _origins(text: str) -> str:
    """Origins of web pages, separated by commas."""
    origins = [origin.strip().lower() for origin in text.split(",")]
    if not all(re.fullmatch(r"https?://[a-z0-9._\[\]:-]+", origin) for origin in origins):
        raise ValueError("not origins")
    return ",".join(origins)


class Endpoints(BaseModel):
    """Where the servers of one data directory listen: the content of its ``endpoints.json``."""

    model_config = ConfigDict(frozen=True)

    kafka: Addresses | None = None
    database_url: str | None = None
    api: str | None = None


class Settings(BaseSettings):
    """The settings of one process. ``description`` says for each what is allowed."""

    model_config = SettingsConfigDict(
        env_prefix="BERTH_", frozen=True, extra="forbid", populate_by_name=True, validate_default=True
    )

    kafka: Addresses | None = Field(
        default=None,
        description="host:port, or several separated by commas; none: the Kafka that `berth up` started",
    )
    database_url: Annotated[str, Field(pattern="^postgres(ql)?://[^ ]+$")] | None = Field(
        default=None,
        description="postgresql://user@host:port/database; none: the PostgreSQL that `berth up` started",
    )
    text_days: int = Field(
        default=90,
        ge=1,
        le=36_500,
        description="days from 1 to 36500: how long PostgreSQL keeps texts of people (messages, errors, results)",
    )
    partitions: int = Field(
        default=8, ge=1, le=1024, description="a whole number from 1 to 1024, the same for the life of the deployment"
    )
    default_limit: Annotated[int, Field(ge=PARALLELISM_LIMIT_MIN, le=PARALLELISM_LIMIT_MAX)] | Literal["unlimited"] = (
        Field(
            default=1,
            description=f"a whole number from {PARALLELISM_LIMIT_MIN} to {PARALLELISM_LIMIT_MAX}, or unlimited: "
            "turns at once of an agent that sets no limit",
        )
    )
    worker_pool_capacity: int = Field(
        default=4,
        ge=0,
        le=POOL_CAPACITY_MAX,
        validation_alias="WORKER_POOL_CAPACITY",
        description=f"a whole number from 0 to {POOL_CAPACITY_MAX}: how many runners there are",
    )
    data_directory: Path = Field(
        default=Path(".berth"), description="a path: where the embedded servers keep their data"
    )
    jar_repository: Annotated[str, Field(pattern="^https?://[^ ]+$")] | None = Field(
        default=None,
        description="http(s)://…: a mirror of the central Maven repository, from which Kafka is downloaded once",
    )
    session_timeout_seconds: float = Field(
        default=6.0, ge=1.0, le=300.0, description="seconds from 1 to 300: a silent worker's partitions go to others"
    )
    start_from: Literal["earliest", "latest"] = Field(
        default="earliest", description="earliest or latest: where reading starts when nothing is stored at all"
    )
    commit_pause_milliseconds_max: int = Field(
        default=80, ge=0, le=1000, description="milliseconds from 0 to 1000: longest pause between two transactions"
    )
    worker_port: int = Field(
        default=0,
        ge=0,
        le=65_535,
        description="a port for the worker's /readyz and /metrics on 127.0.0.1; 0: a free one",
    )

    projector_port: int = Field(
        default=0,
        ge=0,
        le=65_535,
        description="a port for the projector's /readyz and /metrics on 127.0.0.1; 0: a free one",
    )
    projection_lag_seconds_max: float = Field(
        default=5.0,
        ge=1.0,
        le=3600.0,
        description="seconds from 1 to 3600: /readyz turns bad when PostgreSQL is further behind the log",
    )
    jwt_secret: Secret | None = Field(
        default=None,
        description=f"at least {SECRET_BYTES_MIN} random bytes, no word and nothing from a manual: signs tokens",
    )
    jwt_public_key_file: Path | None = Field(
        default=None, description="a path: PEM file with the public key (RS256 or EdDSA) of who makes tokens"
    )
    jwt_issuer: str = Field(
        default="berth", min_length=1, max_length=200, description="1 to 200 characters: the iss of every token"
    )
    link_secret: Secret | None = Field(
        default=None,
        description=f"at least {SECRET_BYTES_MIN} random bytes, no word and nothing from a manual: signs public links",
    )
    api_hosts: Annotated[str, AfterValidator(_names)] | None = Field(
        default=None,
        description="names separated by commas to which the API answers besides 127.0.0.1 and localhost; *: to all",
    )
    cors_origins: Annotated[str, AfterValidator(_origins)] | None = Field(
        default=None,
        description="origins separated by commas (https://app.example.org) whose pages may ask the API; none: CORS is "
        "off",
    )

    api: Annotated[str, Field(pattern=r"^https?://[^ ?#]+$")] | None = Field(
        default=None,
        description="http(s)://host:port of the API that the command line asks; none: the one of this directory, or "
        "http://127.0.0.1:8080",
    )
    token: Annotated[SecretStr, Field(min_length=1)] | None = Field(
        default=None,
        description="a token: with it the command line asks the API; none: one made with the secret of this directory",
    )

    def kafka_addresses(self) -> str:
        """Bootstrap addresses of Kafka: those set, else of the Kafka that ``berth up`` runs in the data directory.

        Raises NoServerKnown when there is neither.
        """
        if self.kafka is not None:
            return self.kafka
        return self._endpoint("kafka", "No Kafka is known: BERTH_KAFKA is not set", "BERTH_KAFKA=host:port")

    def database_address(self) -> str:
        """URL of PostgreSQL: that set, else of the one that ``berth up`` runs.

        Raises NoServerKnown when there is neither.
        """
        if self.database_url is not None:
            return self.database_url
        return self._endpoint(
            "database_url",
            "No PostgreSQL is known: BERTH_DATABASE_URL is not set",
            "BERTH_DATABASE_URL=postgresql://user@host:port/database",
        )

    def names(self, field: Literal["api_hosts", "cors_origins"]) -> tuple[str, ...]:
        """A setting that is a list of names."""
        given: str | None = getattr(self, field)
        return () if given is None else tuple(given.split(","))

    def _endpoint(self, name: Literal["kafka", "database_url"], unknown: str, setting: str) -> str:
        path = self.data_directory / ENDPOINTS_FILE_NAME
        reason = "it names none"
        try:
            found = Endpoints.model_validate_json(path.read_bytes())
        except OSError as error:
            reason = str(error.strerror)
        except ValueError:
            reason = "it is not what berth up writes"
        else:
            address: str | None = getattr(found, name)
            if address is not None:
                return address
        raise NoServerKnown(
            f"{unknown}, and {path} can't be used ({reason}).",
            f"start one with `berth up` in this directory, or set {setting}.",
        )


def load_settings() -> Settings:
    """The settings of this process from its environment. Raises SettingsRefused, naming every variable at fault."""
    known = {variable_of(name) for name in Settings.model_fields}
    faults = [_unknown(name, known) for name in sorted(os.environ) if name.startswith("BERTH_") and name not in known]
    try:
        settings = Settings()
    except ValidationError as refused:
        wrong = {str(error["loc"][0]): error["input"] for error in refused.errors()}
        faults = [*(_out_of_range(location, value) for location, value in wrong.items()), *faults]
    else:
        if not any(faults):
            return settings
    raise SettingsRefused(
        "\n".join(fault for fault in faults if fault), "set, rename or unset what is named above, then start again."
    )


def variable_of(field_name: str) -> str:
    """The environment variable of a field of Settings."""
    alias = Settings.model_fields[field_name].validation_alias
    return str(alias) if alias else f"BERTH_{field_name.upper()}"


def _unknown(variable: str, known: set[str]) -> str:
    if variable in NOT_SETTINGS:
        return ""
    similar = difflib.get_close_matches(variable, known, n=1, cutoff=0.75)
    advice = f"did you mean {similar[0]}?" if similar else f"the settings are {', '.join(sorted(known))}."
    return f"{variable} is not a setting of Berth: {advice}"


def _out_of_range(location: str, value: object) -> str:
    name = next(name for name in Settings.model_fields if location in (name, variable_of(name)))
    shown = "" if name in SECRET_FIELDS else f"={value}"
    return f"{variable_of(name)}{shown} can't be used. Allowed: {Settings.model_fields[name].description}."
