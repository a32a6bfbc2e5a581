# A server image, built from a clone:
#   docker build -t everybert .
#   docker build -t everybert:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#   docker run -p 8000:8000 -v "$PWD/my-model:/models/my-model:ro" everybert --model /models/my-model
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN useradd --create-home --uid 10001 everybert
WORKDIR /build
COPY pyproject.toml README.md LICENSE LICENSE-weights.md constraints.txt ./
COPY recipes recipes
COPY src src
RUN pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch \
    && pip install --no-cache-dir -c constraints.txt ".[serve]" \
    && rm -rf /build/*
USER everybert
WORKDIR /home/everybert
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=3s --start-period=60s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]
# EVERYBERT_API_KEY in the environment sets the keys; --allowed-hosts names the host that the proxy passes on.
ENTRYPOINT ["everybert", "serve", "--host", "0.0.0.0"]
CMD ["--model", "everybert-small"]
