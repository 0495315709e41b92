# rlpipe on CPUs, as the quickstart uses it: docker build -f docker/cpu.Dockerfile -t rlpipe:cpu .
# An index with torch's CPU build makes the image smaller: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim-bookworm

ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# A compiler is for torch.compile and vLLM's kernels; vLLM's CPU build reads the machine's memory layout with libnuma.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libnuma1 make \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 rlpipe
WORKDIR /opt/rlpipe
COPY --chown=rlpipe . .
RUN chown rlpipe /opt/rlpipe
USER 1000
RUN PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL}" make install
ENV PATH=/opt/rlpipe/.venv/bin:${PATH}

# Runs write to outputs/ in the working directory: docker run --shm-size=8g -v "$PWD:/work" rlpipe:cpu train ...
WORKDIR /work
ENTRYPOINT ["rlpipe"]
CMD ["doctor"]
