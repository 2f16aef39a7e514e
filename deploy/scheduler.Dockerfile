# The scheduler service: CPU only, no torch, no model files.
FROM python:3.12-slim
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/run/gilir
RUN useradd --uid 10001 --no-create-home gilir && install -d -o gilir -g gilir -m 0770 /run/gilir \
    && install -d -o gilir -g gilir -m 0700 /var/lib/gilir
WORKDIR /opt/gilir
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY common common
COPY scheduler_svc scheduler_svc
RUN pip install --no-cache-dir --constraint constraints.txt ".[cli,otel,postgres]"
# Grammars. It names torch, transformers and triton as its own, which are not used here.
RUN pip install --no-cache-dir --no-deps --constraint constraints.txt xgrammar apache-tvm-ffi
USER gilir
EXPOSE 8000
ENTRYPOINT ["python", "-m", "scheduler_svc"]
