"""The connector in the real vLLM engine on the CPU: whole scenarios, compared token by token with a run without it."""
