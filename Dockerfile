# syntax=docker/dockerfile:1
# asyncrl from a checkout. Targets: cpu (torch's CPU build, the embedded engine) and cuda (torch's CUDA build, vLLM, Ray).
#   docker build --target cpu -t asyncrl .
#   docker run --rm --shm-size=2g -v "$PWD/runs:/work/runs" asyncrl run configs/quickstart.yaml
# Weights go through /dev/shm: give it room for three copies of them. More: docs/install.md.

FROM python:3.12-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH

# Sources, uv and its cache stay behind in here.
FROM base AS build
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install "uv>=0.9,<1" && python -m venv /opt/venv
# With bytecode: the user of the image cannot write it, and each process would compile torch again.
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 VIRTUAL_ENV=/opt/venv
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY asyncrl asyncrl
COPY servers servers
# asyncrl/templates/content has links to these
COPY configs configs
COPY examples examples
COPY docs/tutorial.md docs/

FROM build AS build-cpu
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --torch-backend=cpu ".[train,harness,verifiers]"

FROM build AS build-cuda
RUN --mount=type=cache,target=/root/.cache/uv \
    # ray[default]: the server of jobs, which KubeRay and `ray job submit` ask
    uv pip install ".[vllm,harness,verifiers,ray]" "ray[default]" \
    # FlashAttention 3, for Hopper: from PyTorch's index for the CUDA version of its torch.
    && uv pip install --no-deps --index https://download.pytorch.org/whl/cu130 flash-attn-3

FROM base AS run
RUN useradd --uid 1000 --create-home asyncrl && install -d -o asyncrl /work /work/runs
WORKDIR /work
COPY configs configs
COPY examples examples
USER 1000
ENTRYPOINT ["asyncrl"]
CMD ["--help"]

# The libraries of CUDA come with torch, the driver with the host. torch.compile and vLLM compile with g++ as they run;
# this image's Python has its headers, which Triton needs. KubeRay's probes call wget.
FROM run AS cuda
USER 0
RUN apt-get update && apt-get install -y --no-install-recommends g++ wget && rm -rf /var/lib/apt/lists/*
USER 1000
COPY --from=build-cuda /opt/venv /opt/venv

FROM run AS cpu
COPY --from=build-cpu /opt/venv /opt/venv
