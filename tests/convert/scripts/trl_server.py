"""A vLLM server, and a truncated weight for the difference between its logprobs and the trainer's."""

from trl import GRPOConfig

args = GRPOConfig(
    output_dir="server",
    use_vllm=True,
    vllm_mode="server",
    vllm_server_host="10.0.0.7",
    vllm_server_port=8001,
    vllm_server_timeout=600,
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_clip_max=2.0,
    vllm_importance_sampling_clip_min=0.5,
    logging_steps=1,
)
