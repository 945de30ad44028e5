# An image with 'stretto' as its command. docs/install.md says how to build and run it.
#
#   docker build -t stretto .                                        for CPUs
#   docker build -t stretto --build-arg TORCH=index --build-arg EXTRAS=ray .    for GPUs
FROM python:3.12-slim

# The build of torch: cpu; a version of CUDA as uv names it, such as cu130; or 'index', the one that
# the package index has, which for Linux brings CUDA along.
ARG TORCH=cpu
# Extras, with commas between them.
ARG EXTRAS=
# Options for uv, such as another index.
ARG UV_OPTIONS=

RUN pip install --no-cache-dir uv
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN if [ "$TORCH" = index ]; then from=; else from="--torch-backend $TORCH"; fi \
 && uv pip install --system --no-cache $from $UV_OPTIONS --constraint constraints.txt ".${EXTRAS:+[$EXTRAS]}"

# Models and what is made of them are kept in a volume; runs are written where the container starts.
ENV STRETTO_CACHE=/cache/stretto HF_HOME=/cache/huggingface
RUN useradd --create-home stretto && mkdir -p /cache /runs && chown stretto /cache /runs
USER stretto
VOLUME /cache
WORKDIR /runs
ENTRYPOINT ["stretto"]
CMD ["--help"]
