"""``berth projector`` as a module, as tests start it."""

from api.cli.main import app

if __name__ == "__main__":
    app(["projector"])
