# One image for every program of Berth; docker-compose.yml gives each its command.
FROM python:3.12-slim

WORKDIR /berth
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY streams streams
COPY projections projections
COPY api api
RUN pip install --no-cache-dir --constraint constraints.txt . \
    && useradd --system --create-home berth
USER berth
ENTRYPOINT ["berth"]
CMD ["--help"]
