"""The jars of Apache Kafka: downloaded once per user, then used without asking anybody.

``kafka_jars.txt`` pins every jar by Maven coordinate and SHA-256, so that nothing is resolved on a user's machine and
nothing but exactly these bytes is ever run. After a change of ``COORDINATES`` write it anew::

    python -m api.cli.kafka_jars > kafka_jars.txt && mv kafka_jars.txt api/cli/

The jars lie in one flat folder per version, with ``manifest.json`` (name and size of each) written last and the whole
folder moved into place by one rename. So a folder that exists is complete unless somebody removed files from it,
which the manifest shows; then it is downloaded again. Downloads happen beside it, under a lock, so that two first
starts at once don't disturb each other, and what a broken download leaves behind is thrown away by the next one.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Final

import platformdirs
import requests
import typer
from jgo.maven import Artifact, MavenContext
from jgo.parse import Coordinate
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from api.cli.command_failed import CommandFailed
from api.cli.directory_lock import DirectoryLock, cannot_write

KAFKA_VERSION: Final = "4.2.2"
"""Not 4.3.0 to 4.4.0: they lose the ends of transactions when the broker is stopped (KAFKA-20734)."""
COORDINATES: Final = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    "org.slf4j:slf4j-simple:1.7.36",
)
"""Kafka's broker, and the smallest logger for it: without one its reasons for failing would be lost."""
PINS_PATH: Final = Path(__file__).with_name("kafka_jars.txt")
MANIFEST_FILE_NAME: Final = "manifest.json"
REQUEST_TIMEOUT_SECONDS: Final = 30
OTHER_DOWNLOAD_WAIT_SECONDS: Final = 600.0
DOWNLOADS_AT_ONCE: Final = 6


class DamagedJar(RuntimeError):  # noqa: N818 - it reads as what it is
    """A downloaded file is not the one that is pinned."""


class KafkaJars:
    """The jars in ``directory`` (by default this user's cache), downloaded when they are asked for and not there.

    ``repository``: address of a Maven repository, for networks from which the central one can't be reached.
    ``pins``: SHA-256 of each jar by its coordinate, by default those of ``kafka_jars.txt``.
    """

    def __init__(
        self, directory: Path | None = None, repository: str | None = None, pins: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory or platformdirs.user_cache_path("berth") / "jars"
        self.folder = self.directory / f"kafka-{KAFKA_VERSION}"
        self._repository = repository
        self._pins = pins or _read_pins()

    def class_path(self, report: Callable[[str], None]) -> str:
        """The Java class path of the broker. ``report`` is told in one line what is being downloaded.

        Raises CommandFailed when the jars are not there and can't be had.
        """
        if not self.are_complete():
            lock = DirectoryLock(self.directory)
            lock.acquire(report, wait_seconds=OTHER_DOWNLOAD_WAIT_SECONDS)
            try:
                if not self.are_complete():
                    self._download(report)
            finally:
                lock.release()
        return str(self.folder / "*")

    def are_complete(self) -> bool:
        """Whether every pinned jar is there with the size it was downloaded with."""
        try:
            manifest: dict[str, int] = json.loads((self.folder / MANIFEST_FILE_NAME).read_bytes())
            sizes_fit = all((self.folder / name).stat().st_size == size for name, size in manifest.items())
        except (OSError, ValueError):
            return False
        return sizes_fit and manifest.keys() == {_file_name(coordinate) for coordinate in self._pins}

    def _download(self, report: Callable[[str], None]) -> None:
        try:
            self._download_beside(self.directory / "incomplete", report)
        except requests.RequestException as error:  # before OSError, which it also is
            raise self._cannot_download("the package server could not be reached", error) from error
        except OSError as error:
            raise cannot_write(self.directory, error) from error
        except RuntimeError as error:  # how jgo says that a file can't be had
            raise self._cannot_download("a file could not be had", error) from error

    def _download_beside(self, workplace: Path, report: Callable[[str], None]) -> None:
        """Download into ``workplace`` and move the result into place."""
        shutil.rmtree(workplace, ignore_errors=True)
        jars = workplace / "jars"
        jars.mkdir(parents=True)
        context = _maven(workplace / "repository", self._repository)
        sizes_bytes: dict[str, int] = {}
        with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
            report(f"downloading Apache Kafka {KAFKA_VERSION}, once: about 45 MB")
            fetched = [pool.submit(_fetch, context, coordinate, pin) for coordinate, pin in self._pins.items()]
            try:
                for number, future in enumerate(as_completed(fetched), start=1):
                    jar = future.result()
                    sizes_bytes[jar.name] = jar.stat().st_size
                    jar.rename(jars / jar.name)
                    size_megabytes = sum(sizes_bytes.values()) / 1e6
                    progress = f"file {number} of {len(fetched)}, {size_megabytes:.0f} of about 45 MB"
                    report(f"downloading Apache Kafka {KAFKA_VERSION}, once: {progress}")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        (jars / MANIFEST_FILE_NAME).write_text(json.dumps(sizes_bytes, indent=1))
        shutil.rmtree(self.folder, ignore_errors=True)
        jars.rename(self.folder)
        shutil.rmtree(workplace, ignore_errors=True)

    def _cannot_download(self, what: str, error: Exception) -> CommandFailed:
        return CommandFailed(
            f"Apache Kafka {KAFKA_VERSION} could not be downloaded: {what} ({type(error).__name__}: {error}).",
            kept="everything; nothing was started.",
            advice="check the network and its proxy (https_proxy) and start again; or name a mirror of the central "
            "Maven repository with BERTH_JAR_REPOSITORY; or start a Kafka of your own and give its address: "
            f"BERTH_KAFKA=host:9092. The files are needed once and then kept in {self.folder}.",
        )


def resolve_pins() -> dict[str, str]:
    """Every jar that ``COORDINATES`` need today, as Maven resolves them: SHA-256 by coordinate. Needs the network."""
    with tempfile.TemporaryDirectory() as directory:
        context = _maven(Path(directory), None)
        coordinates = [replace(Coordinate.parse(text), scope="compile") for text in COORDINATES]
        roots, others = context.resolver.resolve([context.create_dependency(one) for one in coordinates])
        needed = [*roots, *(dependency for dependency in others if dependency.scope in ("compile", "runtime"))]
        artifacts: list[Artifact] = [dependency.artifact for dependency in needed]
        return {f"{one.groupId}:{one.artifactId}:{one.version}": _sha256(one.resolve()) for one in artifacts}


def _read_pins() -> dict[str, str]:
    return dict(line.split() for line in PINS_PATH.read_text().splitlines())


def _maven(cache: Path, repository: str | None) -> MavenContext:
    repositories = {"given": repository.rstrip("/")} if repository else None
    return MavenContext(repo_cache=cache, remote_repos=repositories, timeout=REQUEST_TIMEOUT_SECONDS)


def _file_name(coordinate: str) -> str:
    _group, name, version = coordinate.split(":")
    return f"{name}-{version}.jar"


def _fetch(context: MavenContext, coordinate: str, pin: str) -> Path:
    def fetch_once() -> Path:
        artifact: Artifact = context.create_dependency(coordinate).artifact
        try:
            jar: Path = artifact.resolve()
            if _sha256(jar) != pin:
                raise DamagedJar(f"{coordinate} is damaged: its SHA-256 is not the pinned one")
        except BaseException:
            if artifact.cached_path is not None:
                artifact.cached_path.unlink(missing_ok=True)  # or jgo would take the piece for the whole
            raise
        return jar

    attempts = Retrying(
        stop=stop_after_attempt(3),
        wait=wait_fixed(1),
        retry=retry_if_exception_type((requests.RequestException, DamagedJar)),
        reraise=True,
    )
    return attempts(fetch_once)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    for one, digest in sorted(resolve_pins().items()):
        typer.echo(f"{one} {digest}")
