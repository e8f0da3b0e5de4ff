# Planning, checking and simulating, without a GPU: docker build -t meshwright . && docker run --rm --read-only --tmpfs /tmp meshwright fabric list
# With a model of your own: docker run --rm --read-only --tmpfs /tmp -v "$PWD:/work" meshwright train plan --model my.py:model ...
# The user is not root and the root file system may be read-only: compiled kernels are then kept under /tmp.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m venv /opt/meshwright \
 && /opt/meshwright/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH}" \
 && /opt/meshwright/bin/pip install --no-cache-dir ".[torch]"

FROM python:${PYTHON}-slim
RUN useradd --create-home --uid 10001 meshwright
COPY --from=build /opt/meshwright /opt/meshwright
ENV PATH=/opt/meshwright/bin:$PATH
USER 10001
WORKDIR /work
ENTRYPOINT ["meshwright"]
CMD ["--help"]
