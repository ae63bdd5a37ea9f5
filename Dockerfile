# rlplus on the image of vLLM. Not built or tried yet.
#   docker build -t rlplus . && docker run --gpus all --ipc host -v "$PWD":/workspace rlplus train run.yaml
FROM vllm/vllm-openai:v0.32.0
WORKDIR /opt/rlplus
COPY pyproject.toml setup.py LICENSE README.md ./
COPY rlplus rlplus
COPY src src
COPY kernels kernels
COPY configs configs
COPY csrc csrc
COPY bench bench
RUN pip install --no-cache-dir .
WORKDIR /workspace
ENTRYPOINT ["rlplus"]
