"""A KV-cache pool that fails safely and Triton sampler kernels, for vLLM on Ascend NPUs.

Importing this package imports neither torch_npu nor vllm; see ``device`` for the one seam to the accelerator.
"""

__version__ = "0.1.0"
