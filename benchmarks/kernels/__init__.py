"""Timings of the sampler operations beside vLLM's and vllm-ascend's; see docs/kernels.md for how to reproduce them."""
