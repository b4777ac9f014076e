"""The real vLLM engine on the CPU, with the connector: whole scenarios, compared token by token with a run without one."""
