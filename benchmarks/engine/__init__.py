"""What the connector costs in a real vLLM engine; must never assert anything."""
