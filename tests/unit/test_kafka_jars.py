"""The jars of Kafka, from a Maven repository on this machine that answers as badly as real ones sometimes do."""

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from api.cli.command_failed import CommandFailed
from api.cli.kafka_jars import COORDINATES, PINS_PATH, KafkaJars

EXTRA = "org.example:needed:1.0"
ALL = (*COORDINATES, EXTRA)


def path_of(coordinate: str) -> str:
    group, artifact, version = coordinate.split(":")
    return f"/{group.replace('.', '/')}/{artifact}/{version}/{artifact}-{version}.jar"


def jar(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(zipfile.ZipInfo("META-INF/MANIFEST.MF"), f"Name: {name}\n" * 100)
    return content.getvalue()


PINS = {coordinate: hashlib.sha256(jar(coordinate)).hexdigest() for coordinate in ALL}
FILE_NAMES = {path_of(coordinate).rpartition("/")[2] for coordinate in ALL}


class Repository(ThreadingHTTPServer):
    """Serves ``files``, and notes what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {}
        for coordinate in ALL:
            self.files[path_of(coordinate)] = jar(coordinate)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Repository

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.files.get(self.path)
        self.send_response(HTTPStatus.OK if content is not None else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_arguments: object) -> None:
        """Say nothing on the terminal."""


@pytest.fixture
def repository() -> Iterator[Repository]:
    server = Repository()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def jars(repository: Repository, tmp_path: Path) -> KafkaJars:
    return KafkaJars(tmp_path / "jars", repository.address, PINS)


def ignore(_line: str) -> None:
    pass


def names(jars: KafkaJars) -> set[str]:
    return {path.name for path in jars.folder.glob("*.jar")}


def test_the_first_time_downloads_with_progress_and_the_second_time_asks_nobody(
    jars: KafkaJars, repository: Repository
) -> None:
    lines: list[str] = []
    assert jars.class_path(lines.append) == str(jars.folder / "*")
    assert names(jars) == FILE_NAMES
    assert [line for line in lines if "file 3 of 3" in line]
    repository.asked.clear()
    assert jars.class_path(ignore) == str(jars.folder / "*")
    assert repository.asked == []
    assert not (jars.directory / "incomplete").exists()


@pytest.mark.parametrize("damage", ["gone", "shortened", "no manifest", "torn manifest"])
def test_what_vanished_from_the_cache_is_fetched_again(jars: KafkaJars, damage: str) -> None:
    jars.class_path(ignore)
    victim, manifest = next(jars.folder.glob("needed*.jar")), jars.folder / "manifest.json"
    if damage == "gone":
        victim.unlink()
    elif damage == "shortened":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:10])
    assert not jars.are_complete()
    jars.class_path(ignore)
    assert jars.are_complete()
    assert names(jars) == FILE_NAMES


def test_without_network_the_message_says_what_to_do_and_the_next_time_works(
    repository: Repository, tmp_path: Path
) -> None:
    with pytest.raises(CommandFailed, match="could not be downloaded") as failed:
        KafkaJars(tmp_path / "jars", "http://127.0.0.1:1", PINS).class_path(ignore)
    assert "BERTH_KAFKA=host:9092" in failed.value.advice
    assert "BERTH_JAR_REPOSITORY" in failed.value.advice
    again = KafkaJars(tmp_path / "jars", repository.address, PINS)
    again.class_path(ignore)
    assert names(again) == FILE_NAMES


@pytest.mark.parametrize("coordinate", ALL)
def test_a_file_that_the_repository_lacks_is_named_and_the_next_time_works(
    jars: KafkaJars, repository: Repository, coordinate: str
) -> None:
    content = repository.files.pop(path_of(coordinate))
    with pytest.raises(CommandFailed, match="could not be downloaded") as failed:
        jars.class_path(ignore)
    assert coordinate.split(":")[1] in failed.value.happened
    repository.files[path_of(coordinate)] = content
    jars.class_path(ignore)
    assert names(jars) == FILE_NAMES


@pytest.mark.parametrize("damage", ["torn", "replaced"])
def test_another_file_than_the_pinned_one_is_asked_for_again_and_never_used(
    jars: KafkaJars, repository: Repository, damage: str
) -> None:
    path = path_of(EXTRA)
    whole = repository.files[path]
    repository.files[path] = whole[: len(whole) // 2] if damage == "torn" else jar("another")
    with pytest.raises(CommandFailed, match="damaged"):
        jars.class_path(ignore)
    assert repository.asked.count(path) == 3
    assert not jars.are_complete()
    repository.files[path] = whole
    jars.class_path(ignore)
    assert names(jars) == FILE_NAMES


def test_what_an_interrupted_download_left_behind_is_thrown_away(jars: KafkaJars) -> None:
    piece = jars.directory / "incomplete" / "repository" / path_of(EXTRA).lstrip("/")
    piece.parent.mkdir(parents=True)
    piece.write_bytes(b"half a jar")
    jars.class_path(ignore)
    assert names(jars) == FILE_NAMES


def test_two_first_starts_at_once_download_once(jars: KafkaJars, repository: Repository) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(jars.class_path(ignore))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert repository.asked.count(path_of(EXTRA)) == 1


def test_every_pin_is_complete_and_the_wanted_versions_are_among_them() -> None:
    pins = dict(line.split() for line in PINS_PATH.read_text().splitlines())
    assert set(COORDINATES) <= set(pins)
    assert all(len(coordinate.split(":")) == 3 and len(digest) == 64 for coordinate, digest in pins.items())
    assert len({path_of(coordinate).rpartition("/")[2] for coordinate in pins}) == len(pins)


def test_a_cache_that_cannot_be_written_is_named(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "jars").write_text("in the way")
    with pytest.raises(CommandFailed, match="can't be written"):
        KafkaJars(tmp_path / "jars", repository.address, PINS).class_path(ignore)
