"""The jars of Apache Kafka: resolved and downloaded once per user, then used without asking anybody.

They lie in one flat folder per version, with ``manifest.json`` (name and size of each) written last and the whole
folder moved into place by one rename. So a folder that exists is complete unless somebody removed files from it,
which the manifest shows; then it is downloaded again. Downloads happen beside it, under a lock, so that two first
starts at once don't disturb each other, and what a broken download leaves behind is thrown away by the next one.
"""

import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import platformdirs
import requests
from jgo.maven import Artifact, MavenContext
from jgo.parse import Coordinate
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from api.cli.command_failed import CommandFailed
from api.cli.directory_lock import DirectoryLock, cannot_write

KAFKA_VERSION: Final = "4.3.1"
COORDINATES: Final = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    "org.slf4j:slf4j-simple:1.7.36",
)
"""Kafka's broker, and the smallest logger for it: without one its reasons for failing would be lost."""
MANIFEST_FILE_NAME: Final = "manifest.json"
REQUEST_TIMEOUT_SECONDS: Final = 30
OTHER_DOWNLOAD_WAIT_SECONDS: Final = 600.0


class DamagedJar(RuntimeError):  # noqa: N818 - it reads as what it is
    """A downloaded file is not a whole jar."""


class KafkaJars:
    """The jars in ``directory`` (by default this user's cache), downloaded when they are asked for and not there.

    ``repository``: address of a Maven repository, for networks from which the central one can't be reached.
    """

    def __init__(self, directory: Path | None = None, repository: str | None = None) -> None:
        self.directory = directory or platformdirs.user_cache_path("berth") / "jars"
        self.folder = self.directory / f"kafka-{KAFKA_VERSION}"
        self._repository = repository

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
        """Whether every jar that was once downloaded is still there with its size."""
        try:
            manifest: dict[str, int] = json.loads((self.folder / MANIFEST_FILE_NAME).read_bytes())
            return all((self.folder / name).stat().st_size == size for name, size in manifest.items())
        except (OSError, ValueError):
            return False

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
        attempts = Retrying(
            stop=stop_after_attempt(3),
            wait=wait_fixed(1),
            retry=retry_if_exception_type((requests.RequestException, DamagedJar)),
            reraise=True,
        )
        report(f"asking which files Apache Kafka {KAFKA_VERSION} needs (once)")
        artifacts = attempts(self._resolve, workplace / "repository")
        sizes_bytes: dict[str, int] = {}
        for number, artifact in enumerate(artifacts, start=1):
            report(f"downloading Apache Kafka {KAFKA_VERSION}, once: file {number} of {len(artifacts)} (about 45 MB)")
            jar = attempts(_fetch, artifact)
            sizes_bytes[jar.name] = jar.stat().st_size
            jar.rename(jars / jar.name)
        (jars / MANIFEST_FILE_NAME).write_text(json.dumps(sizes_bytes, indent=1))
        shutil.rmtree(self.folder, ignore_errors=True)
        jars.rename(self.folder)
        shutil.rmtree(workplace, ignore_errors=True)

    def _resolve(self, cache: Path) -> list[Artifact]:
        context = MavenContext(
            repo_cache=cache,
            remote_repos={"given": self._repository.rstrip("/")} if self._repository else None,
            timeout=REQUEST_TIMEOUT_SECONDS,
        )
        coordinates = [replace(Coordinate.parse(text), scope="compile") for text in COORDINATES]
        roots, others = context.resolver.resolve([context.create_dependency(coordinate) for coordinate in coordinates])
        needed = [*roots, *(dependency for dependency in others if dependency.scope in ("compile", "runtime"))]
        return list({dependency.artifact.filename: dependency.artifact for dependency in needed}.values())

    def _cannot_download(self, what: str, error: Exception) -> CommandFailed:
        return CommandFailed(
            f"Apache Kafka {KAFKA_VERSION} could not be downloaded: {what} ({type(error).__name__}: {error}).",
            kept="everything; nothing was started.",
            advice="check the network and its proxy (https_proxy) and start again; or name a mirror of the central "
            "Maven repository with BERTH_JAR_REPOSITORY; or start a Kafka of your own and give its address: "
            f"BERTH_KAFKA=host:9092. The files are needed once and then kept in {self.folder}.",
        )


def _fetch(artifact: Artifact) -> Path:
    try:
        jar: Path = artifact.resolve()
        if not zipfile.is_zipfile(jar):
            raise DamagedJar(f"{jar.name} is damaged")
    except BaseException:
        if artifact.cached_path is not None:
            artifact.cached_path.unlink(missing_ok=True)  # or jgo would take the piece for the whole
        raise
    return jar
