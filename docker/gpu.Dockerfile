# rlpipe on NVIDIA GPUs: docker build -f docker/gpu.Dockerfile -t rlpipe:gpu .
# vLLM's image has CUDA, a compiler, and the torch that this version of vLLM was built for.
FROM vllm/vllm-openai:v0.32.0

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /opt/rlpipe
COPY . .
RUN python3 -m pip install --editable ".[qlora,zero3,gguf,wandb]"

# docker run --gpus all --shm-size=16g -v "$PWD:/work" rlpipe:gpu train ...; on each further host of a cluster, with the
# folders of the output and of the model at the same paths as on the head, and the head's token:
# docker run --gpus all --shm-size=16g --network host -v /shared:/shared -e RAY_AUTH_MODE=token \
#     -v ~/.ray/auth_token:/root/.ray/auth_token:ro --entrypoint ray rlpipe:gpu start --address HEAD:6379 --block
WORKDIR /work
ENTRYPOINT ["rlpipe"]
CMD ["doctor"]
