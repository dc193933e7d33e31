# Two stages: build the wheel with compilers at hand, run it without them, as a plain user.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && pip wheel --no-cache-dir --wheel-dir /wheels -c constraints.txt ".[server,postgres]" \
    && pip install --no-cache-dir --no-index --find-links /wheels "lanterne[server]" \
    && cd / && XDG_CACHE_HOME=/cache python -m lanterne.backend.ingest.walker

FROM python:3.11-slim-bookworm AS server
RUN useradd --create-home --uid 10001 lanterne && mkdir /data && chown lanterne /data
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels "lanterne[server,postgres]" && rm -rf /wheels
COPY --from=build --chown=lanterne /cache/lanterne /home/lanterne/.cache/lanterne
USER lanterne
VOLUME /data
EXPOSE 4318 4317
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD ["python", "-m", "lanterne.healthcheck", "http://127.0.0.1:4318/readyz"]
CMD ["lanterne", "serve", "--host", "0.0.0.0", "--port", "4318", "--data", "/data"]

# Several backends over one PostgreSQL and one lake: the DuckDB that its extensions' wheels were built for.
FROM server AS scale
USER root
RUN mkdir /lake && chown lanterne /lake \
    && pip install --no-cache-dir "duckdb==1.5.5" "duckdb-extension-ducklake==1.5.5" "duckdb-extension-postgres-scanner==1.5.5"
USER lanterne
VOLUME /lake

FROM server AS trainer
USER root
# The plain package is a CUDA build of several GB; pass your mirror of the CPU build in PIP_ARGS.
ARG PIP_ARGS=""
COPY constraints.txt /tmp/constraints.txt
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir -c /tmp/constraints.txt ${PIP_ARGS} torch
USER lanterne
CMD ["lanterne", "run", "--", "torchrun", "--standalone", "--nproc-per-node", "4", "-m", "lanterne.collector.sim.train", "--steps", "2000", "--checkpoints", "/tmp/checkpoints"]
