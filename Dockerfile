# syntax=docker/dockerfile:1
# One image for CPU and CUDA. torch's default wheels bring their own CUDA libraries; what they need
# besides is the driver, which the container runtime mounts, and a C compiler with libc's headers:
# Triton builds a small C module when it first runs.
#
#   docker build --build-arg DEVICE=cpu --build-arg TORCH_INDEX=... -t ratoon .
#   docker build --build-arg DEVICE=cuda -t ratoon:cuda .
# By digest, of all platforms: 3.11.16. Another is given with its own.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${PYTHON_IMAGE} AS build
ARG DEVICE=cpu
ARG TORCH_INDEX=
WORKDIR /src
COPY LICENSE LICENSE
COPY deploy deploy
COPY examples examples
COPY proto proto
COPY kernels kernels
COPY clients clients
COPY service service
RUN --mount=type=cache,target=/root/.cache/pip \
    TORCH_INDEX="${TORCH_INDEX}" deploy/install.sh /opt/ratoon "${DEVICE}"

FROM ${PYTHON_IMAGE}
ARG DEVICE=cpu
RUN if [ "${DEVICE}" = cuda ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --create-home --uid 10001 ratoon \
 && install -d -o ratoon -g ratoon /var/lib/ratoon
COPY --from=build /opt/ratoon /opt/ratoon
COPY deploy/ratoon.yaml /etc/ratoon/ratoon.yaml
ENV PATH=/opt/ratoon/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RATOON_DATA_ROOT=/var/lib/ratoon \
    RATOON_MODELS_ROOT=/var/lib/ratoon/models \
    TORCHINDUCTOR_CACHE_DIR=/var/lib/ratoon/compiled/inductor \
    TRITON_CACHE_DIR=/var/lib/ratoon/compiled/triton
USER ratoon
WORKDIR /home/ratoon
VOLUME /var/lib/ratoon
EXPOSE 8000 8443
STOPSIGNAL SIGTERM
# By the service's own settings, so with TLS too.
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
  CMD ["ratoon", "health", "--config", "/etc/ratoon/ratoon.yaml"]
ENTRYPOINT ["ratoon"]
CMD ["serve", "--config", "/etc/ratoon/ratoon.yaml"]
