# syntax=docker/dockerfile:1

# specserve, for CPUs (default) or CUDA:
#   docker build -t specserve .
#   docker build -t specserve:cuda --build-arg VARIANT=cuda .
#
# The image holds no weights: they are fetched into the volume /models at the first start.
# TORCH_INDEX may name a package index with builds of torch for the variant; the CPU builds are
# several gigabytes smaller than what the default index has.

# Each FROM repeats the default: older buildahs, such as that of Debian 12, look for the stages they
# need before they read it here.
ARG VARIANT=cpu

# ---- base: Python, and the compiler that the CPU kernels need -----------------------------
# Kernels are compiled at the first start, for the very CPU they run on (-march=native), and
# kept in the volume. So the compiler belongs into the final image.
FROM python:3.11-slim-bookworm AS base-cpu
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*

# torch's CUDA builds carry the CUDA libraries; the driver comes from the host.
FROM base-cpu AS base-cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# ---- builder: a virtual environment with everything in it ---------------------------------
# hadolint ignore=DL3006
FROM base-${VARIANT:-cpu} AS builder
ARG TORCH_INDEX=""
WORKDIR /src
RUN python -m venv /opt/specserve
ENV PATH=/opt/specserve/bin:$PATH
COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY server server
COPY loadtest loadtest
COPY training training
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --upgrade "pip>=24.1,<27" \
    && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} .

# ---- final --------------------------------------------------------------------------------
# hadolint ignore=DL3006
FROM base-${VARIANT:-cpu} AS final
LABEL org.opencontainers.image.title="specserve" \
      org.opencontainers.image.description="OpenAI-compatible inference with lossless speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /models specserve \
    && install --directory --owner=10001 --group=10001 /models
COPY --from=builder /opt/specserve /opt/specserve
ENV PATH=/opt/specserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SPECSERVE_HOME=/models \
    HF_HOME=/models/huggingface
USER 10001
WORKDIR /models
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
# The first start fetches and converts the model before it listens.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=3)"]
# Exec form: signals reach the server, which drains for 30 s; stop it with --time 60.
# A container is reached through the ports that are published, so it listens on all of them.
ENTRYPOINT ["specserve"]
CMD ["serve", "--host", "0.0.0.0", "--insecure"]
