"""Settings: the environment is read once, and what would surprise later is refused at the start."""

import json
from pathlib import Path

import pytest

from streams.settings import Settings, SettingsRefused, load_settings, variable_of

REFUSED = [
    ("BERTH_PARTITIONS", "0"),
    ("BERTH_PARTITIONS", "1025"),
    ("BERTH_PARTITIONS", "eight"),
    ("BERTH_PARTITIONS", "8.5"),
    ("BERTH_PARTITIONS", ""),
    ("BERTH_DEFAULT_LIMIT", "0"),
    ("BERTH_DEFAULT_LIMIT", "11"),
    ("BERTH_DEFAULT_LIMIT", "true"),
    ("BERTH_DEFAULT_LIMIT", "many"),
    ("WORKER_POOL_CAPACITY", "-1"),
    ("WORKER_POOL_CAPACITY", "10001"),
    ("BERTH_SESSION_TIMEOUT_SECONDS", "0"),
    ("BERTH_SESSION_TIMEOUT_SECONDS", "nan"),
    ("BERTH_START_FROM", "yesterday"),
    ("BERTH_COMMIT_PAUSE_MILLISECONDS_MAX", "-1"),
    ("BERTH_WORKER_PORT", "65536"),
    ("BERTH_KAFKA", "kafka"),
    ("BERTH_KAFKA", "kafka:"),
    ("BERTH_KAFKA", ":9092"),
    ("BERTH_KAFKA", "a:9092,"),
    ("BERTH_KAFKA", "a:9092,b:0"),
    ("BERTH_JAR_REPOSITORY", "ftp://mirror"),
]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in Settings.model_fields:
        monkeypatch.delenv(variable_of(field), raising=False)


def test_nothing_set_gives_the_defaults_that_the_documents_name() -> None:
    settings = load_settings()
    assert settings.kafka is None
    assert settings.partitions == 8
    assert settings.default_limit == 1
    assert settings.worker_pool_capacity == 4
    assert settings.session_timeout_seconds == 6
    assert settings.start_from == "earliest"
    assert settings.commit_pause_milliseconds_max == 80
    assert settings.data_directory == Path(".berth")


@pytest.mark.parametrize(("variable", "value"), REFUSED)
def test_a_value_that_cannot_be_is_refused_with_the_variable_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsRefused) as refused:
        load_settings()
    assert f"{variable}={value} can't be used. Allowed: " in refused.value.happened
    assert refused.value.advice


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("BERTH_PARTITIONS", "1", "partitions", 1),
        ("BERTH_DEFAULT_LIMIT", "10", "default_limit", 10),
        ("BERTH_DEFAULT_LIMIT", "unlimited", "default_limit", "unlimited"),
        ("WORKER_POOL_CAPACITY", "0", "worker_pool_capacity", 0),
        ("BERTH_START_FROM", "latest", "start_from", "latest"),
        ("BERTH_KAFKA", "a:9092, b:9093", "kafka", "a:9092,b:9093"),
        ("BERTH_KAFKA", "[::1]:9092", "kafka", "[::1]:9092"),
        ("BERTH_DATA_DIRECTORY", "some/where", "data_directory", Path("some/where")),
    ],
)
def test_a_value_that_can_be_is_used(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, field: str, expected: object
) -> None:
    monkeypatch.setenv(variable, value)
    assert getattr(load_settings(), field) == expected


def test_every_fault_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_PARTITIONS", "x")
    monkeypatch.setenv("BERTH_WORKER_PORT", "x")
    monkeypatch.setenv("BERTH_PARTITON", "9")
    with pytest.raises(SettingsRefused) as refused:
        load_settings()
    assert len(refused.value.happened.splitlines()) == 3


@pytest.mark.parametrize(
    ("variable", "meant"), [("BERTH_PARTITON", "BERTH_PARTITIONS"), ("BERTH_BOOTSTRAP_SERVERS", "BERTH_KAFKA")]
)
def test_a_variable_that_is_none_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, meant: str) -> None:
    monkeypatch.setenv(variable, "9")
    with pytest.raises(SettingsRefused, match=meant):
        load_settings()


def test_the_variables_of_the_test_suite_are_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTH_REQUIRE_SERVICES", "1")
    load_settings()


def test_the_address_set_wins_over_the_one_that_berth_up_wrote(tmp_path: Path) -> None:
    (tmp_path / "endpoints.json").write_text(json.dumps({"kafka": "127.0.0.1:1234"}))
    assert Settings(data_directory=tmp_path).kafka_addresses() == "127.0.0.1:1234"
    assert Settings(data_directory=tmp_path, kafka="other:9092").kafka_addresses() == "other:9092"


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"kafka": 5}', '{"kafka": "nowhere"}'])
def test_no_address_at_all_says_how_to_get_one(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "endpoints.json").write_text(content)
    with pytest.raises(SettingsRefused, match="berth up"):
        Settings(data_directory=tmp_path).kafka_addresses()


def test_every_setting_says_what_is_allowed() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
