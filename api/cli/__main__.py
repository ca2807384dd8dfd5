"""``python -m api.cli``: the same as ``berth``, for processes that start each other."""

from api.cli.main import app

app()
