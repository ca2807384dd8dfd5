"""The secret of one data directory: what signs its tokens when a deployment configures nothing.

``berth up`` and ``berth run`` make it once, of random bytes, in a file that only its owner can read. It is never
printed; ``berth token`` prints tokens that are signed with it. Removing the file ends every token at the next start.
"""

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from api.cli.directory_lock import cannot_write
from streams.settings import Settings, SettingsRefused

FILE_NAME: Final = "jwt-secret"
SECRET_BYTES: Final = 48


def ensure(settings: Settings) -> None:
    """Make the secret unless there is one, or a key is configured. Raises CommandFailed when it can't be written."""
    if settings.jwt_secret is not None or settings.jwt_public_key_file is not None:
        return
    path = settings.data_directory / FILE_NAME
    if path.exists():
        return
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
            file.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")
        unfinished.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def find(settings: Settings) -> str | None:
    """The secret, or None when there is none. Raises SettingsRefused when others may have read it."""
    path = settings.data_directory / FILE_NAME
    try:
        mode = path.stat().st_mode
        secret = path.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsRefused(f"{path} can't be read: {error}.", _advice(path)) from error
    if stat.S_IMODE(mode) & 0o077:
        raise SettingsRefused(f"{path} can be read by others, who could sign in with it.", _advice(path))
    if len(secret) < SECRET_BYTES:
        raise SettingsRefused(f"{path} is not what berth up writes.", _advice(path))
    return secret


def _advice(path: Path) -> str:
    return f"remove it (rm {path}) and start `berth up` again, which makes a new one; tokens made before then end."
