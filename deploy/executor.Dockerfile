# The executor service. EXTRA is `executor` (CPU) or `gpu` (adds Triton). Both compile kernels at run time, with g++.
# TORCH_INDEX may name a package index with CPU builds of torch; the default index serves the CUDA build.
FROM python:3.12-slim
ARG EXTRA=executor
ARG TORCH_INDEX=
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HOME=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home gilir \
    && install -d -o gilir -g gilir -m 0770 /run/gilir /cache
WORKDIR /opt/gilir
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY common common
COPY kernels kernels
COPY executor_svc executor_svc
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[${EXTRA}]"
# Grammars. It names torch, transformers and triton as its own, which are not used here.
RUN pip install --no-cache-dir --no-deps --constraint constraints.txt xgrammar apache-tvm-ffi
USER gilir
ENTRYPOINT ["python", "-m", "executor_svc"]
